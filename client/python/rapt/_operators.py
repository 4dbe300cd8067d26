"""Linear attention, and attention by locality-sensitive hashing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

from . import _arrays, _run, capi
from ._arrays import A, Array, Layout
from ._attention import check, choice, integer, lengths, real, text

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


@dataclass(frozen=True)
class LinearResult(Generic[A]):
    output: A  # [B, T, Hq * d_v]
    present_state: A | None = None  # [B, Hkv, features, d_v], the past_state of the tokens that follow
    present_normalizer: A | None = None  # [B, Hkv, features], their past_normalizer
    relative_error: float | None = None  # with error_rows
    plan: str = ""


def linear_attention(
    query: A,
    key: Array,
    value: Array,
    *,
    query_heads: int,
    kv_heads: int,
    update_rule: Literal["gated_delta", "linear", "gated", "delta"] = "gated_delta",
    past_state: Array | None = None,
    past_normalizer: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    projection: Array | None = None,
    key_lengths: Sequence[int] | Array | None = None,
    scale: float | None = None,
    causal: bool = True,
    feature_map: Literal["none", "elu1", "relu", "favor"] = "none",
    normalize: bool = False,
    num_features: int | None = None,
    seed: int = 0,
    state_type: DType | None = None,
    chunk_size: int = 0,
    error_rows: int = 0,
    present_state: bool = False,
    present_normalizer: bool = False,
) -> LinearResult[A]:
    """A state instead of keys, as the ONNX operator LinearAttention: for each token S = e^decay S + k u^T and
    output = scale * S^T q, with u = value, or beta * (value - (e^decay S)^T k) of a delta rule.

    query [B, T, Hq * d_k], key [B, T, Hkv * d_k] and value [B, T, Hkv * d_v] have one float type; decay [B, T, Hkv] or
    [B, T, Hkv * d_k]; beta [B, T, Hkv] or [B, T, 1]; past_state [B, Hkv, features, d_v]; past_normalizer
    [B, Hkv, features]; projection [num_features, d_k]. features are d_k, or num_features of the feature map "favor", which
    estimates softmax attention with directions drawn from `seed`. Arrays are row-major. Errors are those of
    attention()."""
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "past_state": past_state,
        "past_normalizer": past_normalizer,
        "decay": decay,
        "beta": beta,
        "projection": projection,
        "key_lengths": None if key_lengths is None else lengths("key_lengths", key_lengths),
    }
    options = {
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "update_rule": choice("update_rule", update_rule, capi.UPDATE_RULES),
        "scale": 0.0 if scale is None else real("scale", scale),
        "bidirectional": not causal,
        "feature_map": choice("feature_map", feature_map, capi.FEATURE_MAPS),
        "normalize": bool(normalize),
        "num_features": 0 if num_features is None else integer("num_features", num_features, 1, 65536),
        "seed": integer("seed", seed, 0, 2**64 - 1),
        "state_dtype": 0 if state_type is None else choice("state_type", state_type, _DTYPES),
        "chunk_size": integer("chunk_size", chunk_size),
        "error_rows": integer("error_rows", error_rows),
    }
    wanted = ["output"]
    wanted += ["present_state"] if present_state else []
    wanted += ["present_normalizer"] if present_normalizer else []
    wanted += ["relative_error"] if error_rows else []
    inputs = {name: x for name, x in tensors.items() if x is not None}
    results, plan = _run.run(_prepare_linear, inputs, options, tuple(wanted))
    if error_rows:
        results["relative_error"] = float(results["relative_error"][0])
    return LinearResult(**results, plan=plan.description)


def _prepare_linear(
    context: capi.Context,
    layouts: dict[str, Layout],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    given: dict[str, Layout],
) -> _run.Prepared:
    heads = {name: integer(name, options[name], 1, 65536) for name in ("query_heads", "kv_heads")}
    shapes = _Shapes(layouts, {"Hq": heads["query_heads"], "Hkv": heads["kv_heads"]})
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
        problem.has_key_decays = shapes.axis("decay", 2, 3) != heads["kv_heads"]
        problem.decay_dtype = shapes.check("decay", "B,T,Hkv*d_k" if problem.has_key_decays else "B,T,Hkv")
    if "beta" in layouts:
        problem.has_one_beta = shapes.axis("beta", 2, 3) == 1
        problem.beta_dtype = shapes.check("beta", "B,T,1" if problem.has_one_beta else "B,T,Hkv")
    state = options["state_dtype"] or problem.past_dtype or dtype
    outputs = {
        "output": (batch, tokens, heads["query_heads"] * value_size),
        "present_state": (batch, heads["kv_heads"], features, value_size),
        "present_normalizer": (batch, heads["kv_heads"], features),
        "relative_error": (1,),
    }
    types = {"output": dtype, "present_state": state, "present_normalizer": state, "relative_error": capi.FP32}
    return _prepared(context, problem, layouts, [_run.Output(n, n, outputs[n], types[n]) for n in wanted])


def _usual_features(key_size: int) -> int:
    """The library's default for favor."""
    return max(1, math.floor(key_size * math.log(key_size)))


@dataclass(frozen=True)
class LshResult(Generic[A]):
    y: A  # [B, H, S, Dv]
    buckets: A | None = None  # [B, H, num_hashes, S], int32; num_buckets for padding
    plan: str = ""


def lsh_attention(
    q: A,
    v: Array,
    *,
    k: Array | None = None,
    chunk_length: int,
    num_hashes: int = 1,
    num_buckets: int = 0,
    chunks_before: int | None = None,
    chunks_after: int = 0,
    rotations: Array | None = None,
    seed: int | None = None,
    key_lengths: Sequence[int] | Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    buckets: bool = False,
) -> LshResult[A]:
    """Attention by locality-sensitive hashing, as in the Reformer: each token sees those in its chunk of the sequence that
    is sorted by bucket, and in the chunks beside it.

    q [B, H, S, D] are queries and keys, v [B, H, S, Dv]. With k, it is the simple form of tutorials, which hashes keys,
    whose chunks see themselves alone. rotations [H or 1, D, num_hashes, num_buckets / 2], of the simple form
    [H or 1, D, num_hashes, D], or are drawn from `seed`. chunk_length divides S, or is at least S: then nothing is hashed.
    Arrays are row-major. Errors are those of attention()."""
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "rotations": rotations,
        "key_lengths": None if key_lengths is None else lengths("key_lengths", key_lengths),
    }
    options = {
        "chunk_length": integer("chunk_length", chunk_length),
        "num_hashes": integer("num_hashes", num_hashes, 1, 1024),
        "num_buckets": integer("num_buckets", num_buckets),
        "has_chunks_before": chunks_before is not None,
        "chunks_before": 0 if chunks_before is None else integer("chunks_before", chunks_before),
        "chunks_after": integer("chunks_after", chunks_after),
        "seed": None if seed is None else integer("seed", seed, 0, 2**64 - 1),
        "causal": bool(causal),
        "scale": 0.0 if scale is None else real("scale", scale),
    }
    inputs = {name: x for name, x in tensors.items() if x is not None}
    results, plan = _run.run(_prepare_lsh, inputs, options, ("y", "buckets") if buckets else ("y",))
    return LshResult(**results, plan=plan.description)


_LSH_FIELDS = {"q": "query", "k": "key", "v": "value", "y": "output"}


def _prepare_lsh(
    context: capi.Context,
    layouts: dict[str, Layout],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    given: dict[str, Layout],
) -> _run.Prepared:
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
    made = [_run.Output(name, _LSH_FIELDS.get(name, name), *outputs[name]) for name in wanted]
    return _prepared(context, problem, layouts, made)


def _prepared(
    context: capi.Context, problem: capi.Sized, layouts: dict[str, Layout], outputs: list[_run.Output]
) -> _run.Prepared:
    plan = capi.Plan(context, problem)
    return _run.Prepared(plan, plan.arguments_type(), [_LSH_FIELDS.get(name, name) for name in layouts], outputs)
