"""scaled_dot_product_attention as a custom operator of PyTorch, with gradients and torch.compile."""

from typing import Any

import torch
from torch import Tensor

from .._attention import attend, attend_backward


def _options(mask: Tensor | None, dropout_p: float, seed: Tensor | None, causal: bool, scale: float | None) -> Any:
    """Of rapt.attend. A mask with all strides 0 is copied, which rapt refuses."""
    if mask is not None and not any(mask.stride()):
        mask = mask.contiguous()
    dropout = None if seed is None else (dropout_p, int(seed))
    return {"mask": mask, "causal": causal, "scale": scale, "dropout": dropout}


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@torch.library.custom_op("rapt::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, lse and, if they are wanted, the weights; all of rank 4."""
    result = attend(
        _readable(q),
        _readable(k),
        _readable(v),
        lse=True,
        scores="weights" if weights else None,
        softcap=softcap,
        **_options(mask, dropout_p, seed, causal, scale),
    )
    assert result.lse is not None
    return result.y, result.lse, q.new_empty(0) if result.scores is None else result.scores


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty(*rows, v.shape[3]), lse, q.new_empty((*rows, k.shape[2]) if weights else 0)


@torch.library.custom_op("rapt::attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    lse: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and, if it is wanted, the gradient of the mask."""
    gradients = attend_backward(
        _readable(q),
        _readable(k),
        _readable(v),
        _readable(dy),
        gradients=("dq", "dk", "dv", "d_mask") if wants_mask else ("dq", "dk", "dv"),
        y=y,
        lse=lse,
        softcap=softcap,
        **_options(mask, dropout_p, seed, causal, scale),
    )
    return gradients["dq"], gradients["dk"], gradients["dv"], gradients.get("d_mask", q.new_empty(0))


@_attention_backward.register_fake
def _(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    lse: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_mask = mask.new_empty(mask.shape) if wants_mask and mask is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_mask


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, dropout_p, seed, *rest, _ = inputs
    ctx.save_for_backward(q, k, v, mask, output[0], output[1], seed)
    ctx.dropout_p, ctx.rest = dropout_p, rest


def _differentiate(ctx: Any, dy: Tensor, _lse: Tensor, _weights: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, y, lse, seed = ctx.saved_tensors
    wants_mask = ctx.needs_input_grad[3]
    dq, dk, dv, d_mask = _attention_backward(dy, q, k, v, mask, y, lse, ctx.dropout_p, seed, *ctx.rest, wants_mask)
    return dq, dk, dv, d_mask if wants_mask else None, None, None, None, None, None, None


attention.register_autograd(_differentiate, setup_context=_keep)


def seed_of(dropout_p: float) -> Tensor | None:
    """From PyTorch's generator, so that torch.manual_seed() repeats it."""
    return torch.randint(0, 2**62, ()) if dropout_p > 0 else None


def _four_axes(x: Tensor, batch: torch.Size) -> Tensor:
    """[..., H, S, D] as [B, H, S, D]; [..., S, D] of fewer axes has one head."""
    if x.dim() < 4:
        return x.reshape(-1, 1, *x.shape[-2:])
    return x.expand(*batch, *x.shape[-3:]).flatten(0, -4)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on the CPU, with its arguments and gradients, also of a float
    attn_mask. A query that sees no key gets 0. float16, bfloat16, float32 and float64.

    Raises ValueError for what does not fit, NotImplementedError for tensors on other devices."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if x.dim() != query.dim() or x.dim() < 2:
            raise ValueError(f"{name} has {x.dim()} axes, query {query.dim()}; all need the same number, at least 2")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal are given; they exclude each other")
    if query.dim() > 3 and key.shape[-3] not in (1, query.shape[-3]) and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[-3]} heads, key {key.shape[-3]}; enable_gqa=True permits groups of query heads"
        )
    batch = torch.Size()
    if query.dim() > 3:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors.values()))  # type: ignore[no-untyped-call]
    q, k, v = (_four_axes(x, batch) for x in tensors.values())
    mask = attn_mask
    if mask is not None and query.dim() == 3 and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    elif mask is not None and mask.dim() > 4:
        mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    y, _, _ = attention(q, k, v, mask, dropout_p, seed_of(dropout_p), is_causal, scale, 0.0, False)
    shape = (*batch, *y.shape[1:]) if query.dim() > 3 else (*query.shape[:-1], y.shape[-1])
    result: Tensor = y.reshape(shape)
    return result
