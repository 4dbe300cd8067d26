"""Calls of a server with messages of rapt.v1: arrays to tensors and back. HttpServer sends them over HTTP."""

from __future__ import annotations

import functools
import json
import math
import re
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from . import _arrays, _messages, capi
from ._arrays import A, Layout
from ._attention import check, choice, integer
from ._http import Answer, Buffer, Calls, Deadline, Retry
from ._messages import Method
from ._reports import ENUMERATORS, from_json
from .errors import InternalError, Unavailable

T = TypeVar("T")

_JSON_BYTES = "Inference-Header-Content-Length"
_CODES_OF = {datatype: dtype for dtype, datatype in _arrays.DATATYPES.items()}

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
        dtype, numbers = _arrays.view(name, x)
        return cls(dtype, numbers.shape, np.ascontiguousarray(numbers))

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.shape, None)

    def with_a_batch(self) -> Sent:
        return Sent(self.dtype, (1, *self.shape), self.data)

    def message(self) -> list[Buffer]:
        head = _head(self.dtype, self.shape, self.data.nbytes)
        return [head, self.bytes()] if self.data.size else [head]

    def bytes(self) -> memoryview:
        return self.data.reshape(-1).view(np.uint8).data


@functools.lru_cache(1024)
def _head(dtype: int, shape: tuple[int, ...], size: int) -> bytes:
    """What is before the elements in a message of a tensor."""
    fields = _messages.encode(_messages.TENSOR, {"dtype": dtype, "shape": shape})
    return b"".join([*fields, _messages.head(_messages.TENSOR["data"][0], size)])


def received(name: str, tensor: Mapping[str, Any] | None, like: A) -> A:
    """Returns a new array of the kind of `like`. Raises ValueError or LookupError if the message is not a tensor."""
    if tensor is None:
        raise ValueError(f"{name} is absent")
    dtype, shape = tensor.get("dtype", 0), tuple(tensor["shape"])
    return array_of(name, dtype, shape, tensor.get("data", memoryview(b"")), like)


def array_of(name: str, dtype: int, shape: tuple[int, ...], data: memoryview, like: A) -> A:
    """Returns an array of the kind of `like` with the elements in `data`. Takes the memory that `data` is a part of if it is
    most of it. Raises ValueError if the sizes differ."""
    element = np.dtype(np.uint16 if dtype == capi.BF16 else _arrays.Numpy.dtype(dtype))
    if min(shape, default=0) < 0 or math.prod(shape) * element.itemsize != len(data):
        raise ValueError(f"{name} of shape {list(shape)} has {len(data)} bytes")
    numbers = np.frombuffer(data, element).reshape(shape) if len(data) > 0 else np.empty(shape, element)
    if not numbers.flags.aligned or 2 * len(data) < memoryview(data.obj).nbytes:
        numbers = numbers.copy()
    kind = _arrays.kind_of(name, like)
    made: A = kind.finish(like, kind.of_memory(numbers, dtype))
    return made


def understood(read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, TypeError, LookupError) as error:
        raise InternalError(f"not an answer of rapt-server: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class Inference(Generic[A]):
    outputs: dict[str, A]
    plan: str


def _after_json(headers: Mapping[str, str], start: memoryview) -> int:
    size = headers.get(_JSON_BYTES.lower(), "")
    return int(size) if re.fullmatch("[0-9]{1,18}", size) else 0  # _inference() will say what is wrong


def parameter(name: str, value: Any) -> bool | int | float | str:
    plain = value.item() if isinstance(value, np.generic) else value
    if not isinstance(plain, (bool, int, float, str)):
        raise TypeError(f"parameters[{name!r}] is {value!r}; it must be a boolean, a number or a string")
    check(not isinstance(plain, float) or math.isfinite(plain), f"parameters[{name!r}] is {plain}; it must be finite")
    if isinstance(plain, int):
        integer(f"parameters[{name!r}]", plain, most=2**64 - 1)
    return plain


def check_names(outputs: Sequence[str]) -> None:
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        raise TypeError(f"outputs is {outputs!r}; it must be a sequence of names")


def output_of(name: str, datatype: str, shape: Sequence[int], data: memoryview, like: A) -> A:
    return array_of(name, _CODES_OF[datatype], tuple(shape), data, like)


def inference(outputs: dict[str, A], wanted: Sequence[str], plan: str) -> Inference[A]:
    check(not wanted or outputs.keys() == set(wanted), f"outputs are {[*outputs]}, of which {[*wanted]} were asked for")
    return Inference(outputs, plan)


def _inference(answer: Answer, wanted: Sequence[str], like: A) -> Inference[A]:
    end = int(answer.headers.get(_JSON_BYTES.lower(), len(answer.body)))
    outputs, at = {}, end
    for output in json.loads(bytes(answer.body[:end])).get("outputs", []):
        name, size = output["name"], output["parameters"]["binary_data_size"]
        data, at = answer.body[at : at + size], at + size
        outputs[name] = output_of(name, output["datatype"], output["shape"], data, like)
    return inference(outputs, wanted, answer.headers.get("rapt-plan", ""))


class Server(ABC):
    """A server over one transport. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Later calls raise ValueError."""

    @abstractmethod
    def deadline(self, timeout: float | None) -> Deadline:
        """Of a call with this timeout; None: the client's."""

    @abstractmethod
    def send(self, method: Method, body: Sequence[Buffer], timeout: float | None) -> memoryview:
        """Sends a message and returns the answer's bytes. Raises CallError."""

    @abstractmethod
    def ask(self, kind: type[T], method: Method, message: Mapping[str, Any], timeout: float | None) -> T:
        """Sends and receives messages without tensors."""

    @abstractmethod
    def infer(
        self,
        model: str,
        inputs: Mapping[str, Sent],
        outputs: Sequence[str],
        parameters: Mapping[str, Any],
        like: A,
        timeout: float | None,
    ) -> Inference[A]:
        """Calls a model of the Open Inference Protocol. Outputs are of the kind of `like`."""

    @abstractmethod
    def is_ready(self, timeout: float | None) -> bool:
        """Makes one attempt. Raises Unavailable if there is no server."""

    def compute(
        self, method: Method, values: Mapping[str, Any], read: Callable[[dict[str, Any]], T], timeout: float | None
    ) -> T:
        """Sends a message with tensors. `read` takes the answer's fields; its ValueError, TypeError and LookupError make the
        answer malformed."""
        answer = self.send(method, _messages.encode(method.request, values), timeout)
        return understood(lambda: read(_messages.decode(method.response, answer)))

    def report(self, kind: type[T], method: Method, values: Mapping[str, Any], timeout: float | None) -> T:
        """Sends a message with tensors whose answer has none."""
        return self.compute(method, values, lambda message: from_json(kind, message), timeout)


class HttpServer(Server):
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def close(self) -> None:
        """Closes idle connections; calls that run go on, and close theirs."""
        self.calls.close()

    def deadline(self, timeout: float | None) -> Deadline:
        return self.calls.deadline(timeout)

    def send(self, method: Method, body: Sequence[Buffer], timeout: float | None) -> memoryview:
        return self.calls.call(
            method.verb,
            method.path,
            body,
            "Content-Type: application/x-protobuf\r\nAccept: application/x-protobuf\r\n",
            timeout,
            payload_at=lambda _, start: _messages.payload_at(method.response, start),
        ).body

    def ask(self, kind: type[T], method: Method, message: Mapping[str, Any], timeout: float | None) -> T:
        """In JSON."""
        path, body = method.path, b""
        if method.verb == "GET":
            path += f"?{urllib.parse.urlencode(message)}" if message else ""
        else:
            body = json.dumps(message).encode()
        answer = self.calls.call(method.verb, path, [body], "Content-Type: application/json\r\n", timeout)
        return understood(lambda: from_json(kind, json.loads(bytes(answer.body))))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Sent],
        outputs: Sequence[str],
        parameters: Mapping[str, Any],
        like: A,
        timeout: float | None,
    ) -> Inference[A]:
        """With the extension of binary tensors."""
        check_names(outputs)
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": name,
                        "datatype": _arrays.DATATYPES[x.dtype],
                        "shape": x.shape,
                        "parameters": {"binary_data_size": x.data.nbytes},
                    }
                    for name, x in inputs.items()
                ],
                "outputs": [{"name": name} for name in outputs],
                "parameters": {name: parameter(name, value) for name, value in parameters.items()}
                | {"binary_data_output": True},
            }
        ).encode()
        path = f"/v2/models/{urllib.parse.quote(model, safe='')}/infer"
        headers = f"Content-Type: application/octet-stream\r\n{_JSON_BYTES}: {len(head)}\r\n"
        body: list[Buffer] = [head, *(x.bytes() for x in inputs.values() if x.data.size)]
        answer = self.calls.call("POST", path, body, headers, timeout, payload_at=_after_json)
        return understood(lambda: _inference(answer, outputs, like))

    def is_ready(self, timeout: float | None) -> bool:
        try:
            self.calls.call("GET", "/v2/health/ready", timeout=timeout, retries=Retry(attempts=1))
        except Unavailable as error:
            if error.status == 0:
                raise
            return False
        return True
