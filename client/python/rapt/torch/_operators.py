"""Attention as a custom operator of PyTorch, with gradients and torch.compile."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._attention import plain, run_backward, run_forward


class Problem(NamedTuple):
    """The arguments of the operators, of rank 4; the names are those of rapt.Options."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    attention_bias: Tensor | None = None
    head_sink: Tensor | None = None
    key_lengths: Tensor | None = None
    relative_bias: Tensor | None = None
    block_mask: Tensor | None = None
    selected_indices: Tensor | None = None
    seed: Tensor | None = None  # of dropout
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = False
    block_q: int | None = None
    block_k: int | None = None
    prefix_keys: int = 0

    def inputs(self) -> dict[str, Tensor]:
        """Of the library's calls."""
        inputs = {"q": _readable(self.q), "k": _readable(self.k), "v": _readable(self.v)}
        optional: tuple[Any, ...] = self[3:]
        for name, x in zip(_READ, optional):
            if x is not None:
                inputs[name] = _READ[name](x)
        if self.selected_indices is not None:
            inputs["selected_indices"] = self._selected_indices(self.selected_indices)
        return inputs

    def _selected_indices(self, x: Tensor) -> Tensor:
        """In the library's type."""
        if x.dtype == torch.int32:
            return x.contiguous()
        if x.numel() > 0 and not -1 <= int(x.min()) <= int(x.max()) < self.k.shape[2]:
            raise ValueError(f"selected_indices has {int(x.min())} to {int(x.max())}; k has {self.k.shape[2]} keys, and -1 is unused")
        return x.to(torch.int32).contiguous()

    def scalars(self) -> dict[str, Any]:
        """The other options of the library's calls."""
        scalars = _scalars(*self[_FIRST_SCALAR:])
        return scalars if self.seed is None else scalars | {"dropout": (self.dropout, int(self.seed))}


_TENSORS, _FIRST_SCALAR = (Problem._fields.index(name) for name in ("dropout", "causal"))


@functools.lru_cache(1024)
def _scalars(
    causal: bool,
    scale: float | None,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    bottom_right: bool,
    block_q: int | None,
    block_k: int | None,
    prefix_keys: int,
) -> dict[str, Any]:
    """Options of the library; those that are absent have no place."""
    window = (window_left, window_right)
    scalars = {
        "causal": causal or None,
        "scale": scale,
        "softcap": softcap or None,
        "window": None if window == (None, None) else window,
        "alignment": "bottom_right" if bottom_right else None,
        "block_q": block_q,
        "block_k": block_k,
        "prefix_keys": prefix_keys or None,
    }
    return {name: value for name, value in scalars.items() if value is not None}


_PROBLEM = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? attention_bias, Tensor? head_sink, Tensor? key_lengths,"
    " Tensor? relative_bias, Tensor? block_mask, Tensor? selected_indices, Tensor? seed, float dropout, bool causal,"
    " float? scale, float softcap, SymInt? window_left, SymInt? window_right, bool bottom_right, SymInt? block_q,"
    " SymInt? block_k, SymInt prefix_keys"
)
_GRADIENTS = {name: f"d_{name}" for name in ("mask", "attention_bias", "head_sink", "relative_bias")}  # that may be wanted


def check_integers(name: str, x: Tensor) -> Tensor:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} has type {x.dtype}; it must have a type of integers")
    return x


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _with_stride(x: Tensor) -> Tensor:
    """A tensor with all strides 0 is copied, which rapt refuses."""
    return x if any(x.stride()) else x.contiguous()


# How the optional tensors before selected_indices are read.
_READ: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": _with_stride,
    "attention_bias": _with_stride,
    "head_sink": Tensor.contiguous,
    "key_lengths": Tensor.contiguous,
    "relative_bias": Tensor.contiguous,
    "block_mask": _with_stride,
}


def _is_token_by_token(q: Tensor) -> bool:
    """Whether all heads of a token are together. Those of y are then as well, as PyTorch's: layers join them without a copy."""
    return q.shape[1] != 1 and q.shape[2] != 1 and q.stride(1) < q.stride(2)


def _token_by_token(q: Tensor, v: Tensor) -> Tensor:
    """[B, H, S, D], and no view, so that y may be changed in place."""
    batch, heads, queries, size = *q.shape[:3], v.shape[3]
    return q.new_empty_strided((batch, heads, queries, size), (heads * queries * size, size, heads * size, 1))


def _run(problem: Problem, scalars: dict[str, Any], *wanted: str) -> dict[str, Any]:
    """The results of the library, y among them."""
    if not _is_token_by_token(problem.q):
        return run_forward(problem.inputs(), scalars, ("y", *wanted))
    y = _token_by_token(problem.q, problem.v)
    return run_forward(problem.inputs(), scalars, ("y", *wanted), {"out": y}) | {"y": y}


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y, lse and, if they are wanted, the weights; all of rank 4."""
    *parts, weights = arguments
    problem = Problem(*parts)
    scalars = problem.scalars() | {"scores": "weights"} if weights else problem.scalars()
    results = _run(problem, scalars, *(("scores", "lse") if weights else ("lse",)))
    return results["y"], results["lse"], results["scores"] if weights else problem.q.new_empty(0)


_attention = torch.library.custom_op(
    "rapt::attention",
    _forward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({_PROBLEM}, bool weights) -> (Tensor, Tensor, Tensor)",
)


@_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_, weights = arguments
    rows = q.shape[:3]
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    y = _token_by_token(q, v) if _is_token_by_token(q) else q.new_empty(*rows, v.shape[3])
    return y, lse, q.new_empty((*rows, k.shape[2]) if weights else 0)


def _backward(*arguments: Any) -> list[Tensor]:
    """dq, dk, dv and the gradients of the wanted inputs."""
    dy, dlse, y, lse, *parts, wanted = arguments
    problem = Problem(*parts)
    names = ("dq", "dk", "dv", *(_GRADIENTS[name] for name in wanted))
    inputs = problem.inputs() | {"dy": _readable(dy), "y": y, "lse": lse}
    if dlse is not None:
        inputs["dlse"] = dlse.contiguous()
    results = run_backward(inputs, problem.scalars(), names)
    return [results[name] for name in names]


_attention_backward = torch.library.custom_op(
    "rapt::attention_backward",
    _backward,
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor dy, Tensor? dlse, Tensor y, Tensor lse, {_PROBLEM}, str[] wanted) -> Tensor[]",
)


@_attention_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    _, _, _, _, *parts, wanted = arguments
    problem = Problem(*parts)
    inputs = [problem.q, problem.k, problem.v, *(getattr(problem, name) for name in wanted)]
    return [x.new_empty(x.shape) for x in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    parts = inputs[:-1]
    ctx.save_for_backward(output[0], output[1], *(x for x in parts if isinstance(x, Tensor)))
    ctx.parts = [None if isinstance(x, Tensor) else x for x in parts]
    ctx.places = [n for n, x in enumerate(parts) if isinstance(x, Tensor)]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, dlse: Tensor | None, _weights: Tensor | None) -> tuple[Tensor | None, ...]:
    y, lse, *tensors = ctx.saved_tensors
    given = [x for x in (dy, dlse, *ctx.saved_tensors) if x is not None]
    _check_tangents(given)
    dy = torch.zeros_like(y) if dy is None else dy
    saved = dict(zip(ctx.places, tensors))
    problem = [saved.get(n, x) for n, x in enumerate(ctx.parts)]
    wants = dict(zip(Problem._fields, ctx.needs_input_grad))
    wanted = [name for name in _GRADIENTS if wants[name]]
    backward = _attention_backward if torch.is_grad_enabled() or not _is_plain(given) else _backward
    gradients = dict(zip(["q", "k", "v", *wanted], backward(dy, dlse, y, lse, *problem, wanted)))
    return *(gradients.get(name) for name in Problem._fields), None


_attention.register_autograd(_differentiate, setup_context=_keep)


class _Plain(torch.autograd.Function):
    """The operator without PyTorch's dispatch, which takes longer than a small problem."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_differentiate)


_TYPES = (Tensor, torch.nn.Parameter)


def _is_plain(tensors: list[Tensor]) -> bool:
    """Whether nothing records or replaces the operators that are called, and the tensors hold numbers on the CPU."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._autograd._profiler_enabled()
        or any(type(x) not in _TYPES or not x.is_cpu or x._is_zerotensor() or x.is_neg() for x in tensors)
    )


def _check_tangents(tensors: list[Tensor]) -> None:
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in tensors):
        raise NotImplementedError("rapt.torch has no derivatives of forward mode, as torch.func.jvp asks for")


def _function_for(problem: Problem) -> Any:
    """What computes the results of the operator: the operator itself, or what is faster and does the same here."""
    arguments: tuple[Any, ...] = problem[:_TENSORS]
    tensors = [x for x in arguments if x is not None]
    _check_tangents(tensors)
    if not _is_plain(tensors):
        return _attention
    return _Plain.apply if torch.is_grad_enabled() and any(x.requires_grad for x in tensors) else _forward


_HOLDERS = (Tensor, np.ndarray, np.generic)


def _with_numbers(problem: Problem) -> Problem:
    """Also of tensors of one number."""
    numbers: tuple[Any, ...] = problem[_TENSORS:]
    held = {name: plain(name, x) for name, x in zip(Problem._fields[_TENSORS:], numbers) if isinstance(x, _HOLDERS)}
    return problem._replace(**held) if held else problem


def compute_with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    problem = _with_numbers(problem)
    y, lse, _ = _function_for(problem)(*problem, False)
    return y, lse


def compute(problem: Problem, weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """y and the weights. With dropout and no seed, PyTorch's generator gives one, so that torch.manual_seed() repeats it."""
    problem = _with_numbers(problem)
    if problem.dropout != 0 and problem.seed is None:  # the library refuses what is no probability
        problem = problem._replace(seed=torch.randint(0, 2**62, ()))
    function = _function_for(problem)
    if function is _forward and not weights:  # nobody reads lse
        return _run(problem, problem.scalars())["y"], None
    y, _, scores = function(*problem, weights)
    return y, scores.detach() if weights else None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int | None, int | None] | None = None,
    alignment: Literal["top_left", "bottom_right"] = "top_left",
    key_lengths: Tensor | Sequence[int] | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    selected_indices: Tensor | None = None,
    relative_bias: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    prefix_keys: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """rapt.attention with gradients: of query, key, value, attention_bias, relative_bias, head_sink and a mask of floats.
    All have 4 axes, [B, H, S, D]; query has a multiple of key's heads. rapt.Options explains the arguments;
    key_lengths and selected_indices may have any type of integers.

    Raises ValueError for what does not fit, NotImplementedError for tensors on other devices."""
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"alignment is {alignment!r}; it must be 'top_left' or 'bottom_right'")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} axes; it must have 4, [B, H, S, D]")
    left, right = window or (None, None)
    if key_lengths is not None:
        key_lengths = check_integers("key_lengths", torch.as_tensor(key_lengths)).to(torch.int64)
    if selected_indices is not None:
        check_integers("selected_indices", selected_indices)
    problem = Problem(
        query,
        key,
        value,
        mask=mask,
        attention_bias=attention_bias,
        head_sink=head_sink,
        selected_indices=selected_indices,
        key_lengths=key_lengths,
        relative_bias=relative_bias,
        block_mask=block_mask,
        block_q=block_q,
        block_k=block_k,
        prefix_keys=prefix_keys,
        dropout=dropout_p,
        causal=causal,
        scale=scale,
        softcap=softcap,
        window_left=left,
        window_right=right,
        bottom_right=alignment == "bottom_right",
    )
    return compute(problem)[0]


def _lengths(name: str, starts: Tensor | Sequence[int], tokens: int) -> list[int]:
    places = check_integers(name, torch.as_tensor(starts))
    lengths: list[int] = places.diff().tolist() if places.dim() == 1 else []
    if not lengths or int(places[0]) != 0 or int(places[-1]) != tokens or min(lengths) < 0:
        raise ValueError(f"{name} is {places.tolist()}; it must rise from 0 to the number of tokens, {tokens}")
    return lengths


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor | Sequence[int],
    cu_seq_k: Tensor | Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    """attention() of sequences of different lengths, without padding, with gradients. query [T, Hq, D], key and value have the
    tokens of all sequences, one sequence after the other; cu_seq_q [N + 1] says where each begins and the last ends, cu_seq_k
    the same of key and value if they have other lengths. `options`: those of attention() that hold for any sequence, such as
    causal, window, alignment, softcap and head_sink."""
    own = ("attention_bias", "block_mask", "key_lengths", "mask", "selected_indices")
    given = [name for name in own if options.get(name) is not None]
    if given:
        raise ValueError(f"{given[0]} is given, which has places in a sequence; those of ragged_attention() differ in length")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{name} has {x.dim()} axes; it must have 3, [T, H, D]")
    queries = _lengths("cu_seq_q", cu_seq_q, len(query))
    keys = queries if cu_seq_k is None else _lengths("cu_seq_k", cu_seq_k, len(key))
    if len(keys) != len(queries) or sum(keys) != len(key) or len(value) != len(key):
        raise ValueError(f"there are {len(queries)} sequences of {len(query)} queries, {len(keys)} of {len(key)} keys, {len(value)} values")
    parts = []
    for q, k, v in zip(torch.split(query, queries), torch.split(key, keys), torch.split(value, keys)):
        if len(q) == 0 or len(k) == 0:
            parts.append(q.new_zeros((*q.shape[:2], v.shape[2])))
        else:
            parts.append(attention(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), **options)[0].transpose(0, 1))
    return torch.cat(parts)


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
    if query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        return compute(Problem(query, key, value, attn_mask, dropout=dropout_p, causal=is_causal, scale=scale))[0]
    batch = torch.Size()
    if query.dim() > 3:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors.values()))  # type: ignore[no-untyped-call]
    q, k, v = (_four_axes(x, batch) for x in tensors.values())
    mask = attn_mask
    if mask is not None and query.dim() == 3 and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    elif mask is not None and mask.dim() > 4:
        mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    y, _ = compute(Problem(q, k, v, mask=mask, dropout=dropout_p, causal=is_causal, scale=scale))
    shape = (*batch, *y.shape[1:]) if query.dim() > 3 else (*query.shape[:-1], y.shape[-1])
    result: Tensor = y.reshape(shape)
    return result
