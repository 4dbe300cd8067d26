"""Attention, its parts and its gradients: from arrays and options to rapt_problem and rapt_arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from . import _arrays, _plot, _run, capi
from ._arrays import A, Array, Layout, Shape, short_repr
from ._options import Option, describe, shows, unknown

Number = float | int
Scores = Literal["scores", "softcapped", "biased", "weights"]


class Options(TypedDict, total=False):
    """The options of attention, attend and attend_backward; docs/variants.md explains those of variants. Letters: B
    batch, Hq query heads, Hkv key and value heads, Sq queries, Sk keys, P past keys, T = P + Sk, D and Dv the head sizes
    of keys and values. A table is float32 or has q's type. None means absent."""

    mask: Annotated[
        Array | None,
        Option(None, "broadcast to [B, Hq, Sq, T]; bool: true = attend; a float type: added to the scores"),
    ]
    causal: Annotated[bool, Option(False, "query i sees keys j <= i + offset; see alignment")]
    scale: Annotated[Number | None, Option(None, "of the scores; None: 1 / sqrt(D), or 1 for additive scores")]
    softcap: Annotated[Number, Option(0, "scores become softcap * tanh(score / softcap); 0: none")]
    window: Annotated[
        tuple[int | None, int | None] | None,
        Option(None, "(left, right): query i sees keys from i + offset - left to i + offset + right; None: unbounded"),
    ]
    alignment: Annotated[
        Literal["top_left", "bottom_right", "onnx"],
        Option(
            "top_left",
            "query i is at key i + offset. top_left: offset = P, and one causal query sees the first of five keys;"
            " bottom_right: offset = T - Sq, and it sees all five, or with key_lengths all of its row; onnx: as the"
            " operator, P with a past, else key_lengths - Sq",
        ),
    ]
    key_lengths: Annotated[
        Sequence[int] | Array | None,
        Option(None, "[B], int64: how many of the Sk keys are valid; the others are hidden"),
    ]
    past_key: Annotated[Array | None, Option(None, "[B, Hkv, P, D], before the keys in k")]
    past_value: Annotated[Array | None, Option(None, "[B, Hkv, P, Dv], before the values in v")]
    layout: Annotated[
        Literal["BHSD", "BSHD", "BSE"] | None,
        Option(
            None,
            "the axes of q, k, v, y, dy and relative_query; BSE is [B, S, heads * D]. None: BHSD of 4 axes, BSE of 3;"
            " of 2, [S, D], one head",
        ),
    ]
    query_heads: Annotated[int | None, Option(None, "of BSE; None: one head")]
    kv_heads: Annotated[int | None, Option(None, "of BSE; None: query_heads")]
    dropout: Annotated[tuple[float, int] | None, Option(None, "(probability, seed), of the weights")]
    softmax_in_fp64: Annotated[bool, Option(False, "softmax in float64 instead of float32; always, for float64 inputs")]

    attention_bias: Annotated[
        Array | None, Option(None, "a float type, broadcast to [B, Hq, Sq, T], added to the scores")
    ]
    head_sink: Annotated[Array | None, Option(None, "[Hq], a table: the score of one more key without a value")]
    alibi: Annotated[bool, Option(False, "a bias that falls with the distance, with ALiBi's slopes of heads")]
    alibi_slopes: Annotated[Array | None, Option(None, "[Hq] or [B, Hq], a table: other slopes")]
    bias_table: Annotated[Array | None, Option(None, "[N, Hq], a table: T5's bias of each bucket of distances")]
    is_bidirectional: Annotated[bool, Option(False, "half of the buckets of bias_table are for later keys")]
    max_distance: Annotated[int | None, Option(None, "of bias_table: larger distances share the last bucket; None: 128")]
    relative_bias: Annotated[Array | None, Option(None, "[1 or Hq, 2c + 1], a table: a bias of each clipped distance")]
    relative_keys: Annotated[Array | None, Option(None, "[1 or Hq, 2c + 1, D], a table: vectors beside the keys")]
    relative_values: Annotated[Array | None, Option(None, "[1 or Hq, 2c + 1, Dv], a table: vectors beside the values")]
    relative_query: Annotated[Array | None, Option(None, "as q: the queries of relative_keys, if they are others")]
    v_head_size: Annotated[int | None, Option(None, "without v: V is the first numbers of each row of k")]
    cos_cache: Annotated[
        Array | None, Option(None, "[M, r / 2] or [B, S, r / 2], a table: rotary embedding of q and k")
    ]
    sin_cache: Annotated[Array | None, Option(None, "as cos_cache")]
    position_ids: Annotated[Array | None, Option(None, "[B, Sq], int64: the rows of cos_cache of the queries")]
    key_position_ids: Annotated[Array | None, Option(None, "[B, Sk], int64: the rows of cos_cache of the keys")]
    interleaved: Annotated[bool, Option(False, "rotates pairs of neighbours, not of halves")]
    rotary_embedding_dim: Annotated[int, Option(0, "r, the numbers of a head that are rotated; 0: D")]
    rope_theta: Annotated[Number | None, Option(None, "the base of angles, in place of cos_cache and sin_cache")]
    rotary_keys: Annotated[bool | None, Option(None, "whether k is rotated as well; None: yes")]
    score_function: Annotated[
        Literal["dot_product", "additive"], Option("dot_product", "additive: Bahdanau's, with additive_weight")
    ]
    additive_weight: Annotated[Array | None, Option(None, "[1 or Hq, D], a table")]
    normalizer: Annotated[
        Literal["softmax", "sparsemax", "entmax15", "entmax"], Option("softmax", "makes weights of scores")
    ]
    alpha: Annotated[Number | None, Option(None, "of entmax, 1 to 2")]
    head_alpha: Annotated[Array | None, Option(None, "[Hq], a table: alpha of each head")]
    block_mask: Annotated[
        Array | None,
        Option(None, "bool, [1 or B, 1 or Hq, Sq / block_q, T / block_k], rounded up: true = the block is seen"),
    ]
    block_q: Annotated[int | None, Option(None, "queries of a block of block_mask")]
    block_k: Annotated[int | None, Option(None, "keys of a block of block_mask")]
    selected_indices: Annotated[
        Array | None, Option(None, "int32, [B, 1 or Hkv, Sq, N]: the keys that a query sees; -1: unused")
    ]
    global_mask: Annotated[Array | None, Option(None, "bool, [B, T]: true = the window hides no key from this one, nor this one")]
    prefix_keys: Annotated[int, Option(0, "how many first keys the window does not hide")]


describe(Options)


# ---- Tensors ------------------------------------------------------------------------------------

_FLOAT, _MASK, _QUERY, _TABLE, _LSE, _BOOL, _INT32, _INT64 = range(8)  # allowed types; see _check_type()


class _Slot(NamedTuple):
    """A tensor of the problem. An axis is a size of all tensors, in capitals, or a field of rapt_problem."""

    field: str  # of rapt_arguments
    axes: str
    dtype: int
    sets: str = ""  # a field of rapt_problem: the type, or 1


# In this order sizes are known before they are compared.
_SLOTS = {
    "q": _Slot("query", "B Hq Sq D", _FLOAT, "dtype"),
    "k": _Slot("key", "B Hkv Sk D", _QUERY),
    "v": _Slot("value", "B Hkv Sk Dv", _QUERY),
    "past_key": _Slot("past_key", "B Hkv P D", _QUERY),
    "past_value": _Slot("past_value", "B Hkv P Dv", _QUERY),
    "key_lengths": _Slot("key_lengths", "B", _INT64, "has_key_lengths"),
    "mask": _Slot("mask", "", _MASK, "mask_dtype"),
    "attention_bias": _Slot("bias", "", _FLOAT, "bias_dtype"),
    "head_sink": _Slot("head_sink", "Hq", _TABLE, "head_sink_dtype"),
    "alibi_slopes": _Slot("alibi_slopes", "alibi_slopes_batch Hq", _TABLE, "alibi_slopes_dtype"),
    "bias_table": _Slot("bias_table", "bias_table_buckets Hq", _TABLE, "bias_table_dtype"),
    "relative_bias": _Slot("relative_bias", "relative_bias_heads relative_bias_length", _TABLE, "relative_bias_dtype"),
    "relative_keys": _Slot("relative_keys", "relative_keys_heads relative_keys_length D", _TABLE, "relative_keys_dtype"),
    "relative_values": _Slot(
        "relative_values", "relative_values_heads relative_values_length Dv", _TABLE, "relative_values_dtype"
    ),
    "relative_query": _Slot("relative_query", "B Hq Sq D", _QUERY, "has_relative_query"),
    "cos_cache": _Slot(
        "cos_cache", "rotary_cache_batch rotary_cache_rows rotary_cache_pairs", _TABLE, "rotary_cache_dtype"
    ),
    "sin_cache": _Slot(
        "sin_cache", "rotary_cache_batch rotary_cache_rows rotary_cache_pairs", _TABLE, "rotary_cache_dtype"
    ),
    "position_ids": _Slot("position_ids", "B Sq", _INT64, "has_position_ids"),
    "key_position_ids": _Slot("key_position_ids", "B Sk", _INT64, "has_key_position_ids"),
    "additive_weight": _Slot("additive_weight", "additive_weight_heads D", _TABLE, "additive_weight_dtype"),
    "head_alpha": _Slot("head_alpha", "Hq", _TABLE, "head_alpha_dtype"),
    "block_mask": _Slot("block_mask", "block_mask_batch block_mask_heads Sq/block_q T/block_k", _BOOL, "has_block_mask"),
    "selected_indices": _Slot("selected_indices", "B selected_heads Sq selected_count", _INT32, "has_selected_indices"),
    "global_mask": _Slot("global_mask", "B T", _BOOL, "has_global_mask"),
    "dy": _Slot("output_gradient", "B Hq Sq Dv", _QUERY),
    "y": _Slot("forward_output", "B Hq Sq Dv", _QUERY, "has_forward"),
    "lse": _Slot("forward_lse", "B Hq Sq", _LSE),
    "dlse": _Slot("lse_gradient", "B Hq Sq", _LSE, "has_lse_gradient"),
}
_OUTPUTS = {
    "y": _Slot("output", "B Hq Sq Dv", _QUERY),
    "scores": _Slot("scores", "B Hq Sq T", _QUERY),
    "lse": _Slot("lse", "B Hq Sq", _LSE),
    "present_key": _Slot("present_key", "B Hkv T D", _QUERY),
    "present_value": _Slot("present_value", "B Hkv T Dv", _QUERY),
}
# Gradient -> input.
_GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"} | {
    f"d_{name}": name for name in _SLOTS if name not in ("q", "k", "v") and _SLOTS[name].field in capi.GRADIENTS
}
# The size of an axis in capitals is this field of rapt_problem.
_SIZES = {
    "B": "batch",
    "Hq": "query_heads",
    "Hkv": "kv_heads",
    "Sq": "query_length",
    "Sk": "key_length",
    "P": "past_length",
    "D": "head_size",
    "Dv": "value_head_size",
}
TENSORS = frozenset(_SLOTS) - {"q", "k", "v", "dy", "y", "lse", "dlse"}
_BROADCASTS = ("mask", "attention_bias")  # these have rank 1 to 4
OF_LAYOUT = ("q", "k", "v", "relative_query", "dy", "y", "out")
_HEADS = ("query_heads", "kv_heads")


_OPTIONAL_AXIS = ("alibi_slopes", "cos_cache", "sin_cache")  # their first axis may be absent
_COPY = "use numpy.ascontiguousarray, or contiguous() of a PyTorch tensor"


def check(condition: bool, error: str, fix: str = "") -> None:
    if not condition:
        raise ValueError(f"{error}; {fix}" if fix else error)


def text(shape: Sequence[object]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _lse_type(dtype: int) -> int:
    return capi.FP64 if dtype == capi.FP64 else capi.FP32


def _input_strides(name: str, layout: Layout) -> list[int]:
    """With 1 for axes of size 1: the library takes strides that are all 0 for those of a row-major tensor."""
    strides = [1 if size == 1 else stride for size, stride in zip(layout.shape, _arrays.strides_of(layout))]
    if 0 in layout.shape:
        return list(_arrays.row_major(layout.shape))
    check(min(strides) >= 0, f"{name} has a negative stride", _COPY)
    check(any(strides), f"{name} is one number that is broadcast; give it axes of size 1")
    may_stride = name in _BROADCASTS or name == "block_mask" or len(strides) < 4
    check(may_stride or strides[3] == 1, f"{name} is not contiguous: its last axis has stride {strides[-1]}", _COPY)
    return strides


LAYOUTS = {"BHSD": 1, "BSHD": 2, "BSE": 3}  # the values of the proto


def layout_of(options: Mapping[str, Any], rank: int) -> str:
    """The layout of a call whose q has this rank; [S, D] is read as [1, S, D]."""
    layout: str = options.get("layout") or ("BHSD" if rank > 3 else "BSE")
    wanted = 3 if choice("layout", layout, LAYOUTS) == LAYOUTS["BSE"] else 4
    check(rank in (2, 3, 4), f"q has {rank} axes; it must have 2 to 4")
    check(max(rank, 3) == wanted, f"layout is {layout}, which has {wanted} axes; q has {rank}")
    return layout


def heads_of(options: Mapping[str, Any]) -> dict[str, int]:
    """The heads of BSE."""
    query_heads = integer("query_heads", options.get("query_heads", 1), 1)
    return {"query_heads": query_heads, "kv_heads": integer("kv_heads", options.get("kv_heads", query_heads), 1)}


class _Filling:
    """Fills a rapt_problem and its rapt_arguments."""

    def __init__(self, options: dict[str, Any], q: Layout) -> None:
        self.problem, self.arguments = capi.Problem(), capi.Arguments()
        self._sizes: dict[str, tuple[int, str]] = {}  # axis -> size, and the tensor that has it
        self._rank = len(q.shape)
        layout = layout_of(options, self._rank)
        self._swaps = layout != "BHSD"
        given = [name for name in _HEADS if name in options]
        check(layout == "BSE" or not given, f"{' and '.join(given)} is given, but q has shape {text(q.shape)}, not [B, S, E]")
        self._heads = heads_of(options)
        self._rank3_is_batch = layout == "BSE" and not given  # of a mask

    def set_size(self, axis: str, size: int, source: str) -> None:
        self._sizes[axis] = size, source

    def size(self, axis: str) -> int:
        return self._sizes[axis][0]

    def write_sizes(self) -> None:
        for axis, (size, _) in self._sizes.items():
            field = _SIZES.get(axis, axis)
            if hasattr(capi.Problem, field):
                setattr(self.problem, field, size)

    def add_input(self, name: str, layout: Layout) -> None:
        slot = _SLOTS[name]
        self._check_type(name, slot, layout.dtype)
        layout = self._with_four_axes(name, layout)
        if slot.sets:
            setattr(self.problem, slot.sets, layout.dtype if slot.sets.endswith("dtype") else 1)
        if name in _BROADCASTS:
            self._add_mask(name, slot, layout)
            return
        axes = slot.axes.split()
        if name in _OPTIONAL_AXIS and len(layout.shape) < len(axes):
            axes = axes[1:]
        if name == "alibi_slopes" and len(axes) == 1:
            self.set_size("alibi_slopes_batch", 1, name)
        self._bind(name, self._in_layout(name, axes), layout.shape)
        if name == "key_lengths":  # a plain pointer
            check(layout.strides is None or layout.shape == (1,), f"{name} is not contiguous", _COPY)
        elif layout.strides is not None or (self._swaps and name in OF_LAYOUT):
            strides = _input_strides(name, layout)
            if name == "alibi_slopes" and len(axes) == 1:
                strides = [1, *strides]
            self._set_strides(name, slot, strides)

    def _with_four_axes(self, name: str, layout: Layout) -> Layout:
        """Of an array [B, S, heads * size] or [S, size] the axes [B, S, heads, size]."""
        if name not in OF_LAYOUT or self._rank not in (2, 3):
            return layout
        shape, strides = layout.shape, layout.strides
        check(len(shape) == self._rank, f"{name} has shape {text(shape)}; it must have {self._rank} axes, as q has")
        counts = "kv_heads" if name in ("k", "v") else "query_heads"
        heads = self._heads[counts]
        size, rest = divmod(shape[-1], heads)
        check(rest == 0, f"{name} has shape {text(shape)}; its last axis must be a multiple of {counts}, {heads}")
        rows = (1,) * (3 - self._rank) + shape[:-1]
        if strides is not None:
            strides = (1,) * (3 - self._rank) + (*strides[:-1], size * strides[-1], strides[-1])
        return layout._replace(shape=(*rows, heads, size), strides=strides)

    def _with_own_axes(self, name: str, shape: Shape) -> Shape:
        """The other way round, of the shape of an output."""
        if name not in OF_LAYOUT or self._rank not in (2, 3):
            return shape
        return (*shape[3 - self._rank : 2], shape[2] * shape[3])

    def _in_layout(self, name: str, axes: list[Any]) -> list[Any]:
        """Axes from those of BHSD, or the other way round."""
        return [axes[n] for n in (0, 2, 1, 3)] if self._swaps and name in OF_LAYOUT else axes

    def _set_strides(self, name: str, slot: _Slot, strides: list[int]) -> None:
        """`strides`: of the first axes of four; the others have size 1."""
        getattr(self.arguments, slot.field).strides[:] = (self._in_layout(name, strides) + [1, 1, 1])[:4]

    def _check_type(self, name: str, slot: _Slot, dtype: int) -> None:
        query = self.problem.dtype
        allowed = {
            _FLOAT: _arrays.FLOATS,
            _MASK: (capi.BOOL, *_arrays.FLOATS),
            _QUERY: (query,),
            _TABLE: (capi.FP32, query),
            _LSE: (_lse_type(query),),
            _BOOL: (capi.BOOL,),
            _INT32: (capi.INT32,),
            _INT64: (capi.INT64,),
        }[slot.dtype]
        names = " or ".join(dict.fromkeys(_arrays.NAMES[code] for code in allowed))
        fix = f"{name} != 0 is bool" if name == "mask" else ""
        check(dtype in allowed, f"{name} has type {_arrays.NAMES[dtype]}; it must be {names}", fix)

    def _bind(self, name: str, axes: list[str], shape: Shape) -> None:
        has = f"{name} has shape {text(shape)}"
        check(len(shape) == len(axes), f"{has}; it must be {text(axes)}")
        for axis, size in zip(axes, shape):
            known, source = self._sizes.setdefault(axis, (size, name))
            check(known == size, f"{has}, {text(axes)}; {axis} must be {known}, as in {source}")

    def _add_mask(self, name: str, slot: _Slot, layout: Layout) -> None:
        rank = len(layout.shape)
        check(1 <= rank <= 4, f"{name} has shape {text(layout.shape)}; its rank must be from 1 to 4")
        shape, strides = list(layout.shape), _input_strides(name, layout)
        if rank == 3 and self._rank3_is_batch:  # [B, Sq, T]
            shape.insert(1, 1)
            strides.insert(1, 1)
        getattr(self.problem, slot.field + "_shape")[:] = [1] * (4 - len(shape)) + shape
        getattr(self.arguments, slot.field).strides[:] = [1] * (4 - len(strides)) + strides

    def add_output(self, name: str, given: Layout | None) -> _run.Output:
        """`given`: the layout of the array for it, if it exists."""
        slot = _OUTPUTS[name]
        shape = tuple(self.size(axis) for axis in self._in_layout(name, slot.axes.split()))
        dtype = _lse_type(self.problem.dtype) if slot.dtype == _LSE else self.problem.dtype
        strides = list(_arrays.row_major(shape))
        shape = self._with_own_axes(name, shape)
        if given is not None:
            name = "out"
            check(
                (given.dtype, given.shape) == (dtype, shape),
                f"out has type {_arrays.NAMES[given.dtype]} and shape {text(given.shape)}; it must have"
                f" {_arrays.NAMES[dtype]} and {text(shape)}",
            )
            strides = _input_strides("out", self._with_four_axes("out", given))
            check(min(strides) > 0, "out repeats elements: it has a stride of 0")
        self._set_strides("y" if given else name, slot, strides)
        return _run.Output(name, slot.field, shape, dtype)

    def add_gradient(self, name: str, source: str, layout: Layout) -> _run.Output:
        field = _SLOTS[source].field
        self.problem.gradients |= 1 << capi.GRADIENTS.index(field)
        if source in OF_LAYOUT:
            shape = self._with_four_axes(source, layout).shape
            self._set_strides(source, _Slot(f"d_{field}", "", _QUERY), list(_arrays.row_major(shape)))
        return _run.Output(name, f"d_{field}", layout.shape, layout.dtype)


# ---- Scalars ------------------------------------------------------------------------------------


def integer(name: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; it must be from {least} to {most}")
    return number


def real(name: str, value: Any) -> float:
    try:
        return float(value + 0.0)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def boolean(name: str, value: Any) -> int:
    try:
        number = operator.index(value.item() if isinstance(value, np.bool_) else value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be True or False") from None
    check(number in (0, 1), f"{name} is {value!r}; it must be True or False")
    return number


def choice(name: str, value: Any, choices: dict[str, int]) -> int:
    if isinstance(value, str) and value in choices:
        return choices[value]
    raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def pair(name: str, value: Any, parts: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{name} is {value!r}; it must be ({parts})")
    return value


def window_sides(value: Any) -> dict[str, int]:
    """The sides of a window that are bounded."""
    sides = {}
    for side, keys in zip(("left", "right"), pair("window", value, "left, right")):
        if keys is None:
            continue
        sides[side] = integer(f"window's {side}", keys)
        check(sides[side] >= 0, f"window's {side} is {keys}; it must be at least 0, or None for no bound")
    return sides


def _set_window(problem: capi.Problem, value: Any) -> None:
    for side, keys in window_sides(value).items():
        setattr(problem, f"has_{side}_window", 1)
        setattr(problem, f"{side}_window", keys)


def _set_dropout(problem: capi.Problem, value: Any) -> None:
    probability, seed = pair("dropout", value, "probability, seed")
    problem.dropout_probability = real("dropout's probability", probability)
    problem.dropout_seed = integer("dropout's seed", seed, 0, 2**64 - 1)


def _set_nothing(problem: capi.Problem, value: Any) -> None:
    """Of options that are read elsewhere."""


def _field(name: str, convert: Callable[[str, Any], Any], given: str | None = None) -> Callable[[capi.Problem, Any], None]:
    """Sets the field of this name, and `given` to 1."""

    def put(problem: capi.Problem, value: Any) -> None:
        setattr(problem, name, convert(name, value))
        if given:
            setattr(problem, given, 1)

    return put


def _enumeration(name: str, choices: dict[str, int], field: str = "") -> Callable[[capi.Problem, Any], None]:
    return lambda problem, value: setattr(problem, field or name, choice(name, value, choices))



_SETTERS: dict[str, Callable[[capi.Problem, Any], None]] = {
    "causal": _field("causal", boolean),
    "scale": _field("scale", real, "has_scale"),
    "softcap": _field("softcap", real),
    "window": _set_window,
    "alignment": _enumeration("alignment", capi.ALIGNMENTS),
    "layout": _set_nothing,
    "query_heads": _set_nothing,
    "kv_heads": _set_nothing,
    "dropout": _set_dropout,
    "softmax_in_fp64": _field("softmax_in_fp64", boolean),
    "alibi": _field("alibi", boolean),
    "is_bidirectional": _field("is_bidirectional", boolean),
    "max_distance": _field("max_distance", integer, "has_max_distance"),
    "v_head_size": _set_nothing,
    "interleaved": _field("interleaved", boolean),
    "rotary_embedding_dim": _field("rotary_embedding_dim", integer),
    "rope_theta": _field("rope_theta", real, "has_rope_theta"),
    "rotary_keys": _field("rotary_keys", boolean, "has_rotary_keys"),
    "score_function": _enumeration("score_function", capi.SCORE_FUNCTIONS),
    "normalizer": _enumeration("normalizer", capi.NORMALIZERS),
    "alpha": _field("alpha", real, "has_alpha"),
    "block_q": _field("block_q", integer),
    "block_k": _field("block_k", integer),
    "prefix_keys": _field("prefix_keys", integer),
    "scores": _enumeration("scores", capi.SCORE_OUTPUTS, "score_output"),
}


# ---- Calls --------------------------------------------------------------------------------------


def _ceiling(name: str, length: int, block: Any) -> int:
    if block is None:
        raise ValueError(f"block_mask is given without {name}")
    return -(-length // integer(name, block, 1))


def fill(layouts: dict[str, Layout], options: dict[str, Any]) -> _Filling:
    filling = _Filling(options, layouts["q"])
    for name, value in options.items():
        _SETTERS[name](filling.problem, value)
    sized = [name for name in ("q", "k", "v", "past_key", "past_value") if name in layouts]
    for name in sized:
        filling.add_input(name, layouts[name])
    _complete_sizes(filling, layouts, options)
    for name in layouts:
        if name not in sized:
            filling.add_input(name, layouts[name])
    filling.write_sizes()
    return filling


def _complete_sizes(filling: _Filling, layouts: dict[str, Layout], options: dict[str, Any]) -> None:
    """Sets the sizes that no tensor has."""
    if "v" not in layouts:
        check("v_head_size" in options, "v is missing; without it, v_head_size says which part of a key is its value")
        filling.problem.values_in_keys = 1
        filling.set_size("Dv", integer("v_head_size", options["v_head_size"]), "v_head_size")
    else:
        check("v_head_size" not in options, "v and v_head_size are given; they exclude each other")
        check(("past_key" in layouts) == ("past_value" in layouts), "past_key and past_value belong together")
    if "past_key" not in layouts:
        check("past_value" not in layouts, "past_value is given without past_key")
        filling.set_size("P", 0, "past_key")
    total = filling.size("P") + filling.size("Sk")
    filling.set_size("T", total, "k and past_key")
    if "block_mask" in layouts:
        for axis, name, length in (("Sq/block_q", "block_q", filling.size("Sq")), ("T/block_k", "block_k", total)):
            check(name in options, f"block_mask is given without {name}")
            filling.set_size(axis, -(-length // integer(name, options[name], 1)), name)


def _prepared(context: capi.Context, filling: _Filling, inputs: Iterable[str], outputs: list[_run.Output]) -> _run.Prepared:
    plan = capi.Plan(context, filling.problem)
    return _run.Prepared(plan, filling.arguments, [_SLOTS[name].field for name in inputs], outputs)


def _prepare_forward(
    context: capi.Context,
    layouts: dict[str, Layout],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    given: dict[str, Layout],
) -> _run.Prepared:
    filling = fill(layouts, options)
    filling.problem.wants_lse = "lse" in wanted
    filling.problem.wants_present = "present_key" in wanted
    outputs = [filling.add_output(name, given.get("out") if name == "y" else None) for name in wanted]
    return _prepared(context, filling, layouts, outputs)


def _prepare_backward(
    context: capi.Context,
    layouts: dict[str, Layout],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    given: dict[str, Layout],
) -> _run.Prepared:
    filling = fill(layouts, options)
    outputs = [filling.add_gradient(name, _GRADIENTS[name], layouts[_GRADIENTS[name]]) for name in wanted]
    return _prepared(context, filling, layouts, outputs)


def run_forward(
    inputs: dict[str, Any], options: dict[str, Any], wanted: tuple[str, ...], out: dict[str, Any] | None = None
) -> dict[str, Any]:
    """attend() with options that are tensors among the inputs, and without what is absent. y is `out`, if it is given."""
    return _run.run(_prepare_forward, inputs, options, wanted, out)[0]


def run_backward(inputs: dict[str, Any], options: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """attend_backward() in the same way."""
    return _run.run(_prepare_backward, inputs, options, wanted)[0]


def plain(name: str, value: Any) -> Any:
    """A number, which tells plans apart, also of an array of one."""
    if value is None or isinstance(value, (int, float, str)) or not hasattr(value, "item"):
        return value
    check(not getattr(value, "requires_grad", False), f"{name} requires a gradient; rapt computes none of it", "use detach()")
    try:
        return value.item()
    except (RuntimeError, ValueError):
        raise ValueError(f"{name} has shape {text(value.shape)}; it must be one number") from None


def split(
    inputs: dict[str, Any], options: Mapping[str, Any], tensors: Collection[str], scalars: Collection[str]
) -> dict[str, Any]:
    """Adds those options that are tensors to the inputs and returns the others. None is absent."""
    rest = {}
    for name, value in options.items():
        if name not in tensors and name not in scalars:
            raise unknown(name, {*tensors, *scalars})
        if value is None:
            continue
        if name in tensors:
            inputs[name] = lengths(name, value) if name == "key_lengths" else value
        else:
            rest[name] = tuple(plain(name, x) for x in value) if isinstance(value, (list, tuple)) else plain(name, value)
    return rest


def lengths(name: str, value: Any) -> Any:
    """An array, also of a sequence of integers."""
    if isinstance(value, Sequence):
        return np.array([integer(name, n) for n in value], np.int64)
    return value


class Call(NamedTuple):
    """What a function was called with."""

    inputs: dict[str, Any]  # arrays
    options: dict[str, Any]  # the others, with hashable values
    wanted: tuple[str, ...]  # outputs


SCALARS = frozenset(_SETTERS) - {"scores"}

@shows(Options)
def attention(q: A, k: Array, v: Array | None = None, *, out: A | None = None, **options: Unpack[Options]) -> A:
    """Exact attention, softmax(scale * q k^T + mask) v, as the ONNX operator Attention defines it.

    q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] are NumPy arrays, PyTorch tensors on the CPU or other
    arrays with __dlpack__, of float32, float16, bfloat16 or float64, all of one type; Hq is a multiple of Hkv. They may
    also have 3 axes, [B, S, heads * D], with query_heads and kv_heads, or 2, [S, D]. They are read where they are: any
    strides will do, but the last axis has to be contiguous. Returns y [B, Hq, Sq, Dv], a new array of q's library, or
    `out`; it has as many axes as q.

    Causal attention lets query i see the keys j <= i + offset. If there are more keys than queries, say which of them
    the queries are: with q of 1 row and k of 5, causal=True sees the first key alone; alignment="bottom_right" sees all
    five, as does a call with 4 keys in past_key.

    Raises ValueError for sizes, types and options that do not fit, and for arrays on another device; TypeError for what
    is no array; MemoryError; NotImplementedError; RuntimeError for a tensor that requires a gradient. Threads may
    call it at the same time; it computes without the GIL."""
    inputs: dict[str, Any] = {"q": q, "k": k}
    if v is not None:
        inputs["v"] = v
    scalars = split(inputs, options, TENSORS, SCALARS) if options else {}
    given = None if out is None else {"out": out}
    results, _ = _run.run(_prepare_forward, inputs, scalars, ("y",), given)
    y: A = results["y" if out is None else "out"]
    return y


@dataclass(frozen=True, repr=False)
class AttendResult(Generic[A]):
    """What attend() returns. In a notebook it shows its scores as pictures."""

    y: A  # [B, Hq, Sq, Dv]
    scores: A | None = None  # [B, Hq, Sq, T], q's type
    lse: A | None = None  # [B, Hq, Sq], the logarithm of the sum of exp(score); float32, float64 for float64
    present_key: A | None = None  # [B, Hkv, T, D], the past keys and those of k
    present_value: A | None = None  # [B, Hkv, T, Dv]
    plan: str = ""  # "cpu/avx512 q96 k64 s1": backend, instruction set, tiles

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        outputs = {name: getattr(self, name) for name in ("y", "scores", "lse", "present_key", "present_value")}
        return _plot.summary(outputs, self.plan)


@shows(Options)
def attend(
    q: A,
    k: Array,
    v: Array | None = None,
    *,
    scores: Scores | None = None,
    lse: bool = False,
    present: bool = False,
    **options: Unpack[Options],
) -> AttendResult[A]:
    """attention() with more outputs: `scores` names the step to return, [B, Hq, Sq, T]: "scores", "softcapped",
    "biased" (with -inf for hidden keys) or "weights"; `lse`; `present`, the keys and values for the next call."""
    results, plan = _run.run(_prepare_forward, *forward_call(q, k, v, options, scores, lse, present))
    return AttendResult(**results, plan=plan.description)


def forward_call(
    q: Array, k: Array, v: Array | None, options: Options, scores: Scores | None = None, lse: bool = False, present: bool = False
) -> Call:
    inputs: dict[str, Any] = {"q": q, "k": k}
    if v is not None:
        inputs["v"] = v
    scalars = split(inputs, options, TENSORS, SCALARS)
    wanted = ["y"]
    if scores is not None:
        scalars["scores"] = scores
        wanted.append("scores")
    if boolean("lse", lse):
        wanted.append("lse")
    if boolean("present", present):
        wanted += ["present_key", "present_value"] if v is not None else ["present_key"]
    return Call(inputs, scalars, tuple(wanted))


@shows(Options)
def attend_backward(
    q: A,
    k: Array,
    v: Array | None,
    dy: Array,
    *,
    gradients: Sequence[str] | None = None,
    y: Array | None = None,
    lse: Array | None = None,
    dlse: Array | None = None,
    **options: Unpack[Options],
) -> dict[str, A]:
    """The gradients of a loss by the inputs of attention(), for its gradient dy by y.

    `gradients`: "dq", "dk", "dv" (the default), "d_mask", "d_head_sink", ... of inputs that are given, each with the
    type and shape of its input. With y and lse of the forward pass, the call need not compute them again. `dlse` is the
    gradient by lse. See docs/gradients.md."""
    call = backward_call(q, k, v, dy, gradients, y, lse, dlse, options)
    return _run.run(_prepare_backward, *call)[0]


def backward_call(
    q: Array,
    k: Array,
    v: Array | None,
    dy: Array,
    gradients: Sequence[str] | None,
    y: Array | None,
    lse: Array | None,
    dlse: Array | None,
    options: Options,
) -> Call:
    if (y is None) != (lse is None):
        raise ValueError("y and lse belong together: both or neither")
    inputs: dict[str, Any] = {"q": q, "k": k, "dy": dy}
    inputs |= {name: x for name, x in {"v": v, "y": y, "lse": lse, "dlse": dlse}.items() if x is not None}
    scalars = split(inputs, options, TENSORS, SCALARS)
    if gradients is None:
        gradients = ("dq", "dk", "dv") if v is not None else ("dq", "dk")
    if isinstance(gradients, str):
        raise TypeError(f"gradients is {gradients!r}; it must be a sequence of names, such as ['dq', 'dk']")
    for name in gradients:
        if name not in _GRADIENTS:
            raise ValueError(f"gradients has {name!r}; the gradients are {', '.join(_GRADIENTS)}")
        if _GRADIENTS[name] not in inputs:
            raise ValueError(f"gradients has {name}, but there is no {_GRADIENTS[name]}")
    return Call(inputs, scalars, tuple(gradients))


def merge(parts: Iterable[AttendResult[A] | tuple[A, A]], *, layout: Literal["BHSD", "BSHD"] = "BHSD") -> AttendResult[A]:
    """Attention over all keys from results over disjoint parts of them, each with y and lse; a part without keys has
    y 0 and lse -inf. The result has y and lse, so that it can be merged again."""
    pairs = [(part.y, part.lse) if isinstance(part, AttendResult) else part for part in parts]
    if not pairs:
        raise ValueError("parts is empty; merge() needs at least one part")
    choice("layout", layout, {"BHSD": 0, "BSHD": 1})
    ys, lses = [], []
    for n, (y, lse) in enumerate(pairs):
        if lse is None:
            raise ValueError(f"parts[{n}] has no lse; ask for it with attend(..., lse=True)")
        ys.append(_arrays.as_floats(f"parts[{n}].y", y))
        lses.append(_arrays.as_floats(f"parts[{n}].lse", lse))
        of_y = tuple(ys[n].shape[axis] for axis in ((0, 1, 2) if layout == "BHSD" else (0, 2, 1))) if ys[n].ndim == 4 else ()
        check(
            ys[n].shape == ys[0].shape and lses[n].shape == of_y,
            f"parts[{n}] has y of shape {text(ys[n].shape)} and lse of shape {text(lses[n].shape)}; they must be"
            f" [B, Hq, Sq, Dv] and [B, Hq, Sq], the same in all parts",
        )
    top = np.maximum.reduce(lses)
    shares = [np.exp(lse - np.where(top == -np.inf, 0, top)) for lse in lses]
    total = np.add.reduce(shares)
    y, lse = pairs[0]
    kind = _arrays.kind_of("parts[0].y", y)
    dtype = kind.read("parts[0].y", y)[1].dtype
    sum_of_parts = np.zeros_like(ys[0])
    for part, share in zip(ys, shares):
        weight = share / np.where(total == 0, 1, total)
        sum_of_parts += part * (weight if layout == "BHSD" else weight.swapaxes(1, 2))[..., None]
    with np.errstate(divide="ignore"):
        merged = top + np.log(total)
    return AttendResult(y=_made(y, sum_of_parts, dtype), lse=_made(y, merged, _lse_type(dtype)))


def _made(like: A, numbers: np.ndarray[Any, Any], dtype: int) -> A:
    """A new array of the kind of `like`."""
    kind = _arrays.kind_of("parts", like)
    result = kind.empty(like, numbers.shape, dtype)
    _arrays.as_numpy("result", result)[...] = _arrays.rounded(numbers, dtype)
    made: A = kind.finish(like, result)
    return made
