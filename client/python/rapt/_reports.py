"""What a server says of a call, of memory, of itself and of its caches: proto/rapt/v1 as plain values."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Float = Literal["float32", "float16", "bfloat16", "float64"]
Storage = Literal["plain", "int8"]


@dataclass(frozen=True)
class Range:
    """The range of one step of the computation. Bounds cover finite values, and are None if there are none."""

    min: float | None = None
    max: float | None = None
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0


@dataclass(frozen=True)
class TensorReport:
    name: str = ""
    dtype: str = ""
    shape: list[int] = field(default_factory=list)
    elements: int = 0
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None  # over the finite elements


@dataclass(frozen=True)
class QueryRow:
    batch: int = 0
    head: int = 0
    query: int = 0


@dataclass(frozen=True)
class EmptyRows:
    """Query rows that see no key; their output is 0."""

    count: int = 0
    first: list[QueryRow] = field(default_factory=list)


@dataclass(frozen=True)
class BackendChoice:
    backend: str = ""
    chosen: bool = False
    plan: str = ""
    workspace_bytes: int = 0
    reason: str = ""  # why it can't run, or why another one was chosen


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of each step of the definition for a call."""

    problem: str = ""  # "B=2 Hq=8 Hkv=2 Sq=128 Sk=128 P=0 D=64 Dv=64 FP32 causal"
    inputs: list[TensorReport] = field(default_factory=list)
    raw_scores: Range = Range()
    scaled_scores: Range = Range()  # after scale and softcap
    biased_scores: Range = Range()  # after the mask; negative_inf_count counts hidden pairs
    pairs: int = 0  # B * Hq * Sq * T
    masked_by_mask: int = 0  # by the mask or biases, and by nothing below
    masked_by_position: int = 0  # by causality, window or lengths
    masked_by_block_mask: int = 0  # and not by position
    masked_by_selection: int = 0  # and by neither of these
    weights: Range = Range()
    row_sums: Range = Range()
    empty_rows: EmptyRows = EmptyRows()
    output: Range = Range()
    backends: list[BackendChoice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # likely causes, one sentence each
    estimates: list[str] = field(default_factory=list)  # whether FAVOR+ and LSH could estimate the call
    favor_squared_norm: float | None = None
    lsh_reachable_weight: float | None = None

    def __repr__(self) -> str:
        """What is likely wrong; the fields have the numbers."""
        hidden = self.masked_by_mask + self.masked_by_position + self.masked_by_block_mask + self.masked_by_selection
        plans = [choice.plan for choice in self.backends if choice.chosen]
        parts = [self.problem, *plans, f"{hidden} of {self.pairs} pairs hidden"]
        if self.output.min is not None:
            parts.append(f"y from {self.output.min:.4g} to {self.output.max:.4g}")
        return f"<Diagnosis: {', '.join(parts)}; warnings: {' '.join(self.warnings) or 'none'}>"


@dataclass(frozen=True)
class OperatorEstimate:
    workspace_bytes: int = 0
    state_bytes: int = 0  # what later tokens need instead of keys and values
    plan: str = ""
    refusal: str = ""  # why the operator does not take these sizes


@dataclass(frozen=True)
class InputEstimate:
    name: str = ""
    bytes: int = 0
    saved_bytes: int = 0  # what it takes less than the mask or attention_bias that means the same


@dataclass(frozen=True)
class LayerEstimate:
    weight_bytes: int = 0  # held as long as the layer is loaded
    charged_bytes: int = 0  # reserved by a call


@dataclass(frozen=True)
class MemoryEstimate:
    length: int = 0
    tensor_bytes: int = 0  # q, k, v (of a layer its inputs) and y, needed in any case; the others come on top
    standard_bytes: int = 0  # the whole score matrix
    chunked_bytes: int = 0  # scores of one block of keys at a time
    fused_bytes: int = 0  # the workspace of the server's plan
    plan: str = ""
    inputs: list[InputEstimate] = field(default_factory=list)
    lsh: OperatorEstimate = OperatorEstimate()
    linear: OperatorEstimate = OperatorEstimate()
    layer: LayerEstimate = LayerEstimate()  # of estimate_layer_memory()


@dataclass(frozen=True)
class MemoryEstimates:
    estimates: list[MemoryEstimate] = field(default_factory=list)  # one for each length
    chunk: int = 0  # keys in a block of chunked_bytes


@dataclass(frozen=True)
class InstructionSetInfo:
    name: str = ""
    available: bool = False
    in_use: bool = False


@dataclass(frozen=True)
class BackendInfo:
    name: str = ""
    available: bool = False
    reason: str = ""  # why not
    instruction_sets: list[InstructionSetInfo] = field(default_factory=list)


@dataclass(frozen=True)
class AdmissionLimits:
    max_open_calls: int = 0
    max_calls_per_caller: int = 0
    max_compute_bytes: int = 0
    max_queued_requests: int = 0
    max_queue_delay_ms: int = 0
    min_receive_bytes_per_second: int = 0
    default_deadline_ms: int = 0
    max_deadline_ms: int = 0


@dataclass(frozen=True)
class CacheLimits:
    max_bytes: int = 0  # of all caches
    max_bytes_per_caller: int = 0  # 0: max_bytes
    max_caches_per_caller: int = 0
    default_lease_ms: int = 0
    max_lease_ms: int = 0


@dataclass(frozen=True)
class ServerInfo:
    version: str = ""
    backends: list[BackendInfo] = field(default_factory=list)
    backend: str = ""
    isa: str = ""
    compute_threads: int = 0
    memory_budget_bytes: int = 0
    memory_reserved_bytes: int = 0
    max_message_bytes: int = 0
    admission: AdmissionLimits = AdmissionLimits()
    caches: CacheLimits | None = None  # None: the server keeps none, or is older than this field


@dataclass(frozen=True)
class LayerShape:
    """`layers` layers of one form. Rows see positions below keep_first and the keep_last last tokens, and the server evicts
    tokens that no later row sees; keep_last 0: all stay."""

    kv_heads: int = 0
    head_size: int = 0
    layers: int = 1
    value_head_size: int = 0  # 0: head_size
    keep_first: int = 0
    keep_last: int = 0


@dataclass(frozen=True)
class CacheInfo:
    """A cache as the server described it."""

    id: str = ""
    name: str = ""
    shapes: list[LayerShape] = field(default_factory=list)
    dtype: Float = "float32"
    storage: Storage = "plain"
    first_position: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens of each layer, evicted ones counted
    generation: int = 0  # 1 in a new cache, and one more after each truncation
    lease_ms: int = 0
    expires_in_ms: int = 0
    reserve_tokens: int = 0
    bytes: int = 0  # of the pages it reaches
    shared_bytes: int = 0  # of them, what other caches reach as well; in answers to info() and list_caches()


# ---- JSON ---------------------------------------------------------------------------------------

# The names of enumerations in the protos.
ENUMERATORS: dict[str, str] = {
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float64": "FP64",
    "plain": "STORAGE_PLAIN",
    "int8": "STORAGE_INT8",
}
_NAMES = {enumerator: name for name, enumerator in ENUMERATORS.items()}

T = TypeVar("T")


def camel(name: str) -> str:
    """The JSON name of a field."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


_hints = functools.cache(typing.get_type_hints)


def from_json(kind: type[T], message: Any) -> T:
    """A dataclass from a message in Protocol Buffers' JSON, where integers of 64 bits are strings, or from one that was
    decoded, where names are those of the proto. Raises ValueError, TypeError or LookupError."""
    value: T = _read(kind, message)
    return value


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_read(arguments[0], one) for one in value]
    if origin is types.UnionType:
        return _read(arguments[0], value)  # what is None is absent
    if origin is Literal:
        return _NAMES[value]
    return _read_message(kind, value) if dataclasses.is_dataclass(kind) else kind(value)


def _read_message(kind: Any, message: dict[str, Any]) -> Any:
    if not isinstance(message, dict):
        raise TypeError(f"{message!r:.100} in place of a message")
    keys = {name: name if name in message else camel(name) for name in _hints(kind)}
    return kind(**{name: _read(_hints(kind)[name], message[key]) for name, key in keys.items() if key in message})
