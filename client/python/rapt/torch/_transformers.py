"""rapt as an attention implementation of transformers."""

from typing import Any

import torch
from torch import Tensor

from ._operators import attention, seed_of


def _wants_weights(arguments: dict[str, Any]) -> bool:
    """Whether the model has been asked for output_attentions: its attention layers get that argument, or transformers
    collects the weights that they return."""
    from transformers.utils import output_capturing

    if arguments.get("output_attentions"):
        return True
    collected = output_capturing._active_collector.get()  # type: ignore[no-untyped-call]
    return collected is not None and any("attentions" in name for name in collected)


def _transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: returns y as [B, S, H, D], and the weights if they are wanted, which have no
    gradient."""
    for name in ("position_bias", "s_aux"):
        if more.get(name) is not None:
            raise NotImplementedError(f"attn_implementation='rapt' does not support {name}, which this model has")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    causal = is_causal and attention_mask is None and query.shape[2] > 1
    softcap = more.get("softcap") or 0.0
    wants_weights = _wants_weights(more)
    y, _, weights = attention(
        query, key, value, attention_mask, dropout, seed_of(dropout), causal, scaling, softcap, wants_weights
    )
    return y.transpose(1, 2).contiguous(), weights.detach() if wants_weights else None


def register_transformers() -> None:
    """Makes attn_implementation="rapt" known to transformers; output_attentions=True returns the weights that the fused
    computation used. Needs transformers 5."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("rapt", _transformers_attention)
    AttentionMaskInterface.register("rapt", sdpa_mask)
