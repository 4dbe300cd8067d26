"""A client of rapt-server over HTTP, by the standard library, or over gRPC."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypedDict, Unpack

from . import _messages, capi
from ._arrays import A, Array, Layout
from ._attention import (
    LAYOUTS,
    OF_LAYOUT,
    AttendResult,
    Call,
    Options,
    Scores,
    backward_call,
    boolean,
    check,
    fill,
    forward_call,
    heads_of,
    integer,
    layout_of,
)
from ._caches import Cache, CacheItem, Caches, StepOptions, StepResult
from ._http import Calls, Endpoint, Retry
from ._operators import (
    LINEAR,
    LSH,
    POSITIONAL,
    ROTARY,
    LinearOptions,
    LinearResult,
    LshOptions,
    LshResult,
    Operator,
    PositionalOptions,
    RotaryOptions,
    linear_call,
    linear_result,
    lsh_call,
)
from ._options import shows
from ._reports import CacheInfo, Diagnosis, Float, LayerShape, MemoryEstimates, ServerInfo, Storage
from ._server import HttpServer, Sent, Server, dtype_name, received

Path = str | os.PathLike[str]

_OTHERWISE = ("query_heads", "kv_heads", "block_q", "block_k")  # which rapt_problem has in every call
# Fields of Attention that rapt_problem has, too; the optional ones have a has_ beside them there.
_OF_PROBLEM = tuple(name for name in _messages.ATTENTION if hasattr(capi.Problem, name) and name not in _OTHERWISE)


class _Message(NamedTuple):
    """A call as it is sent."""

    fields: dict[str, Any]  # of AttendRequest or AttendBackwardRequest
    is_rows: bool  # q is [S, D], and sent as [1, S, D]


def _attend_request(call: Call) -> _Message:
    """Checks a call as rapt.attend does."""
    fields, is_rows = _fields(call)
    fields |= {"score_output": capi.SCORE_OUTPUTS.get(call.options.get("scores", ""))}
    return _Message(fields | {"want_lse": "lse" in call.wanted, "want_present": "present_key" in call.wanted}, is_rows)


def _backward_request(call: Call) -> _Message:
    """Likewise for rapt.attend_backward."""
    forward, is_rows = _fields(call)
    fields = {name: forward.pop(name) for name in list(forward) if name in _messages.ATTEND_BACKWARD_REQUEST}
    return _Message(fields | {"call": forward, "gradients": call.wanted}, is_rows)


def _fields(call: Call) -> _Message:
    tensors = {name: Sent.of(name, x) for name, x in call.inputs.items()}
    layouts = tuple((name, x.layout) for name, x in tensors.items())
    fields: dict[str, Any] = {"attention": [_attributes(layouts, tuple(call.options.items()))]}
    is_rows = len(tensors["q"].shape) == 2
    for name, x in tensors.items():
        sent = x.with_a_batch() if is_rows and name in OF_LAYOUT else x
        fields[name] = x.data.tolist() if name == "key_lengths" else sent.message()
    return _Message(fields, is_rows)


def _outputs(call: Call, is_rows: bool, response: Mapping[str, Any]) -> dict[str, Any]:
    outputs = {name: received(name, response.get(name), call.inputs["q"]) for name in call.wanted}
    of_rows = ("y", "dq", "dk", "dv", "d_relative_query") if is_rows else ()
    return {name: x[0] if name in of_rows else x for name, x in outputs.items()}


@functools.lru_cache(512)
def _attributes(layouts: tuple[tuple[str, Layout], ...], scalars: tuple[tuple[str, Any], ...]) -> bytes:
    """Checks a call, and returns its message Attention."""
    options = dict(scalars)
    problem = fill(dict(layouts), options).problem
    fields = {name: getattr(problem, name) for name in _OF_PROBLEM if getattr(problem, f"has_{name}", True)}
    fields |= {name: options.get(name) for name in ("block_q", "block_k", "v_head_size")}
    fields["layout"] = LAYOUTS[layout_of(options, len(dict(layouts)["q"].shape))]
    if fields["layout"] == LAYOUTS["BSE"]:
        fields |= heads_of(options)
    sides = {side: getattr(problem, f"{side}_window") for side in ("left", "right") if getattr(problem, f"has_{side}_window")}
    fields["window"] = sides or None
    if "dropout" in options:
        fields["dropout"] = {"probability": problem.dropout_probability, "seed": problem.dropout_seed}
    return b"".join(_messages.encode(_messages.ATTENTION, fields))


def _server_of(
    url: str,
    token: str | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    server_name: str,
    timeout: float,
    retries: Retry,
    max_message_bytes: int,
) -> Server:
    if url.lower().startswith(("grpc:", "grpcs:")):
        from ._grpc import GrpcServer

        return GrpcServer(url, token, ca, cert, key, server_name, timeout, retries, max_message_bytes)
    endpoint = Endpoint.of(url, token, ca, cert, key, server_name)
    return HttpServer(Calls(endpoint, token, retries, timeout, max_message_bytes))


class ClientOptions(TypedDict, total=False):
    """The options of Client, for AsyncClient."""

    token: str | None
    ca: Path | None
    cert: Path | None
    key: Path | None
    server_name: str
    timeout: float
    retries: Retry
    max_message_bytes: int


class Client:
    """Calls a rapt-server at `url`, "http://127.0.0.1:8000", "https://HOST:PORT", or over gRPC, which needs grpcio:
    "grpc://127.0.0.1:8001", "grpcs://HOST:PORT".

    `ca`, `cert` and `key` name PEM files: trusted authorities (None: the system's; over gRPC those of grpcio), and the
    certificate of the client. `server_name` is the name in the server's certificate, if it is not the host. `token` needs
    https or grpcs. `timeout`, in
    seconds, is that of calls without one; it covers retries, and the server gets what is left of it as its deadline.
    Requests and answers of more than `max_message_bytes` are refused.

    Arrays are those of rapt.attend(); one whose elements are not row-major is copied. Results are of q's library.
    Errors are those of rapt.errors, which are ValueError, TimeoutError, PermissionError, MemoryError, ConnectionError and
    so on as well; TypeError and RuntimeError are those of rapt.attend().

    Thread-safe. Calls at the same time have a connection each, over gRPC one for all; connections stay open for later
    calls. Unusable in a child made by fork. The first method opens the first connection. close() closes idle ones."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        server_name: str = "",
        timeout: float = 60,
        retries: Retry = Retry(),
        max_message_bytes: int = 256 << 20,
    ) -> None:
        self._server = _server_of(url, token, ca, cert, key, server_name, timeout, retries, max_message_bytes)
        self._caches = Caches(self._server)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes idle connections; calls that run go on, and close theirs. Over gRPC they end. Caches that were not closed
        expire."""
        self._caches.renewals.stop()
        self._server.close()

    @shows(Options)
    def attention(
        self, q: A, k: Array, v: Array | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> A:
        """rapt.attention() at the server."""
        return self.attend(q, k, v, timeout=timeout, **options).y

    @shows(Options)
    def attend(
        self,
        q: A,
        k: Array,
        v: Array | None = None,
        *,
        scores: Scores | None = None,
        lse: bool = False,
        present: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AttendResult[A]:
        """rapt.attend() at the server."""
        call = forward_call(q, k, v, options, scores, lse, present)
        fields, is_rows = _attend_request(call)
        return self._server.compute(
            _messages.ATTEND,
            fields,
            lambda response: AttendResult(**_outputs(call, is_rows, response), plan=response.get("plan", "")),
            timeout,
        )

    @shows(Options)
    def attend_backward(
        self,
        q: A,
        k: Array,
        v: Array | None,
        dy: Array,
        *,
        gradients: Sequence[str] | None = None,
        y: Array | None = None,
        lse: Array | None = None,
        dlse: Array | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> dict[str, A]:
        """rapt.attend_backward() at the server."""
        call = backward_call(q, k, v, dy, gradients, y, lse, dlse, options)
        fields, is_rows = _backward_request(call)
        return self._server.compute(
            _messages.ATTEND_BACKWARD,
            fields,
            lambda response: _outputs(call, is_rows, response),
            timeout,
        )

    @shows(LinearOptions)
    def linear_attention(
        self, query: A, key: Array, value: Array, *, timeout: float | None = None, **options: Unpack[LinearOptions]
    ) -> LinearResult[A]:
        """rapt.linear_attention() at the server. A state goes from call to call as past_state and past_normalizer."""
        return linear_result(*self._operate(LINEAR, linear_call(query, key, value, options), query, timeout))

    @shows(LshOptions)
    def lsh_attention(
        self, q: A, v: Array, *, timeout: float | None = None, **options: Unpack[LshOptions]
    ) -> LshResult[A]:
        """rapt.lsh_attention() at the server."""
        outputs, plan = self._operate(LSH, lsh_call(q, v, options), q, timeout)
        return LshResult(**outputs, plan=plan)

    @shows(RotaryOptions)
    def rotary_embedding(self, x: A, *, timeout: float | None = None, **options: Unpack[RotaryOptions]) -> A:
        """rapt.rotary_embedding() at the server."""
        return self._operate(ROTARY, ROTARY.call({"x": x}, "y", options), x, timeout)[0]["y"]

    @shows(PositionalOptions)
    def positional_encoding(self, x: A, *, timeout: float | None = None, **options: Unpack[PositionalOptions]) -> A:
        """rapt.positional_encoding() at the server."""
        return self._operate(POSITIONAL, POSITIONAL.call({"x": x}, "y", options), x, timeout)[0]["y"]

    def _operate(self, operator: Operator, call: Call, like: A, timeout: float | None) -> tuple[dict[str, A], str]:
        """The outputs and the plan of a call of an operator other than attention, by the model of its name."""
        inputs = {operator.theirs(name): Sent.of(name, x) for name, x in call.inputs.items()}
        names = {operator.theirs(name): name for name in call.wanted}
        with operator.errors():
            answer = self._server.infer(operator.name, inputs, list(names), operator.parameters(call), like, timeout)
        return {name: answer.outputs[theirs] for theirs, name in names.items()}, answer.plan

    def infer(
        self,
        model: str,
        inputs: Mapping[str, A],
        outputs: Sequence[str] = (),
        *,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, A]:
        """Calls a model of the Open Inference Protocol, such as "rotary_embedding" or a layer, by the names that its metadata
        lists. Returns the outputs of these names, by default those that the server chooses, of the kind of the first
        input.

        Not for sequences (`sequence_id`): a repeated call would append its tokens again. create_cache() is for them."""
        if not inputs:
            raise ValueError("inputs is empty; a model needs at least one")
        check("sequence_id" not in (parameters or {}), "parameters has sequence_id", "use create_cache()")
        tensors = {name: Sent.of(name, x) for name, x in inputs.items()}
        like = next(iter(inputs.values()))
        return self._server.infer(model, tensors, outputs, parameters or {}, like, timeout).outputs

    @shows(Options)
    def diagnose(
        self, q: Array, k: Array, v: Array | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Diagnosis:
        """Explains a call whose result seems wrong: the range of every step, hidden pairs, likely causes. Slower than
        attend()."""
        request = {"call": _attend_request(forward_call(q, k, v, options)).fields}
        return self._server.report(Diagnosis, _messages.DIAGNOSE, request, timeout)

    def estimate_memory(
        self,
        lengths: Sequence[int],
        *,
        query_heads: int,
        kv_heads: int = 0,
        batch: int = 1,
        head_size: int = 64,
        value_head_size: int = 0,
        dtype: Float = "float32",
        block_q: int = 0,
        block_k: int = 0,
        selected_indices: int = 0,
        alibi: bool = False,
        bias_table: int = 0,
        relative_bias: int = 0,
        per_head: bool = False,
        lsh_hashes: int = 0,
        lsh_chunk_length: int = 0,
        favor_features: int = 0,
        timeout: float | None = None,
    ) -> MemoryEstimates:
        """The memory that self-attention of each length needs at the server, computed in three ways, and by LSH and FAVOR+.
        Sizes of 0 are the server's defaults; `block_q` to `per_head` are inputs in place of a mask or bias of all pairs. The
        names are those of EstimateMemoryRequest in proto/rapt/v1/attention.proto."""
        sizes = {
            "query_heads": query_heads,
            "kv_heads": kv_heads,
            "batch": batch,
            "head_size": head_size,
            "value_head_size": value_head_size,
            "block_q": block_q,
            "block_k": block_k,
            "selected_indices": selected_indices,
            "bias_table": bias_table,
            "relative_bias": relative_bias,
            "lsh_hashes": lsh_hashes,
            "lsh_chunk_length": lsh_chunk_length,
            "favor_features": favor_features,
        }
        request: dict[str, Any] = {
            "lengths": [integer("lengths", length) for length in lengths],
            "dtype": dtype_name("dtype", dtype),
            "alibi": bool(boolean("alibi", alibi)),
            "per_head": bool(boolean("per_head", per_head)),
        }
        request |= {name: integer(name, value) for name, value in sizes.items()}
        return self._server.ask(MemoryEstimates, _messages.ESTIMATE_MEMORY, request, timeout)

    def estimate_layer_memory(
        self, model: str, lengths: Sequence[int], *, batch: int = 1, dtype: Float | None = None, timeout: float | None = None
    ) -> MemoryEstimates:
        """The memory that calls of a layer of the server's --model_repository need, with query and key of each length: its
        weights, and what a call reserves. Without `dtype` that of the weights. standard_bytes and chunked_bytes are 0."""
        check(isinstance(model, str) and model != "", f"model is {model!r}", "it must be the name of a layer")
        request: dict[str, Any] = {
            "model": model,
            "lengths": [integer("lengths", length) for length in lengths],
            "batch": integer("batch", batch),
        }
        if dtype is not None:
            request["dtype"] = dtype_name("dtype", dtype)
        return self._server.ask(MemoryEstimates, _messages.ESTIMATE_MEMORY, request, timeout)

    def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Version, backends, limits and memory of the server."""
        return self._server.ask(ServerInfo, _messages.GET_SERVER_INFO, {}, timeout)

    def ready(self, *, timeout: float | None = None) -> bool:
        """Whether the server computes and accepts calls. Never retried. Raises rapt.errors.Unavailable if there is none."""
        return self._server.is_ready(timeout)

    def create_cache(
        self,
        shapes: LayerShape | Sequence[LayerShape],
        dtype: Float = "float32",
        *,
        name: str = "",
        storage: Storage = "plain",
        reserve_tokens: int = 0,
        lease: float | None = None,
        first_position: int = 0,
        timeout: float | None = None,
    ) -> Cache:
        """Makes keys and values at the server, docs/kv-cache.md. If the caller has a live cache of this name that was made
        with the same shapes, dtype, storage and first_position, it is the result, with what it holds. `lease` in seconds,
        None: the server's default."""
        return self._caches.create(shapes, dtype, name, storage, reserve_tokens, lease, first_position, timeout)

    def open_cache(self, info: CacheInfo) -> Cache:
        """A handle that neither renews the cache nor closes it by itself. Makes no call."""
        return self._caches.open(info)

    def list_caches(self, name_prefix: str = "", *, timeout: float | None = None) -> list[CacheInfo]:
        """The caller's caches in the order of their making."""
        return self._caches.list(name_prefix, timeout)

    def attend_caches(
        self,
        layer: int,
        items: Sequence[CacheItem],
        q: A | None = None,
        k: Array | None = None,
        v: Array | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[StepOptions],
    ) -> StepResult[A]:
        """A step of several caches of this client, of the same sizes and type at this layer: q [sum of rows, Hq, D], k and v
        [sum of new_tokens, Hkv, ...]. Appends to all of them, or to none."""
        return self._caches.attend(layer, items, q, k, v, timeout, options)

    def update_caches(
        self,
        *,
        forks: Sequence[Cache] = (),
        truncates: Sequence[tuple[Cache, int]] = (),
        closes: Sequence[Cache] = (),
        timeout: float | None = None,
    ) -> list[Cache]:
        """Cache.fork(), truncate(length) and close() of several caches of this client in one call, in this order, as for a
        step of beam search. No cache twice in truncates or closes. Returns the forks. After an error there are none; some of
        the other changes may be made."""
        return self._caches.update(forks, truncates, closes, timeout)
