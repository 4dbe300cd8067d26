"""Calls of a server with messages of rapt.v1: arrays to tensors and back, and JSON."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from . import _arrays, _messages, capi
from ._arrays import A, Layout
from ._attention import choice
from ._http import Answer, Buffer, Calls
from ._messages import Schema
from ._reports import ENUMERATORS, from_json
from .errors import InternalError

T = TypeVar("T")

_PROTOBUF = "Content-Type: application/x-protobuf\r\n"

# Of DataType.
CODES = {code: code for code in range(1, 6)} | {_arrays.INT32: 8, _arrays.INT64: 9}
_TYPES = {code: dtype for dtype, code in CODES.items()}

DTYPES = {name: code for code, name in _arrays.NAMES.items() if code in _arrays.FLOATS}


def dtype_name(name: str, dtype: str) -> str:
    """The enumerator of DataType of a float type."""
    choice(name, dtype, DTYPES)
    return ENUMERATORS[dtype]


@dataclass(frozen=True)
class Sent:
    """An array as it is sent: row-major, and a copy if it was not."""

    dtype: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]

    @classmethod
    def of(cls, name: str, x: Any) -> Sent:
        layout = _arrays.kind_of(name, x).read(name, x)[1]
        return cls(layout.dtype, layout.shape, np.ascontiguousarray(_arrays.as_numpy(name, x)))

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.shape, None)

    def message(self) -> list[Buffer]:
        head = _head(self.dtype, self.shape, self.data.nbytes)
        return [head, self.data.reshape(-1).view(np.uint8).data] if self.data.size else [head]


@functools.lru_cache(1024)
def _head(dtype: int, shape: tuple[int, ...], size: int) -> bytes:
    """What is before the elements in a message of a tensor."""
    fields = _messages.encode(_messages.TENSOR, {"dtype": CODES[dtype], "shape": shape})
    return b"".join([*fields, _messages.head(_messages.TENSOR["data"][0], size)])


def received(name: str, tensor: Mapping[str, Any] | None, like: A) -> A:
    """Returns a new array of the kind of `like`. Raises ValueError or LookupError if the message is not a tensor."""
    if tensor is None:
        raise ValueError(f"{name} is absent")
    dtype, shape, data = _TYPES[tensor.get("dtype", 0)], tuple(tensor["shape"]), tensor.get("data", b"")
    element = np.dtype(np.uint16 if dtype == capi.BF16 else _arrays.Numpy.dtype(dtype))
    if min(shape, default=0) < 0 or math.prod(shape) * element.itemsize != len(data):
        raise ValueError(f"{name} of shape {list(shape)} has {len(data)} bytes")
    kind = _arrays.kind_of(name, like)
    result = kind.empty(like, shape, dtype)
    if len(data) > 0:
        _arrays.as_numpy(name, result)[...] = np.frombuffer(data, element).reshape(shape)
    made: A = kind.finish(like, result)
    return made


def _understood(read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, TypeError, LookupError) as error:
        raise InternalError(f"not an answer of rapt-server: {type(error).__name__} {error}") from error


class Server:
    """Thread-safe."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def compute(
        self,
        path: str,
        request: Schema,
        values: Mapping[str, Any],
        response: Schema,
        read: Callable[[dict[str, Any]], T],
        timeout: float | None,
    ) -> T:
        """Sends a message with tensors. `read` takes the answer's fields; its ValueError, TypeError and LookupError make the
        answer malformed."""
        headers = _PROTOBUF + "Accept: application/x-protobuf\r\n"
        answer = self.calls.call("POST", path, _messages.encode(request, values), headers, timeout)
        return _understood(lambda: read(_messages.decode(response, answer.body)))

    def diagnose(self, kind: type[T], path: str, request: Schema, values: Mapping[str, Any], timeout: float | None) -> T:
        """Sends a message with tensors whose answer is read from JSON."""
        return _read_json(kind, self.calls.call("POST", path, _messages.encode(request, values), _PROTOBUF, timeout))

    def ask(self, kind: type[T], method: str, path: str, message: Mapping[str, Any], timeout: float | None) -> T:
        """Sends and receives JSON. Integers may be of NumPy."""
        body = json.dumps(message, default=operator.index).encode() if message else b""
        return _read_json(kind, self.calls.call(method, path, [body], "Content-Type: application/json\r\n", timeout))


def _read_json(kind: type[T], answer: Answer) -> T:
    return _understood(lambda: from_json(kind, json.loads(bytes(answer.body))))
