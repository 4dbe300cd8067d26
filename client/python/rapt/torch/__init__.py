"""rapt for PyTorch: attention as a custom operator, with gradients and torch.compile, and attention implementations for
transformers.

    import rapt.torch

    y = rapt.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = rapt.torch.attention(q, k, v, causal=True, window=(255, None), head_sink=sinks)
    y = rapt.torch.flex_attention(q, k, v, score_mod, block_mask)

    rapt.torch.register_transformers()
    model = AutoModel.from_pretrained(..., attn_implementation="rapt")
"""

from typing import TYPE_CHECKING, Any

from ._flex import flex_attention
from ._operators import attention, ragged_attention, scaled_dot_product_attention
from ._transformers import register_transformers

if TYPE_CHECKING:
    from ._remote import RemoteCache as RemoteCache

__all__ = [  # and RemoteCache, which needs transformers
    "attention",
    "flex_attention",
    "ragged_attention",
    "register_transformers",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> Any:
    if name != "RemoteCache":
        raise AttributeError(f"module 'rapt.torch' has no attribute {name!r}")
    try:
        from ._remote import RemoteCache
    except ImportError as error:
        raise ImportError(f"rapt.torch.RemoteCache needs transformers 5.24 or newer: {error}") from error
    return RemoteCache
