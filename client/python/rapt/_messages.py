"""Messages of rapt.v1 in Protocol Buffers' binary format, as far as calls of tensors use it. The test client_messages
compares them with proto/."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ._http import Buffer

# A message by its fields: name -> (number, kind). A list of a kind is a repeated field; numbers are packed.
Schema = dict[str, tuple[int, Any]]
INT, DOUBLE, TEXT, BYTES = "int", "double", "text", "bytes"

TENSOR: Schema = {"dtype": (1, INT), "shape": (2, [INT]), "data": (3, BYTES)}
WINDOW: Schema = {"left": (1, INT), "right": (2, INT)}
DROPOUT: Schema = {"probability": (1, DOUBLE), "seed": (2, INT)}
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
    "layer": (2, INT),
    "at": (3, INT),
    "generation": (4, INT),
    "k": (5, TENSOR),
    "v": (6, TENSOR),
}
APPEND_REQUEST: Schema = {"parts": (1, [APPEND_PART])}
ITEM_RESULT: Schema = {"length": (4, INT), "applied_before": (5, INT)}
APPEND_RESPONSE: Schema = {"results": (1, [ITEM_RESULT])}
ITEM: Schema = {
    "cache": (1, TEXT),
    "rows": (2, INT),
    "new_tokens": (3, INT),
    "at": (4, INT),
    "generation": (5, INT),
    "position": (6, INT),
}
ATTEND_CACHED_REQUEST: Schema = {
    "layer": (1, INT),
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

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types


def _varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def head(number: int, size: int) -> bytes:
    """What is before the bytes of a field."""
    return _key(number, _LENGTH) + _varint(size)


def encode(schema: Schema, values: Mapping[str, Any]) -> list[Buffer]:
    """The message in buffers, of which those of tensors are not copied. A value of None is absent; of a message, buffers may
    be the value as well."""
    out: list[Buffer] = [b""]

    def add(buffers: list[Buffer]) -> None:
        for buffer in buffers:
            if isinstance(buffer, bytes) and isinstance(out[-1], bytes):
                out[-1] += buffer
            else:
                out.append(buffer)

    for name, value in values.items():
        if value is None:
            continue
        number, kind = schema[name]
        if kind == [INT]:
            packed = b"".join(map(_varint, value))
            add([_key(number, _LENGTH), _varint(len(packed)), packed])
            continue
        for one in value if isinstance(kind, list) else [value]:
            add(_field(number, kind[0] if isinstance(kind, list) else kind, one))
    return out


def _field(number: int, kind: Any, value: Any) -> list[Buffer]:
    if kind == INT:
        return [_key(number, _VARINT) + _varint(int(value))]
    if kind == DOUBLE:
        return [_key(number, _FIXED64) + struct.pack("<d", value)]
    if kind == TEXT:
        parts: list[Buffer] = [value.encode()]
    elif kind == BYTES:
        parts = [value]
    else:
        parts = value if isinstance(value, list) else encode(kind, value)
    return [head(number, sum(map(len, parts))), *parts]


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
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
                return at if kind == BYTES else 0
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
    if kind == INT:
        if not isinstance(value, int):
            raise ValueError("bytes in place of a number")
        return _signed(value)
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    if kind == DOUBLE:
        return struct.unpack("<d", value)[0]
    if kind == TEXT:
        return bytes(value).decode()
    return value if kind == BYTES else decode(kind, value)
