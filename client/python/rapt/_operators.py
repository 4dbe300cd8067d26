"""Linear attention, and attention by locality-sensitive hashing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Required, TypedDict, Unpack

from . import _arrays, _run, capi
from ._arrays import A, Array, Layout, short_repr
from ._attention import Call, Number, boolean, check, choice, integer, real, split, text
from ._options import REQUIRED, Option, describe, required, shows

DType = Literal["float32", "float16", "bfloat16", "float64"]
_DTYPES = {name: code for code, name in _arrays.NAMES.items() if code in _arrays.FLOATS}


class _Shapes:
    """Compares shapes with axes given by name. The arrays of these operators are row-major."""

    def __init__(self, layouts: dict[str, Layout], sizes: dict[str, int]) -> None:
        self._layouts, self._sizes = layouts, sizes
        for name, layout in layouts.items():
            check(layout.strides is None, f"{name} is not contiguous", "use numpy.ascontiguousarray or contiguous()")

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def axis(self, name: str, axis: int, rank: int) -> int:
        """The size of an axis of a tensor that has this rank."""
        shape = self._layouts[name].shape
        check(len(shape) == rank, f"{name} has shape {text(shape)}; its rank must be {rank}")
        return shape[axis]

    def heads_in(self, name: str, heads: str) -> int:
        """The size of a head, of a tensor [B, T, heads * size]."""
        width = self.axis(name, 2, 3)
        check(width % self[heads] == 0, f"{name}'s last axis is {width}; it must be a multiple of {heads}, {self[heads]}")
        return width // self[heads]

    def check(self, name: str, axes: str, dtype: int | None = None, **sizes: int) -> int:
        """Returns the type, 0 of a tensor that is absent. `axes`: names, separated by commas, of which a product is
        allowed. `dtype`: the one that it must have; else any float type."""
        layout = self._layouts.get(name)
        if layout is None:
            return 0
        allowed = _arrays.FLOATS if dtype is None else (dtype,)
        names = " or ".join(_arrays.NAMES[code] for code in allowed)
        check(layout.dtype in allowed, f"{name} has type {_arrays.NAMES[layout.dtype]}; it must be {names}")
        self._sizes |= sizes
        want = [_product(axis, self._sizes) for axis in axes.split(",")]
        check(list(layout.shape) == want, f"{name} has shape {text(layout.shape)}; it must be [{axes}], {text(want)}")
        return layout.dtype


def _product(axis: str, sizes: dict[str, int]) -> int:
    result = 1
    for name in axis.split("*"):
        result *= int(name) if name.strip().isdigit() else sizes[name.strip()]
    return result


@dataclass(frozen=True, repr=False)
class LinearResult(Generic[A]):
    output: A  # [B, T, Hq * d_v]
    present_state: A | None = None  # [B, Hkv, features, d_v], the past_state of the tokens that follow
    present_normalizer: A | None = None  # [B, Hkv, features], their past_normalizer
    relative_error: float | None = None  # with error_rows
    plan: str = ""

    __repr__ = short_repr


class LinearOptions(TypedDict, total=False):
    """The options of linear_attention. Letters: B batch, T tokens, Hq query heads, Hkv key and value heads, d_k and d_v the
    head sizes of keys and values; features are d_k, or num_features of the feature map "favor", which estimates softmax
    attention."""

    query_heads: Required[Annotated[int, Option(REQUIRED, "Hq")]]
    kv_heads: Required[Annotated[int, Option(REQUIRED, "Hkv")]]
    update_rule: Annotated[Literal["gated_delta", "linear", "gated", "delta"], Option("gated_delta", "what a token adds to S")]
    past_state: Annotated[Array | None, Option(None, "[B, Hkv, features, d_v], of the tokens before; None: 0")]
    past_normalizer: Annotated[
        Array | None, Option(None, "[B, Hkv, features], beside past_state if the output is normalized")
    ]
    decay: Annotated[Array | None, Option(None, "[B, T, Hkv] or [B, T, Hkv * d_k], usually at most 0")]
    beta: Annotated[Array | None, Option(None, "[B, T, Hkv] or [B, T, 1], usually 0 to 1")]
    projection: Annotated[Array | None, Option(None, "[num_features, d_k], the directions of favor; None: drawn from seed")]
    key_lengths: Annotated[Sequence[int] | Array | None, Option(None, "[B], int64: how many of the T tokens are valid")]
    scale: Annotated[Number | None, Option(None, "None: 1 / sqrt(d_k)")]
    causal: Annotated[bool, Option(True, "False: every token sees all of them")]
    feature_map: Annotated[Literal["none", "elu1", "relu", "favor"], Option("none", "of queries and keys")]
    normalize: Annotated[bool, Option(False, "divide by the sum of the products with keys")]
    num_features: Annotated[int | None, Option(None, "of favor; None: the rows of projection, or floor(d_k ln d_k)")]
    seed: Annotated[int, Option(0, "of the directions of favor")]
    state_type: Annotated[DType | None, Option(None, "of present_state; None: past_state's, or query's")]
    chunk_size: Annotated[int, Option(0, "a hint, which changes only the rounding; 0: 64")]
    error_rows: Annotated[int, Option(0, "of favor: rows whose error is measured")]
    present_state: Annotated[bool, Option(False, "return it")]
    present_normalizer: Annotated[bool, Option(False, "return it")]


describe(LinearOptions)

_LINEAR_TENSORS = ("past_state", "past_normalizer", "decay", "beta", "projection", "key_lengths")


def _given(options: Mapping[str, Any], kind: type, tensors: Sequence[str], inputs: dict[str, Any]) -> dict[str, Any]:
    """Adds those options that are tensors to the inputs, and returns the others."""
    given = split(inputs, options, tensors, kind.__annotations__.keys() - set(tensors))
    for name in required(kind):
        if name not in given:
            raise TypeError(f"{name} is missing")
    return given


def _wanted(given: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in names if boolean(name, given.get(name, False))]


@shows(LinearOptions)
def linear_attention(query: A, key: Array, value: Array, **options: Unpack[LinearOptions]) -> LinearResult[A]:
    """A state instead of keys, as the ONNX operator LinearAttention: for each token S = e^decay S + k u^T and
    output = scale * S^T q, with u = value, or beta * (value - (e^decay S)^T k) of a delta rule.

    query [B, T, Hq * d_k], key [B, T, Hkv * d_k] and value [B, T, Hkv * d_v] have one float type. All arrays are row-major.
    rapt.LinearOptions lists the options. Errors are those of attention()."""
    results, plan = _run.run(_prepare_linear, *linear_call(query, key, value, options))
    return linear_result(results, plan.description)


def linear_result(outputs: dict[str, Any], plan: str) -> LinearResult[Any]:
    if "relative_error" in outputs:
        outputs["relative_error"] = float(outputs["relative_error"][0])
    return LinearResult(**outputs, plan=plan)


def linear_call(query: Array, key: Array, value: Array, options: LinearOptions) -> Call:
    inputs: dict[str, Any] = {"query": query, "key": key, "value": value}
    given = _given(options, LinearOptions, _LINEAR_TENSORS, inputs)
    wanted = _wanted(given, ("present_state", "present_normalizer"))
    state_type = given.get("state_type")
    fields = {
        "query_heads": integer("query_heads", given["query_heads"], 1, 65536),
        "kv_heads": integer("kv_heads", given["kv_heads"], 1, 65536),
        "update_rule": choice("update_rule", given.get("update_rule", "gated_delta"), capi.UPDATE_RULES),
        "scale": real("scale", given.get("scale", 0)),
        "bidirectional": not boolean("causal", given.get("causal", True)),
        "feature_map": choice("feature_map", given.get("feature_map", "none"), capi.FEATURE_MAPS),
        "normalize": boolean("normalize", given.get("normalize", False)),
        "num_features": integer("num_features", given["num_features"], 1, 65536) if "num_features" in given else 0,
        "seed": integer("seed", given.get("seed", 0), 0, 2**64 - 1),
        "state_dtype": 0 if state_type is None else choice("state_type", state_type, _DTYPES),
        "chunk_size": integer("chunk_size", given.get("chunk_size", 0)),
        "error_rows": integer("error_rows", given.get("error_rows", 0)),
    }
    return Call(inputs, fields, ("output", *wanted, *(["relative_error"] if fields["error_rows"] else [])))


def _prepare_linear(
    context: capi.Context,
    layouts: dict[str, Layout],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    given: dict[str, Layout],
) -> _run.Prepared:
    return _prepared(context, layouts, *linear_problem(layouts, options, wanted))


def linear_problem(
    layouts: dict[str, Layout], options: dict[str, Any], wanted: tuple[str, ...]
) -> tuple[capi.LinearProblem, list[_run.Output]]:
    """The problem of a linear_call(), and its outputs."""
    shapes = _Shapes(layouts, {"Hq": options["query_heads"], "Hkv": options["kv_heads"]})
    batch, tokens = shapes.axis("query", 0, 3), shapes.axis("query", 1, 3)
    key_size, value_size = shapes.heads_in("query", "Hq"), shapes.heads_in("value", "Hkv")
    dtype = shapes.check("query", "B,T,Hq*d_k", B=batch, T=tokens, d_k=key_size, d_v=value_size)
    shapes.check("key", "B,T,Hkv*d_k", dtype)
    shapes.check("value", "B,T,Hkv*d_v", dtype)
    features = key_size
    if options["feature_map"] == capi.FEATURE_MAPS["favor"]:
        if "projection" in layouts:
            options = {**options, "num_features": options["num_features"] or shapes.axis("projection", 0, 2)}
        features = options["num_features"] or _usual_features(key_size)
    problem = capi.LinearProblem(
        **options,
        dtype=dtype,
        batch=batch,
        tokens=tokens,
        key_size=key_size,
        value_size=value_size,
        projection_dtype=shapes.check("projection", "features,d_k", features=features),
        past_dtype=shapes.check("past_state", "B,Hkv,features,d_v", features=features),
        has_key_lengths=shapes.check("key_lengths", "B", _arrays.INT64) != 0,
        wants_present_state="present_state" in wanted,
        wants_present_normalizer="present_normalizer" in wanted,
    )
    if "past_normalizer" in layouts:
        check("past_state" in layouts, "past_normalizer is given without past_state")
        shapes.check("past_normalizer", "B,Hkv,features", problem.past_dtype)
    elif "past_state" in layouts:
        check(not (options["normalize"] or features != key_size), "past_normalizer is missing beside past_state")
    if "decay" in layouts:
        problem.has_key_decays = shapes.axis("decay", 2, 3) != options["kv_heads"]
        problem.decay_dtype = shapes.check("decay", "B,T,Hkv*d_k" if problem.has_key_decays else "B,T,Hkv")
    if "beta" in layouts:
        problem.has_one_beta = shapes.axis("beta", 2, 3) == 1
        problem.beta_dtype = shapes.check("beta", "B,T,1" if problem.has_one_beta else "B,T,Hkv")
    state = options["state_dtype"] or problem.past_dtype or dtype
    outputs = {
        "output": (batch, tokens, options["query_heads"] * value_size),
        "present_state": (batch, options["kv_heads"], features, value_size),
        "present_normalizer": (batch, options["kv_heads"], features),
        "relative_error": (1,),
    }
    types = {"output": dtype, "present_state": state, "present_normalizer": state, "relative_error": capi.FP32}
    return problem, [_run.Output(name, name, outputs[name], types[name]) for name in wanted]


def _usual_features(key_size: int) -> int:
    """The library's default for favor."""
    return max(1, math.floor(key_size * math.log(key_size)))


@dataclass(frozen=True, repr=False)
class LshResult(Generic[A]):
    y: A  # [B, H, S, Dv]
    buckets: A | None = None  # [B, H, num_hashes, S], int32; num_buckets for padding
    plan: str = ""

    __repr__ = short_repr


class LshOptions(TypedDict, total=False):
    """The options of lsh_attention. Letters: B batch, H heads, S tokens, D the head size of queries and keys."""

    chunk_length: Required[Annotated[int, Option(REQUIRED, "divides S, or is at least S: then nothing is hashed")]]
    k: Annotated[
        Array | None,
        Option(None, "[B, H, S, D]: the simple form of tutorials, which hashes keys, whose chunks see themselves alone"),
    ]
    num_hashes: Annotated[int, Option(1, "rounds of hashing")]
    num_buckets: Annotated[int, Option(0, "even; 0: the largest power of two up to 2 S / chunk_length")]
    chunks_before: Annotated[int | None, Option(None, "that a chunk sees; None: 1, of the simple form 0")]
    chunks_after: Annotated[int, Option(0, "that a chunk sees")]
    rotations: Annotated[
        Array | None,
        Option(None, "[H or 1, D, num_hashes, num_buckets / 2], of the simple form [H or 1, D, num_hashes, D]"),
    ]
    seed: Annotated[int | None, Option(None, "from which rotations are drawn if they are not given")]
    key_lengths: Annotated[Sequence[int] | Array | None, Option(None, "[B], int64: how many of the S tokens are valid")]
    causal: Annotated[bool, Option(False, "no token sees those after it")]
    scale: Annotated[Number | None, Option(None, "None: 1 / sqrt(D)")]
    buckets: Annotated[bool, Option(False, "return them")]


describe(LshOptions)

_LSH_TENSORS = ("k", "rotations", "key_lengths")


@shows(LshOptions)
def lsh_attention(q: A, v: Array, **options: Unpack[LshOptions]) -> LshResult[A]:
    """Attention by locality-sensitive hashing, as in the Reformer: each token sees those in its chunk of the sequence that
    is sorted by bucket, and in the chunks beside it.

    q [B, H, S, D] are queries and keys, v [B, H, S, Dv]. All arrays are row-major. rapt.LshOptions lists the options. Errors
    are those of attention()."""
    results, plan = _run.run(_prepare_lsh, *lsh_call(q, v, options))
    return LshResult(**results, plan=plan.description)


def lsh_call(q: Array, v: Array, options: LshOptions) -> Call:
    inputs: dict[str, Any] = {"q": q, "v": v}
    given = _given(options, LshOptions, _LSH_TENSORS, inputs)
    fields = {
        "chunk_length": integer("chunk_length", given["chunk_length"]),
        "num_hashes": integer("num_hashes", given.get("num_hashes", 1), 1, 1024),
        "num_buckets": integer("num_buckets", given.get("num_buckets", 0)),
        "has_chunks_before": "chunks_before" in given,
        "chunks_before": integer("chunks_before", given.get("chunks_before", 0)),
        "chunks_after": integer("chunks_after", given.get("chunks_after", 0)),
        "seed": integer("seed", given["seed"], 0, 2**64 - 1) if "seed" in given else None,
        "causal": boolean("causal", given.get("causal", False)),
        "scale": real("scale", given.get("scale", 0)),
    }
    return Call(inputs, fields, ("y", *_wanted(given, ["buckets"])))


_LSH_FIELDS = {"q": "query", "k": "key", "v": "value", "y": "output"}


def _prepare_lsh(
    context: capi.Context,
    layouts: dict[str, Layout],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    given: dict[str, Layout],
) -> _run.Prepared:
    return _prepared(context, layouts, *lsh_problem(layouts, options, wanted))


def lsh_problem(
    layouts: dict[str, Layout], options: dict[str, Any], wanted: tuple[str, ...]
) -> tuple[capi.LshProblem, list[_run.Output]]:
    """The problem of an lsh_call(), and its outputs."""
    shapes = _Shapes(layouts, {})
    batch, heads, length, size = (shapes.axis("q", axis, 4) for axis in range(4))
    value_size = shapes.axis("v", 3, 4)
    dtype = shapes.check("q", "B,H,S,D", B=batch, H=heads, S=length, D=size, Dv=value_size)
    shapes.check("k", "B,H,S,D", dtype)
    shapes.check("v", "B,H,S,Dv", dtype)
    is_simple = "k" in layouts
    is_hashed = options["chunk_length"] < length
    check(not is_hashed or "rotations" in layouts or options["seed"] is not None, "rotations and seed are missing")
    problem = capi.LshProblem(
        **options | {"seed": options["seed"] or 0},
        dtype=dtype,
        form=capi.LSH_FORMS["simple" if is_simple else "reformer"],
        batch=batch,
        heads=heads,
        length=length,
        head_size=size,
        value_head_size=value_size,
        has_key_lengths=shapes.check("key_lengths", "B", _arrays.INT64) != 0,
        wants_buckets="buckets" in wanted,
    )
    if "rotations" in layouts:
        problem.has_head_rotations = shapes.axis("rotations", 0, 4) != 1
        last = size if is_simple else options["num_buckets"] // 2
        axes = f"{'H' if problem.has_head_rotations else 1},D,num_hashes,last"
        problem.rotations_dtype = shapes.check("rotations", axes, num_hashes=options["num_hashes"], last=last)
    outputs = {
        "y": ((batch, heads, length, value_size), dtype),
        "buckets": ((batch, heads, options["num_hashes"], length), _arrays.INT32),
    }
    return problem, [_run.Output(name, _LSH_FIELDS.get(name, name), *outputs[name]) for name in wanted]


def _prepared(
    context: capi.Context, layouts: dict[str, Layout], problem: capi.Sized, outputs: list[_run.Output]
) -> _run.Prepared:
    plan = capi.Plan(context, problem)
    return _run.Prepared(plan, plan.arguments_type(), [_LSH_FIELDS.get(name, name) for name in layouts], outputs)
