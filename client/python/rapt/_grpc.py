"""A server over gRPC, by grpcio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from . import _arrays, _messages
from ._arrays import A
from ._http import (
    PEEKED_BYTES,
    Buffer,
    Deadline,
    Retry,
    Stop,
    check_answer_size,
    check_url,
    checked_size,
    current_stop,
    retried,
    room,
)
from ._messages import BYTES, DOUBLE, INT, TEXT, UINT, Method, Schema
from ._server import Inference, Sent, Server, check_names, inference, output_of, parameter, understood
from ._version import VERSION
from .errors import Unavailable, error_of_code

try:
    import grpc  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError as missing:
    raise ImportError("a url of grpc:// needs grpcio: pip install 'rapt-attention[grpc]'") from missing

T = TypeVar("T")

# The Open Inference Protocol, proto/inference/grpc_service.proto.
_PARAMETER: Schema = {
    "bool_param": (1, INT),
    "int64_param": (2, INT),
    "string_param": (3, TEXT),
    "double_param": (4, DOUBLE),
    "uint64_param": (5, UINT),
}
_ENTRY: Schema = {"key": (1, TEXT), "value": (2, _PARAMETER)}
_TENSOR: Schema = {"name": (1, TEXT), "datatype": (2, TEXT), "shape": (3, [INT])}
_INFER = Method(
    "POST",
    "",
    "/inference.GRPCInferenceService/ModelInfer",
    {
        "model_name": (1, TEXT),
        "parameters": (4, [_ENTRY]),
        "inputs": (5, [_TENSOR]),
        "outputs": (6, [{"name": (1, TEXT)}]),
        "raw_input_contents": (7, [BYTES]),
    },
    {"outputs": (5, [_TENSOR]), "raw_output_contents": (6, [BYTES])},
)
_CHECK_HEALTH = Method("POST", "", "/grpc.health.v1.Health/Check", {}, {"status": (1, INT)})
_SERVING = 1


def _field_of(value: bool | int | float | str) -> str:
    if isinstance(value, int) and value >= 2**63:
        return "uint64_param"
    return {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]


def _credentials(ca: Any, cert: Any, key: Any) -> Any:
    """Of TLS, from PEM files."""

    def read(path: Any) -> bytes | None:
        if path is None:
            return None
        with open(path, "rb") as file:
            return file.read()

    # As of ssl.SSLContext.load_cert_chain(), the key may be in the file of the certificate.
    return grpc.ssl_channel_credentials(read(ca), read(key or cert), read(cert))


class GrpcServer(Server):
    def __init__(
        self,
        url: str,
        token: str | None,
        ca: Any,
        cert: Any,
        key: Any,
        server_name: str,
        timeout: float,
        retries: Retry,
        max_message_bytes: int,
    ) -> None:
        parts = check_url(url, "grpc", token, ca, cert, key)
        if parts.port is None or parts.path not in ("", "/"):
            raise ValueError(f"url is {url!r}; it must be grpc://HOST:PORT or grpcs://HOST:PORT")
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", -1),  # _call() has the limits
            ("grpc.max_receive_message_length", -1),
            ("grpc.primary_user_agent", f"rapt-python/{VERSION}"),
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
            ("grpc.enable_http_proxy", 0),
            ("grpc.http2.lookahead_bytes", 1 << 20),  # answers of up to 1 MiB do not wait for the window
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        target = f"{host}:{parts.port}"
        if parts.scheme == "grpcs":
            self._channel = grpc.secure_channel(target, _credentials(ca, cert, key), options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self._url, self._timeout, self._retries, self._most = url, timeout, retries, max_message_bytes
        self._pid, self._is_closed = os.getpid(), False
        self._calls: dict[str, Any] = {}  # of each method

    def close(self) -> None:
        """Ends calls that run."""
        self._is_closed = True
        self._channel.close()

    def deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _call(
        self, method: Method, body: Sequence[Buffer], timeout: float | None, retries: Retry | None = None
    ) -> tuple[memoryview, dict[str, str]]:
        """The answer's bytes, and its trailers."""
        if os.getpid() != self._pid:
            raise RuntimeError("the client was made by another process; make one after fork()")
        deadline, stop = self.deadline(timeout), current_stop.get()
        checked_size(body, self._most)
        data = b"".join(body)
        answer, trailers = retried(
            lambda: self._attempt(method.name, data, deadline, stop),
            retries or self._retries,
            deadline,
            stop or Stop(),
            lambda: self._is_closed,
        )
        check_answer_size(len(answer), self._most, 200)
        aligned = room(len(answer), _messages.payload_at(method.response, memoryview(answer)[:PEEKED_BYTES]))
        aligned[:] = answer
        return aligned, trailers

    def _attempt(
        self, name: str, data: bytes, deadline: Deadline, stop: Stop | None
    ) -> tuple[bytes, dict[str, str]]:
        if self._is_closed:
            raise ValueError("the client was closed")
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = self._channel.unary_unary(name)
        try:
            if stop is None:
                answer, done = call.with_call(data, deadline.left(), self._metadata)
                return answer, dict(done.trailing_metadata())
            done = call.future(data, deadline.left(), self._metadata)
            stop.watch(done.cancel)
            try:
                return done.result(), dict(done.trailing_metadata())
            finally:
                stop.watch(None)
        except grpc.FutureCancelledError as error:
            raise Unavailable(f"{self._url}: the call was cancelled") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # by close()
                raise Unavailable(f"{self._url}: {error.details()}") from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                deadline.left()  # raises
            trailers = dict(error.trailing_metadata() or ())
            raise error_of_code(error.code().value[0], error.details(), trailers.get("rapt-reason", "")) from error

    def send(self, method: Method, body: Sequence[Buffer], timeout: float | None) -> memoryview:
        return self._call(method, body, timeout)[0]

    def ask(self, kind: type[T], method: Method, message: Mapping[str, Any], timeout: float | None) -> T:
        return self.report(kind, method, message, timeout)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Sent],
        outputs: Sequence[str],
        parameters: Mapping[str, Any],
        like: A,
        timeout: float | None,
    ) -> Inference[A]:
        check_names(outputs)
        given = {name: parameter(name, value) for name, value in parameters.items()}
        request = {
            "model_name": model,
            "parameters": [{"key": name, "value": {_field_of(x): x}} for name, x in given.items()],
            "inputs": [
                {"name": name, "datatype": _arrays.DATATYPES[x.dtype], "shape": x.shape} for name, x in inputs.items()
            ],
            "outputs": [{"name": name} for name in outputs],
            "raw_input_contents": [x.bytes() for x in inputs.values()],
        }
        answer, trailers = self._call(_INFER, _messages.encode(_INFER.request, request), timeout)

        def read() -> Inference[A]:
            message = _messages.decode(_INFER.response, answer)
            described = zip(message["outputs"], message["raw_output_contents"], strict=True)
            arrays = {x["name"]: output_of(x["name"], x["datatype"], x["shape"], data, like) for x, data in described}
            return inference(arrays, outputs, trailers.get("rapt-plan", ""))

        return understood(read)

    def is_ready(self, timeout: float | None) -> bool:
        answer = self._call(_CHECK_HEALTH, [], timeout, Retry(attempts=1))[0]
        return _messages.decode(_CHECK_HEALTH.response, answer).get("status") == _SERVING
