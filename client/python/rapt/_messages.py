"""Messages of proto/ in Protocol Buffers' binary format, as far as calls use it. The test client_messages compares them with
proto/."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ._attention import integer
from ._http import Buffer

# A message by its fields: name -> (number, kind). A list of a kind is a repeated field; numbers are packed. A range is an
# integer, and a tuple an enumeration, whose values are named as in JSON.
Schema = dict[str, tuple[int, Any]]
INT, INT32, UINT = range(-(2**63), 2**63), range(-(2**31), 2**31), range(2**64)
DOUBLE, TEXT, BYTES = "double", "text", "bytes"
DATA_TYPE = ("DATA_TYPE_UNSPECIFIED", "FP32", "FP16", "BF16", "FP64", "BOOL", "INT8", "UINT8", "INT32", "INT64")
STORAGE = ("STORAGE_PLAIN", "STORAGE_INT8")

TENSOR: Schema = {"dtype": (1, INT), "shape": (2, [INT]), "data": (3, BYTES)}
WINDOW: Schema = {"left": (1, INT), "right": (2, INT)}
DROPOUT: Schema = {"probability": (1, DOUBLE), "seed": (2, UINT)}
ATTENTION: Schema = {
    "layout": (1, INT),
    "query_heads": (2, INT),
    "kv_heads": (3, INT),
    "scale": (4, DOUBLE),
    "softcap": (5, DOUBLE),
    "causal": (6, INT),
    "alignment": (7, INT),
    "window": (8, WINDOW),
    "softmax_in_fp64": (9, INT),
    "dropout": (10, DROPOUT),
    "alibi": (11, INT),
    "is_bidirectional": (12, INT),
    "max_distance": (13, INT),
    "v_head_size": (14, INT),
    "interleaved": (15, INT),
    "rotary_embedding_dim": (16, INT),
    "rope_theta": (17, DOUBLE),
    "rotary_keys": (18, INT),
    "score_function": (19, INT),
    "normalizer": (20, INT),
    "alpha": (21, DOUBLE),
    "block_q": (22, INT),
    "block_k": (23, INT),
    "prefix_keys": (24, INT),
}
ATTEND_REQUEST: Schema = {
    "q": (1, TENSOR),
    "k": (2, TENSOR),
    "v": (3, TENSOR),
    "mask": (4, TENSOR),
    "past_key": (5, TENSOR),
    "past_value": (6, TENSOR),
    "key_lengths": (7, [INT]),
    "attention": (8, ATTENTION),
    "score_output": (9, INT),
    "want_lse": (10, INT),
    "want_present": (11, INT),
    "attention_bias": (13, TENSOR),
    "head_sink": (14, TENSOR),
    "alibi_slopes": (16, TENSOR),
    "bias_table": (17, TENSOR),
    "relative_bias": (18, TENSOR),
    "relative_keys": (19, TENSOR),
    "relative_values": (20, TENSOR),
    "relative_query": (21, TENSOR),
    "cos_cache": (22, TENSOR),
    "sin_cache": (23, TENSOR),
    "position_ids": (24, TENSOR),
    "key_position_ids": (25, TENSOR),
    "additive_weight": (26, TENSOR),
    "head_alpha": (27, TENSOR),
    "block_mask": (28, TENSOR),
    "selected_indices": (29, TENSOR),
    "global_mask": (30, TENSOR),
}
ATTEND_RESPONSE: Schema = {
    "y": (1, TENSOR),
    "scores": (2, TENSOR),
    "lse": (3, TENSOR),
    "present_key": (4, TENSOR),
    "present_value": (5, TENSOR),
    "plan": (7, TEXT),
}
ATTEND_BACKWARD_REQUEST: Schema = {
    "call": (1, ATTEND_REQUEST),
    "dy": (2, TENSOR),
    "y": (3, TENSOR),
    "lse": (4, TENSOR),
    "dlse": (5, TENSOR),
    "gradients": (6, [TEXT]),
}
ATTEND_BACKWARD_RESPONSE: Schema = {
    "dq": (1, TENSOR),
    "dk": (2, TENSOR),
    "dv": (3, TENSOR),
    "d_mask": (4, TENSOR),
    "d_past_key": (5, TENSOR),
    "d_past_value": (6, TENSOR),
    "d_attention_bias": (7, TENSOR),
    "d_head_sink": (8, TENSOR),
    "d_alibi_slopes": (9, TENSOR),
    "d_bias_table": (10, TENSOR),
    "d_relative_bias": (11, TENSOR),
    "d_relative_keys": (12, TENSOR),
    "d_relative_values": (13, TENSOR),
    "d_relative_query": (14, TENSOR),
    "d_additive_weight": (15, TENSOR),
}
DIAGNOSE_REQUEST: Schema = {"call": (1, ATTEND_REQUEST)}
APPEND_PART: Schema = {
    "cache": (1, TEXT),
    "layer": (2, INT32),
    "at": (3, INT),
    "generation": (4, UINT),
    "k": (5, TENSOR),
    "v": (6, TENSOR),
}
APPEND_REQUEST: Schema = {"parts": (1, [APPEND_PART])}
ITEM_RESULT: Schema = {"length": (4, INT), "applied_before": (5, INT)}
APPEND_RESPONSE: Schema = {"results": (1, [ITEM_RESULT])}
ITEM: Schema = {
    "cache": (1, TEXT),
    "rows": (2, INT32),
    "new_tokens": (3, INT32),
    "at": (4, INT),
    "generation": (5, UINT),
    "position": (6, INT),
}
ATTEND_CACHED_REQUEST: Schema = {
    "layer": (1, INT32),
    "items": (2, [ITEM]),
    "q": (3, TENSOR),
    "k": (4, TENSOR),
    "v": (5, TENSOR),
    "scale": (6, DOUBLE),
    "softcap": (7, DOUBLE),
    "window": (8, WINDOW),
    "want_lse": (9, INT),
    "output": (10, INT),
    "share_prefix": (11, INT),
    "head_sink": (13, TENSOR),
}
ATTEND_CACHED_RESPONSE: Schema = {"y": (1, TENSOR), "lse": (2, TENSOR), "items": (3, [ITEM_RESULT]), "plan": (4, TEXT)}


def _numbered(names: str, **kinds: Any) -> Schema:
    """A message of fields that are numbered from 1 on, of which "-" is not used. They are integers, if not in `kinds`."""
    return {name: (number, kinds.get(name, INT)) for number, name in enumerate(names.split(), 1) if name != "-"}


ROW = _numbered("batch head query")
TENSOR_REPORT = _numbered(
    "name dtype shape elements nan_count positive_inf_count negative_inf_count min max mean",
    name=TEXT,
    dtype=DATA_TYPE,
    shape=[INT],
    min=DOUBLE,
    max=DOUBLE,
    mean=DOUBLE,
)
RANGE = _numbered("min max nan_count positive_inf_count negative_inf_count", min=DOUBLE, max=DOUBLE)
EMPTY_ROWS = _numbered("count first", first=[ROW])
BACKEND_CHOICE = _numbered("backend chosen plan workspace_bytes reason", backend=TEXT, plan=TEXT, reason=TEXT)
DIAGNOSE_RESPONSE = _numbered(
    "problem inputs raw_scores scaled_scores biased_scores pairs masked_by_mask masked_by_position weights row_sums"
    " empty_rows output backends warnings masked_by_block_mask masked_by_selection - estimates favor_squared_norm"
    " lsh_reachable_weight",
    problem=TEXT,
    inputs=[TENSOR_REPORT],
    raw_scores=RANGE,
    scaled_scores=RANGE,
    biased_scores=RANGE,
    weights=RANGE,
    row_sums=RANGE,
    empty_rows=EMPTY_ROWS,
    output=RANGE,
    backends=[BACKEND_CHOICE],
    warnings=[TEXT],
    estimates=[TEXT],
    favor_squared_norm=DOUBLE,
    lsh_reachable_weight=DOUBLE,
)
ESTIMATE_MEMORY_REQUEST = _numbered(
    "batch query_heads kv_heads lengths head_size value_head_size dtype block_q block_k selected_indices alibi"
    " bias_table relative_bias per_head lsh_hashes lsh_chunk_length favor_features model",
    lengths=[INT],
    dtype=DATA_TYPE,
    model=TEXT,
)
INPUT_ESTIMATE = _numbered("name bytes saved_bytes", name=TEXT)
OPERATOR_ESTIMATE = _numbered("workspace_bytes state_bytes plan refusal", plan=TEXT, refusal=TEXT)
LAYER_ESTIMATE = _numbered("weight_bytes charged_bytes")
MEMORY_ESTIMATE = _numbered(
    "length tensor_bytes standard_bytes chunked_bytes fused_bytes plan inputs lsh linear layer",
    plan=TEXT,
    inputs=[INPUT_ESTIMATE],
    lsh=OPERATOR_ESTIMATE,
    linear=OPERATOR_ESTIMATE,
    layer=LAYER_ESTIMATE,
)
ESTIMATE_MEMORY_RESPONSE = _numbered("estimates chunk", estimates=[MEMORY_ESTIMATE])
INSTRUCTION_SET_INFO = _numbered("name available in_use", name=TEXT)
BACKEND_INFO = _numbered(
    "name available reason instruction_sets",
    name=TEXT,
    reason=TEXT,
    instruction_sets=[INSTRUCTION_SET_INFO],
)
ADMISSION_LIMITS = _numbered(
    "max_open_calls max_calls_per_caller max_compute_bytes max_queued_requests max_queue_delay_ms"
    " min_receive_bytes_per_second default_deadline_ms max_deadline_ms"
)
CACHE_LIMITS = _numbered("max_bytes max_bytes_per_caller max_caches_per_caller default_lease_ms max_lease_ms")
GET_SERVER_INFO_RESPONSE = _numbered(
    "version backends backend isa compute_threads memory_budget_bytes memory_reserved_bytes max_message_bytes"
    " admission caches",
    version=TEXT,
    backends=[BACKEND_INFO],
    backend=TEXT,
    isa=TEXT,
    compute_threads=INT32,
    admission=ADMISSION_LIMITS,
    caches=CACHE_LIMITS,
)
LAYER_SHAPE = _numbered("layers kv_heads head_size value_head_size keep_first keep_last", layers=INT32)
CREATE_REQUEST = _numbered(
    "name shapes dtype reserve_tokens lease_ms first_position storage",
    name=TEXT,
    shapes=[LAYER_SHAPE],
    dtype=DATA_TYPE,
    storage=STORAGE,
)
FORK_REQUEST = _numbered(
    "cache length name generation reserve_tokens lease_ms",
    cache=TEXT,
    name=TEXT,
    generation=UINT,
)
TRUNCATE_REQUEST = _numbered("cache length generation", cache=TEXT, generation=UINT)
UPDATE_REQUEST = _numbered("forks truncates closes", forks=[FORK_REQUEST], truncates=[TRUNCATE_REQUEST], closes=[TEXT])
CACHE = _numbered(
    "id name shapes dtype first_position lengths generation lease_ms expires_in_ms reserve_tokens bytes"
    " shared_bytes storage",
    id=TEXT,
    name=TEXT,
    shapes=[LAYER_SHAPE],
    dtype=DATA_TYPE,
    lengths=[INT],
    generation=UINT,
    storage=STORAGE,
)
UPDATE_RESULT = _numbered("code message reason cache", code=INT32, message=TEXT, reason=TEXT, cache=CACHE)
UPDATE_RESPONSE = _numbered(
    "forks truncates closes",
    forks=[UPDATE_RESULT],
    truncates=[UPDATE_RESULT],
    closes=[UPDATE_RESULT],
)
IDS = _numbered("caches", caches=[TEXT])
MISSING = _numbered("cache reason", cache=TEXT, reason=TEXT)
CACHES = _numbered("caches missing next_page_token", caches=[CACHE], missing=[MISSING], next_page_token=TEXT)
LIST_REQUEST = _numbered("page_size page_token name_prefix", page_size=INT32, page_token=TEXT, name_prefix=TEXT)


class Method(NamedTuple):
    """Of the server, over HTTP and over gRPC."""

    verb: str
    path: str
    name: str  # "/rapt.v1.AttentionService/Attend"
    request: Schema
    response: Schema


def _native(name: str, path: str, request: Schema, response: Schema, verb: str = "POST") -> Method:
    return Method(verb, f"/rapt/v1/{path}", f"/rapt.v1.AttentionService/{name}", request, response)


def _of_caches(name: str, path: str, request: Schema, response: Schema, verb: str = "POST") -> Method:
    return Method(verb, f"/rapt/v1/caches{path}", f"/rapt.v1.CacheService/{name}", request, response)


ATTEND = _native("Attend", "attend", ATTEND_REQUEST, ATTEND_RESPONSE)
ATTEND_BACKWARD = _native("AttendBackward", "attend-backward", ATTEND_BACKWARD_REQUEST, ATTEND_BACKWARD_RESPONSE)
DIAGNOSE = _native("Diagnose", "diagnose", DIAGNOSE_REQUEST, DIAGNOSE_RESPONSE)
ESTIMATE_MEMORY = _native("EstimateMemory", "estimate-memory", ESTIMATE_MEMORY_REQUEST, ESTIMATE_MEMORY_RESPONSE)
GET_SERVER_INFO = _native("GetServerInfo", "server", {}, GET_SERVER_INFO_RESPONSE, "GET")
CREATE_CACHE = _of_caches("Create", "", CREATE_REQUEST, CACHE)
FORK_CACHE = _of_caches("Fork", "/fork", FORK_REQUEST, CACHE)
TRUNCATE_CACHE = _of_caches("Truncate", "/truncate", TRUNCATE_REQUEST, CACHE)
UPDATE_CACHES = _of_caches("Update", "/update", UPDATE_REQUEST, UPDATE_RESPONSE)
RENEW_CACHES = _of_caches("Renew", "/renew", IDS, CACHES)
CLOSE_CACHES = _of_caches("Close", "/close", IDS, CACHES)
GET_CACHES = _of_caches("Get", "/get", IDS, CACHES)
LIST_CACHES = _of_caches("List", "", LIST_REQUEST, CACHES, "GET")
APPEND_TO_CACHES = _of_caches("Append", "/append", APPEND_REQUEST, APPEND_RESPONSE)
ATTEND_CACHES = _of_caches("Attend", "/attend", ATTEND_CACHED_REQUEST, ATTEND_CACHED_RESPONSE)
DIAGNOSE_CACHES = _of_caches("Diagnose", "/diagnose", ATTEND_CACHED_REQUEST, DIAGNOSE_RESPONSE)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types


@functools.lru_cache(4096)
def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # of negative ones, as of int64
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


@functools.cache
def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def head(number: int, size: int) -> bytes:
    """What is before the bytes of a field."""
    return _key(number, _LENGTH) + _varint(size)


def _integer(name: str, kind: range, value: Any) -> bytes:
    return _varint(integer(name, value, kind[0], kind[-1]))


def encode(schema: Schema, values: Mapping[str, Any]) -> list[Buffer]:
    """The message in buffers, of which memoryviews, those of tensors, are not copied. A value of None is absent; of a message,
    buffers may be the value as well. Raises ValueError for integers that the field does not hold."""
    out: list[Buffer] = []
    last = bytearray()

    def add(name: str, number: int, kind: Any, value: Any) -> None:
        nonlocal last
        if isinstance(kind, range):
            last += _key(number, _VARINT) + _integer(name, kind, value)
        elif isinstance(kind, tuple):
            last += _key(number, _VARINT) + _varint(kind.index(value))
        elif kind == DOUBLE:
            last += _key(number, _FIXED64) + struct.pack("<d", value)
        elif kind == TEXT:
            text = value.encode()
            last += head(number, len(text)) + text
        else:
            parts = [value] if kind == BYTES else value if isinstance(value, list) else encode(kind, value)
            last += head(number, sum(map(len, parts)))
            for part in parts:
                if isinstance(part, memoryview):
                    out.extend((last, part))
                    last = bytearray()
                else:
                    last += part

    for name, value in values.items():
        if value is None:
            continue
        number, kind = schema[name]
        if kind == [INT]:
            packed = b"".join(_integer(name, INT, one) for one in value)
            last += head(number, len(packed)) + packed
        elif isinstance(kind, list):
            for one in value:
                add(name, number, kind[0], one)
        else:
            add(name, number, kind, value)
    return [*out, last]


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    number = data[at]
    if number < 128:
        return number, at + 1
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & (2**64 - 1), at
    raise ValueError("a number of more than 10 bytes")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _read_varint(data, at)
            yield key >> 3, number
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
        if size is None:
            if wire != _LENGTH:
                raise ValueError(f"a field of type {wire}")
            size, at = _read_varint(data, at)
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes, of which {len(data) - at} are there")
        yield key >> 3, data[at : at + size]
        at += size


def decode(schema: Schema, data: memoryview) -> dict[str, Any]:
    """The fields that are there; bytes are views of the data. Raises ValueError."""
    names = {number: (name, kind) for name, (number, kind) in schema.items()}
    values: dict[str, Any] = {name: [] for name, (_, kind) in schema.items() if isinstance(kind, list)}
    for number, value in _fields(data):
        if number not in names:
            continue
        name, kind = names[number]
        if kind == [INT]:
            values[name] += [_signed(n) for n in _unpacked(value)]
        elif isinstance(kind, list):
            values[name].append(_value(kind[0], value))
        else:
            values[name] = _value(kind, value)
    return values


def payload_at(schema: Schema, start: memoryview) -> int:
    """Where the bytes of a field begin that go beyond `start`, the first bytes of a message; 0 if there is no such field."""
    at = 0
    try:
        while at < len(start):
            key, at = _read_varint(start, at)
            if key & 7 == _VARINT:
                at = _read_varint(start, at)[1]
                continue
            size = {_FIXED64: 8, _FIXED32: 4}.get(key & 7)
            if size is None:
                size, at = _read_varint(start, at)
            if at + size <= len(start):
                at += size
                continue
            kind = next((kind for number, kind in schema.values() if number == key >> 3), None)
            if not isinstance(kind, dict):
                return at if kind in (BYTES, [BYTES]) else 0
            schema = kind
    except (ValueError, IndexError):
        pass  # decode() will say what is wrong
    return 0


def _unpacked(value: int | memoryview) -> Iterator[int]:
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _read_varint(value, at)
        yield number


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _value(kind: Any, value: int | memoryview) -> Any:
    if isinstance(kind, (range, tuple)):
        if not isinstance(value, int):
            raise ValueError("bytes in place of a number")
        return kind[value] if isinstance(kind, tuple) else value if kind == UINT else _signed(value)
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    if kind == DOUBLE:
        return struct.unpack("<d", value)[0]
    if kind == TEXT:
        return bytes(value).decode()
    return value if kind == BYTES else decode(kind, value)
