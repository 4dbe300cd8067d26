"""Operators other than attention: linear attention, attention by locality-sensitive hashing, and positions."""

from __future__ import annotations

import contextlib
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Required, TypedDict, Unpack

from . import _run, capi
from ._arrays import DATATYPES, NAMES, A, Array, Layout, short_repr
from ._attention import Call, Number, boolean, check, choice, integer, real, split
from ._options import REQUIRED, Option, describe, required, shows

DType = Literal["float32", "float16", "bfloat16", "float64"]

_TYPES = {NAMES[dtype]: DATATYPES[dtype] for dtype in NAMES}
# The values of parameters of models that are types: ONNX's codes.
_ONNX_TYPES = {"FP32": 1, "FP16": 10, "FP64": 11, "BF16": 16}


def _finite(name: str, value: Any) -> float:
    number = real(name, value)
    check(math.isfinite(number), f"{name} is {number}; it must be finite")
    return number


def _seed(name: str, value: Any) -> int:
    return integer(name, value, 0, 2**64 - 1)


def _conversion(kind: Any) -> Callable[[str, Any], Any]:
    """Of an attribute's value for the library, from the type of its option."""
    kinds = {kind, *typing.get_args(kind)} - {type(None)}
    if bool in kinds:
        return lambda name, value: bool(boolean(name, value))
    if float in kinds:
        return _finite
    if int in kinds:
        return integer
    (literal,) = (one for one in kinds if typing.get_origin(one) is Literal)
    choices = {text: _TYPES.get(text, text) for text in typing.get_args(literal)}
    return lambda name, value: choice(name, value, choices)


class Operator:
    """An operator of the library and of the server's models."""

    def __init__(self, name: str, options: type, inputs: Sequence[str], outputs: Sequence[str], names: Mapping[str, str]) -> None:
        """`inputs` and `outputs`: the options that are tensors, or ask for an output; all others are attributes. `names`: what
        has another name at the library and the server."""
        self.name = name
        self._inputs, self._outputs, self._required = inputs, outputs, required(options)
        kinds = {name: kind for name, kind in typing.get_type_hints(options).items() if name not in inputs}
        self._scalars = kinds.keys()
        self._conversions = {name: _conversion(kind) for name, kind in kinds.items() if name not in outputs}
        if "seed" in self._conversions:
            self._conversions["seed"] = _seed
        self._theirs = {**names, **_TYPES}
        self._ours = {theirs: name for name, theirs in self._theirs.items()}

    def theirs(self, name: str) -> str:
        return self._theirs.get(name, name)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Gives errors the names of here."""
        try:
            yield
        except ValueError as error:
            text = re.sub(rf"\b({'|'.join(self._ours)})\b", lambda found: self._ours[found[1]], str(error))
            error.args = (text, *error.args[1:])
            raise

    def call(self, inputs: dict[str, Any], output: str, options: Mapping[str, Any]) -> Call:
        """`output`: the one that every call has. The call's options are the attributes, with the library's names and values."""
        given = split(inputs, options, self._inputs, self._scalars)
        for name in self._required:
            if name not in given:
                raise TypeError(f"{name} is missing")
        wanted = [name for name in self._outputs if boolean(name, given.pop(name, False))]
        conversions = self._conversions.items()  # in their order: like calls have one plan
        attributes = {self.theirs(name): read(name, given[name]) for name, read in conversions if name in given}
        return Call(inputs, attributes, (output, *wanted))

    def prepare(
        self,
        context: capi.Context,
        layouts: dict[str, Layout],
        attributes: dict[str, Any],
        wanted: tuple[str, ...],
        given: dict[str, Layout],
    ) -> _run.Prepared:
        call = capi.Call(self.name)
        for name, layout in layouts.items():
            check(layout.strides is None, f"{name} is not contiguous", "use numpy.ascontiguousarray or contiguous()")
            call.set_input(self.theirs(name), layout.dtype, layout.shape)
        for name, value in attributes.items():
            call.set_attribute(name, value)
        for name in wanted:
            call.want(self.theirs(name))
        plan = capi.Plan(context, call)
        outputs = [_run.Output(name, self.theirs(name), *plan.output(self.theirs(name))) for name in wanted]
        return _run.Prepared(plan, None, [self.theirs(name) for name in layouts], outputs)

    def parameters(self, call: Call) -> dict[str, Any]:
        """Of the model."""
        return {name: _ONNX_TYPES[value] if name == "state_type" else value for name, value in call.options.items()}

    def run(self, call: Call) -> tuple[dict[str, Any], str]:
        """Computes in this process: the outputs, and the plan."""
        with self.errors():
            results, plan = _run.run(self.prepare, *call)
        return results, plan.description


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
    seed: Annotated[int | None, Option(None, "of the directions of favor, if they are drawn; None: 0")]
    state_type: Annotated[DType | None, Option(None, "of present_state; None: past_state's, or query's")]
    chunk_size: Annotated[int, Option(64, "a hint, which changes only the rounding")]
    error_rows: Annotated[int, Option(0, "of favor: rows whose error is measured")]
    present_state: Annotated[bool, Option(False, "return it")]
    present_normalizer: Annotated[bool, Option(False, "return it")]


describe(LinearOptions)

LINEAR = Operator(
    "linear_attention",
    LinearOptions,
    ("past_state", "past_normalizer", "decay", "beta", "projection", "key_lengths"),
    ("present_state", "present_normalizer"),
    {"query_heads": "q_num_heads", "kv_heads": "kv_num_heads", "causal": "is_causal", "key_lengths": "nonpad_kv_seqlen"},
)


@shows(LinearOptions)
def linear_attention(query: A, key: Array, value: Array, **options: Unpack[LinearOptions]) -> LinearResult[A]:
    """A state instead of keys, as the ONNX operator LinearAttention: for each token S = e^decay S + k u^T and
    output = scale * S^T q, with u = value, or beta * (value - (e^decay S)^T k) of a delta rule.

    query [B, T, Hq * d_k], key [B, T, Hkv * d_k] and value [B, T, Hkv * d_v] have one float type. All arrays are row-major.
    rapt.LinearOptions lists the options. Errors are those of attention()."""
    return linear_result(*LINEAR.run(linear_call(query, key, value, options)))


def linear_call(query: Array, key: Array, value: Array, options: LinearOptions) -> Call:
    call = LINEAR.call({"query": query, "key": key, "value": value}, "output", options)
    return call._replace(wanted=(*call.wanted, "relative_error")) if call.options.get("error_rows") else call


def linear_result(outputs: dict[str, Any], plan: str) -> LinearResult[Any]:
    if "relative_error" in outputs:
        outputs["relative_error"] = float(outputs["relative_error"][0])
    return LinearResult(**outputs, plan=plan)


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

LSH = Operator(
    "lsh_attention",
    LshOptions,
    ("k", "rotations", "key_lengths"),
    ("buckets",),
    {"q": "Q", "k": "K", "v": "V", "y": "Y", "causal": "is_causal", "key_lengths": "nonpad_kv_seqlen"},
)


@shows(LshOptions)
def lsh_attention(q: A, v: Array, **options: Unpack[LshOptions]) -> LshResult[A]:
    """Attention by locality-sensitive hashing, as in the Reformer: each token sees those in its chunk of the sequence that
    is sorted by bucket, and in the chunks beside it.

    q [B, H, S, D] are queries and keys, v [B, H, S, Dv]. All arrays are row-major. rapt.LshOptions lists the options. Errors
    are those of attention()."""
    outputs, plan = LSH.run(lsh_call(q, v, options))
    return LshResult(**outputs, plan=plan)


def lsh_call(q: Array, v: Array, options: LshOptions) -> Call:
    call = LSH.call({"q": q, "v": v}, "y", options)
    call.options["form"] = "simple" if "k" in call.inputs else "reformer"
    return call


class RotaryOptions(TypedDict, total=False):
    """The options of rotary_embedding: cos_cache and sin_cache, or rope_theta. r numbers of each head are rotated."""

    cos_cache: Annotated[Array | None, Option(None, "[M, r / 2] or [B, S, r / 2], float32 or x's type")]
    sin_cache: Annotated[Array | None, Option(None, "as cos_cache")]
    position_ids: Annotated[Array | None, Option(None, "[B, S], int64: the position of each token; None: 0, 1, 2, ...")]
    interleaved: Annotated[bool, Option(False, "rotates pairs of neighbours, not of halves")]
    num_heads: Annotated[int, Option(0, "of an x of 3 axes")]
    rotary_embedding_dim: Annotated[int, Option(0, "r; 0: the size of a head")]
    rope_theta: Annotated[Number | None, Option(None, "the base of angles, position * rope_theta ** (-2 t / r)")]


describe(RotaryOptions)

ROTARY = Operator(
    "rotary_embedding",
    RotaryOptions,
    ("cos_cache", "sin_cache", "position_ids"),
    (),
    {"x": "X", "y": "Y"},
)


@shows(RotaryOptions)
def rotary_embedding(x: A, **options: Unpack[RotaryOptions]) -> A:
    """The ONNX operator RotaryEmbedding of x [B, H, S, D], or [B, S, H * D] with num_heads. All arrays are row-major.
    rapt.RotaryOptions lists the options. Errors are those of attention()."""
    y: A = ROTARY.run(ROTARY.call({"x": x}, "y", options))[0]["y"]
    return y


class PositionalOptions(TypedDict, total=False):
    """The options of positional_encoding."""

    table: Annotated[Array | None, Option(None, "[M, E] of at least S rows, float32 or x's type; None: sines and cosines")]
    base: Annotated[Number | None, Option(None, "of their wavelengths; None: 10000")]


describe(PositionalOptions)

POSITIONAL = Operator("positional_encoding", PositionalOptions, ("table",), (), {"x": "X", "y": "Y"})


@shows(PositionalOptions)
def positional_encoding(x: A, **options: Unpack[PositionalOptions]) -> A:
    """x [..., S, E] with a vector added to each position. All arrays are row-major. rapt.PositionalOptions lists the options.
    Errors are those of attention()."""
    y: A = POSITIONAL.run(POSITIONAL.call({"x": x}, "y", options))[0]["y"]
    return y
