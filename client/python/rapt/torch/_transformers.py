"""rapt as an attention implementation of transformers.

transformers asks two functions that are registered under a name: one makes the masks of a forward pass, the other computes
the attention of each layer. The first says what the mask is (see Mask), the second trusts that and nothing else."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from ._masks import Mask, Rule, rule_of
from ._operators import Problem, check_integers, compute

NAME = "rapt"
SERVER_NAME = "rapt-server"

# Arguments of the model that it passes on to its layers, which say nothing about attention.
OF_MODEL = frozenset(
    (
        "cache_position",
        "deterministic",
        "grid_thw",
        "input_ids",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)


def _refuse(module: torch.nn.Module, what: str, implementation: str = NAME) -> NotImplementedError:
    return NotImplementedError(f"attn_implementation='{implementation}': {type(module).__name__} {what}")


# ---- Masks --------------------------------------------------------------------------------------


def _make_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    **more: Any,
) -> Tensor:
    """A mask function of transformers. transformers 4 gives cache_position in place of q_length and q_offset."""
    from transformers import masking_utils

    mask_function = mask_function or masking_utils.causal_mask_function
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    assert q_length is not None
    offset = q_offset - kv_offset
    size = (batch_size, 1, q_length, kv_length)
    lengths = torch.as_tensor(offset + q_length, dtype=torch.int64).reshape(1).expand(batch_size).contiguous()
    rule = None if use_vmap else rule_of(mask_function)
    if rule is not None and (rule.right == 0 or rule == Rule(None, None) or (isinstance(offset, int) and offset == 0)):
        padding = None if attention_mask is None else _padding_row(attention_mask, kv_length, kv_offset)
        return Mask(size, dtype, rule, lengths, padding)
    more |= {"q_length": q_length, "q_offset": q_offset} if cache_position is None else {"cache_position": cache_position}
    more |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function}
    more |= {"attention_mask": attention_mask, "use_vmap": use_vmap}
    more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense = masking_utils.sdpa_mask(**more)
    return Mask(size, dtype, Rule(None, None), lengths, dense=dense)


def _padding_row(attention_mask: Tensor, kv_length: int, kv_offset: int | Tensor) -> Tensor | None:
    """[B, 1, 1, T], true = visible, of a mask [B, tokens so far]; later keys are hidden. None if all are visible."""
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if isinstance(missing, Tensor) or missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, kv_length))
    row = attention_mask[:, torch.arange(kv_length) + kv_offset].bool()
    if not torch.compiler.is_compiling() and bool(row.all()):
        return None
    return row[:, None, None, :]


# ---- Attention ----------------------------------------------------------------------------------


def _wants_weights(module: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the model has been asked for output_attentions: its attention layers get that argument, or transformers
    collects the weights that they return."""
    if arguments.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    try:
        from transformers.utils import output_capturing
    except ImportError:  # transformers 4, which passes the argument on
        return False
    collected = output_capturing._active_collector.get()  # type: ignore[no-untyped-call]
    return collected is not None and any("attentions" in name for name in collected)


def _see(problem: Problem, module: torch.nn.Module, mask: Tensor | None, is_causal: bool | None, window: int | None) -> Problem:
    """The problem with what its queries see."""
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if isinstance(mask, Mask):
        return _see_described(problem, module, mask)
    if mask is not None:
        return problem._replace(mask=mask[..., :keys])  # as transformers 4 does, some of whose models have a column too many
    if is_causal is None and queries > 1:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None:
            raise _refuse(module, "has no mask and does not say whether it is causal")
        if is_causal:
            raise _refuse(module, "is causal but has no mask, with which transformers' eager attention sees all keys")
    causal = bool(is_causal) and queries > 1
    if causal and queries != keys:
        raise _refuse(module, f"is causal and has no mask, which does not say where its {queries} queries are among {keys} keys")
    if window is not None and window < keys:
        if not causal:
            raise _refuse(module, f"has sliding_window={window} and no mask, for {queries} queries and {keys} keys")
        return problem._replace(causal=True, window_left=window - 1)
    return problem._replace(causal=causal)


def _see_described(problem: Problem, module: torch.nn.Module, mask: Mask) -> Problem:
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    is_row = mask.shape[2] == 1 and (mask.dense is not None or mask.rule == Rule(None, None))  # for all queries
    if mask.shape[3] != keys or not (is_row or mask.shape[2] == queries):
        raise _refuse(module, f"has {queries} queries and {keys} keys, its mask {mask.shape[2]} and {mask.shape[3]}")
    if mask.dense is not None:
        return problem._replace(mask=mask.dense)
    problem = problem._replace(mask=mask.padding)
    left, right = mask.rule
    if left is None and right is None:
        return problem
    problem = problem._replace(window_left=left)
    if right == 0:
        return problem._replace(causal=True, key_lengths=mask.lengths, bottom_right=True)
    return problem._replace(window_right=right)  # query i is at key i: _make_mask() has no other such description


def _of_one_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As PyTorch's own function under autocast: rotary embedding leaves q and k in another type than v."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
    return tensors


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: returns y as [B, S, H, D], and the weights if they are wanted, which have no
    gradient. An argument that could change the result and is not known here is refused."""
    unknown = sorted(name for name, value in more.items() if value is not None and name not in OF_MODEL)
    if unknown:
        raise _refuse(module, f"passes {', '.join(unknown)}, which rapt does not support")
    q, k, v = _of_one_type(query, key, value)
    problem = Problem(
        q,
        k,
        v,
        attention_bias=position_bias,
        head_sink=None if s_aux is None else s_aux.reshape(-1).to(torch.promote_types(s_aux.dtype, torch.float32)),
        selected_indices=None if indices is None else check_integers("indices", indices).unsqueeze(1),
        dropout=dropout,
        scale=scaling,
        softcap=softcap or 0.0,
    )
    problem = _see(problem, module, attention_mask, is_causal, sliding_window)
    y, weights = compute(problem, _wants_weights(module, more))
    return y.transpose(1, 2).contiguous(), weights


# ---- Registration -------------------------------------------------------------------------------


_TABLES = ("ATTENTION_CLASSES", "ATTENTION_FUNCTION")
_HALVING = ("informer",)  # model types


def _check_attention(model: Any, implementation: str) -> None:
    """Refuses a model that would raise another error: its mask does not fit, it chooses its attention from a table of its own,
    or it calls no attention function, and a server does not get its keys and values."""
    if model.config.model_type in _HALVING:
        raise _refuse(model, "halves its keys from layer to layer, and has one mask for all", implementation)
    module = type(model).__module__
    names = vars(sys.modules[module])
    for name, table in names.items():
        if name.endswith(_TABLES) and implementation not in table:
            raise _refuse(model, f"has attention of its own, {name}, for {', '.join(table)} only", implementation)
    if implementation != SERVER_NAME or any(name.startswith(("ALL_ATTENTION_FUNCTIONS", "AutoModel")) for name in names):
        return  # of a model from other modules, those are checked
    for name, kind in names.items():
        if "Attention" in name and getattr(kind, "__module__", None) == module:
            raise _refuse(model, f"has attention of its own, {name}, which calls no attention function", implementation)


def register_transformers() -> None:
    """Makes attn_implementation="rapt" known to transformers; output_attentions=True returns the weights that the fused
    computation used. Needs transformers 4.57 or newer; with 5.24, also makes "rapt-server" known, for models with a
    RemoteCache.

    A model with another attention than rapt knows raises NotImplementedError, which names the argument."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, cache_utils

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)
    if hasattr(cache_utils, "get_layer_types_and_kwargs"):
        from . import _remote

        AttentionInterface.register(_remote.NAME, _remote.attention)
        AttentionMaskInterface.register(_remote.NAME, _remote.mask)
    if hasattr(PreTrainedModel.get_correct_attn_implementation, "__wrapped__"):
        return
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def checked(self: Any, requested_attention: str | None, *more: Any, **named: Any) -> Any:
        if requested_attention in (NAME, SERVER_NAME):
            _check_attention(self, requested_attention)
        return original(self, requested_attention, *more, **named)

    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]
