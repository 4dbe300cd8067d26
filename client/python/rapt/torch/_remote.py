"""A model of transformers whose attention, keys and values are at a rapt-server, docs/disaggregation.md."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache as ModelCache
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import causal_mask_function

from .._caches import Cache, CacheItem
from .._client import Client
from .._reports import LayerShape, Storage
from ..errors import CallError, DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from ._masks import rule_of
from ._transformers import OF_MODEL, SERVER_NAME, _of_one_type, _wants_weights

T = TypeVar("T")
U = TypeVar("U")
F = TypeVar("F", bound=Callable[..., Any])

NAME = SERVER_NAME
_MOST_CALLS = 16  # at the same time
_FIELD_BYTES = 65536  # of a call, beside its tensors, at least
_ITEM_BYTES = 256  # of a sequence's fields in a call, at most
_AFTER_AN_ERROR = "After an error, call recover() of the RemoteCache first."

# Arguments of attention functions that change nothing here: the mask has the window, and the rest is of the model.
_IGNORED = OF_MODEL | {"is_causal", "sliding_window"}


# torch.compile breaks the graph here, and refuses fullgraph=True with this reason.
def _eager(function: F) -> F:
    disable: Any = torch.compiler.disable
    disabled: F = disable(function, reason=f"attn_implementation={NAME!r} calls a server")
    return disabled


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(f"attn_implementation={NAME!r} does not support {what}")


# ---- Masks ----------------------------------------------------------------------------------------


class _Passes(threading.local):
    """Of each thread: whether mask() has been called for a forward pass whose first layer has not begun."""

    has_mask = False


_passes = _Passes()


@dataclass(frozen=True)
class _Rows:
    """What a mask says of a forward pass: which of its rows are tokens, and what they see."""

    window: int  # how many of the last tokens a row sees; 0: all
    past: list[int]  # tokens of each sequence before this pass, without padding
    new: list[int]  # the tokens of this pass, which are the last ones of its rows


@_eager
def mask(
    batch_size: int,
    q_length: int,
    q_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """A mask function of transformers: which of the new rows are tokens, [B, 1, 1, Sq], never Sq x T, with its _Rows."""
    rule = rule_of(mask_function)
    if rule is None or rule.right != 0:
        raise _refusal("this mask: it must be causal, or causal with a sliding window, and no other function")
    columns = q_offset + q_length
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, columns, dtype=torch.bool, device=device)
    if attention_mask.shape[1] < columns:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns; the {q_offset} tokens in the cache and the {q_length} of"
            f" this pass need {columns}. {_AFTER_AN_ERROR}"
        )
    tokens = attention_mask[:, :columns].bool()
    if bool((tokens[:, :-1] & ~tokens[:, 1:]).any()):
        raise _refusal("padding after a token: attention_mask must be 0 only before the first token of a sequence")
    past, new = (part.sum(1).tolist() for part in (tokens[:, :q_offset], tokens[:, q_offset:]))
    described = tokens[:, None, None, q_offset:].clone()
    described._rapt_rows = _Rows(0 if rule.left is None else rule.left + 1, past, new)  # type: ignore[attr-defined]
    _passes.has_mask = True
    return described


# ---- The cache ------------------------------------------------------------------------------------


class _Layer(CacheLayerMixin):
    """What a model asks of a layer's keys and values, which are at the servers."""

    is_croppable = True

    def __init__(self, cache: RemoteCache, index: int, window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.ref(cache)  # no cycle, so that the caches are closed when the last reference is gone
        self.index, self.window, self.is_sliding = index, window, window > 0
        self.is_initialized = True
        self.length = 0  # of a row, with padding
        self.updated: object = None  # what update() returned and attention has not taken

    @property
    def cache(self) -> RemoteCache:
        cache = self._cache()
        assert cache is not None, "the model holds the cache of its forward pass"
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    @_eager
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the new tokens alone. Attention functions get no cache: what they get instead is on the tensors."""
        layers = self.cache._layers
        if self.index == 0 and len(layers) > 1:  # what a pass that failed left
            for layer in layers:
                layer.updated = None
        before = layers[max(self.index - 1, 0)]
        if before.updated is not None or (self.index == 0 and not _passes.has_mask):
            raise _refusal(
                "a mask of the caller's or the model's own, and a RemoteCache needs attn_implementation='rapt-server': the"
                " model has not asked it for a mask, or has computed attention without it"
            )
        if self.index == 0:
            _passes.has_mask = False
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        self.updated = object()
        for x in (key_states, value_states):
            x._rapt_update = (self, self.updated)  # type: ignore[attr-defined]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _close(handles: Sequence[Cache], timeout: float | None = None) -> None:
    """One call for each server. Caches that could not be closed expire."""
    for caches in {handle._caches for handle in handles}:
        try:
            caches.close([handle for handle in handles if handle._caches is caches], timeout)
        except (CallError, ValueError):  # ValueError: the client was closed
            pass


def _shut(handles: list[Cache], owned: list[Client], pid: int) -> None:
    """What is left to do for a RemoteCache that is gone, in the process that made it."""
    if os.getpid() == pid:
        _close(handles, timeout=1)
        for client in owned:
            client.close()
    handles.clear()


class RemoteCache(ModelCache):
    """The keys and values of a model of transformers at a rapt-server, or at several, which also compute its attention.

        rapt.torch.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rapt-server")
        with rapt.torch.RemoteCache("http://127.0.0.1:8000", model.config) as cache:
            tokens = model.generate(**inputs, cache=cache)

    `servers` are addresses or clients; with several, the sequences of a batch go to them in turn. A sequence is one
    rapt.Cache with all layers. `storage` and `lease` are as of Client.create_cache(); leases are renewed in the background
    while the cache lives. close(), the end of `with`, the last reference and the end of the interpreter close the caches
    at the servers.

    Errors of calls are those of rapt.errors and say how to go on. Not thread-safe. Decoders with causal attention,
    windows, softcap and sinks; NotImplementedError names what else a model or a call wants."""

    def __init__(
        self,
        servers: Client | str | Sequence[Client | str],
        config: Any,
        *,
        storage: Storage = "plain",
        lease: float = 60.0,
    ) -> None:
        listed: Sequence[Any] = servers if isinstance(servers, (list, tuple)) else [servers]
        if not listed or not all(isinstance(server, (Client, str)) for server in listed):
            raise TypeError(f"servers is {servers!r}; it must be an address or a rapt.Client, or several of them")
        self._layers = [_Layer(self, n, window) for n, window in enumerate(_windows_of(config))]
        super().__init__(layers=[*self._layers])
        clients: list[Client] = [Client(server) if isinstance(server, str) else server for server in listed]
        owned = [client for client, server in zip(clients, listed) if isinstance(server, str)]
        self._clients = list(dict.fromkeys(clients))
        self._storage, self._lease = storage, lease
        self._sizes: tuple[int, int, int] | None = None  # Hkv, D and Dv of all layers
        self._most_bytes: dict[Client, int] = {}  # of a call
        self._threads: ThreadPoolExecutor | None = None
        self._handles: list[Cache] = []  # of each sequence
        self._padding: list[int] = []  # before each sequence
        self._has_branched = False  # beams: callers do not know which sequence a row has
        self._shut = weakref.finalize(self, _shut, self._handles, owned, os.getpid())

    def __enter__(self) -> RemoteCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the caches at the servers, and the clients that were made for addresses. Waits at most a second for each
        server; a cache that could not be closed expires."""
        self._shut()
        if self._threads is not None:
            self._threads.shutdown()

    @property
    def caches(self) -> list[Cache]:
        """The cache of each sequence."""
        return list(self._handles)

    @property
    def batch_size(self) -> int:
        return len(self._handles) or -1

    def reset(self) -> None:
        """Closes the caches at the servers. The next forward pass makes new ones."""
        self._check_open()
        _close(self._handles)
        self._handles.clear()
        self._has_branched = False
        for layer in self._layers:
            layer.length, layer.updated = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every sequence: -n or 0, as of transformers' caches."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must be at most 0: -n removes n tokens")
        self._check_open()
        self._truncate(self.get_seq_length() + tokens_to_remove)

    def recover(self) -> int:
        """After a call that failed: takes all layers of all sequences back to the last tokens that all of them have, and
        returns how many that are, with padding. generate() with the tokens so far then goes on from there. Returns 0, and
        generate() begins with all tokens, after beams, and if a window has evicted tokens that it would need. Raises NotFound
        if a server does not have the keys and values any more; a new RemoteCache then begins with all tokens."""
        self._check_open()
        for layer in self._layers:
            layer.updated = None
        length = min(layer.length for layer in self._layers)
        if length == 0 or self._has_branched:
            self.reset()
            return 0
        self._all(Cache.info, self._handles)  # a handle then knows what its cache has of the failed call
        try:
            self._truncate(length)
        except ValueError as error:
            if getattr(error, "reason", "") != "evicted":
                raise
            self.reset()
            return 0
        return length

    def _check_open(self) -> None:
        if not self._shut.alive:
            raise ValueError("the RemoteCache was closed")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self._handles)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The first row that takes a sequence has its cache, the others have forks, which share its pages."""
        taken: dict[int, int] = {}
        chosen = [int(index) for index in indices]
        self._has_branched = True
        for row, index in enumerate(chosen):
            taken.setdefault(index, row)
        copies = [(row, self._handles[index]) for row, index in enumerate(chosen) if taken[index] != row]
        handles = [self._handles[index] for index in chosen]
        gone = [handle for index, handle in enumerate(self._handles) if index not in taken]
        forks = self._update(forks=[parent for _, parent in copies], closes=gone)
        for (row, _), fork in zip(copies, forks):
            handles[row] = fork
        self._handles[:], self._padding = handles, [self._padding[index] for index in chosen]

    def _truncate(self, length: int) -> None:
        """Keeps the first tokens of every row, `length` with padding."""
        kept = [(handle, max(length - padding, 0)) for handle, padding in zip(self._handles, self._padding)]
        self._update(truncates=[(handle, keep) for handle, keep in kept if max(handle.lengths) > keep])
        for layer in self._layers:
            layer.length = length

    def _update(
        self, forks: Sequence[Cache] = (), truncates: Sequence[tuple[Cache, int]] = (), closes: Sequence[Cache] = ()
    ) -> list[Cache]:
        """Client.update_caches(), by one call of each server that has such caches."""
        made: dict[int, Cache] = {}

        def update(client: Client) -> None:
            mine = [n for n, parent in enumerate(forks) if parent._caches is client._caches]
            cuts = [cut for cut in truncates if cut[0]._caches is client._caches]
            ends = [gone for gone in closes if gone._caches is client._caches]
            if mine or cuts or ends:
                copies = client.update_caches(forks=[forks[n] for n in mine], truncates=cuts, closes=ends)
                made.update(zip(mine, copies))

        try:
            self._all(update, self._clients)
        except BaseException:
            _close([*made.values()])
            raise
        return [made[n] for n in range(len(forks))]

    def _all(self, call: Callable[[T], U], arguments: Sequence[T]) -> list[U]:
        """Makes a call for each argument, at the same time. Waits for all of them, then raises the first error."""
        if len(arguments) < 2:
            return [call(argument) for argument in arguments]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="rapt-remote")
        futures: list[Future[U]] = [self._threads.submit(call, argument) for argument in arguments]
        wait(futures)
        return [future.result() for future in futures]

    # ---- Steps ----

    def attend(self, layer: _Layer, rows: _Rows, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Appends the tokens of a pass to a layer and attends with its rows, of which padding is 0. One call for each
        server, unless that is too large."""
        self._begin(layer, rows, q, k, v)
        batch, length = q.shape[0], q.shape[2]
        q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v))
        y = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

        def step(client: Client) -> None:
            members = [n for n, handle in enumerate(self._handles) if handle._caches is client._caches and rows.new[n] > 0]
            index, sent = None, (q, k, v)
            if sum(rows.new[n] for n in members) < len(q):
                spans = [torch.arange((n + 1) * length - rows.new[n], (n + 1) * length) for n in members]
                index = torch.cat(spans) if spans else torch.arange(0)
                sent = q[index], k[index], v[index]
            counts = [(self._handles[n], rows.new[n]) for n in members]
            row_bytes = sum(x[0].nbytes for x in (q, k, v))
            most = (self._most_bytes[client] - _FIELD_BYTES - _ITEM_BYTES * len(members)) // row_bytes
            for first, items in _calls_of(counts, max(most, 1)):
                part = slice(first, first + sum(item.rows for item in items))
                answer = client.attend_caches(layer.index, items, *(x[part] for x in sent), **options).y
                assert answer is not None
                y[part if index is None else index[part]] = answer

        try:
            self._all(step, self._clients)
        except CallError as error:
            raise _explained(error, layer.index, len(self._layers)) from error
        layer.length += length
        return y.view(batch, length, *y.shape[1:])

    def _begin(self, layer: _Layer, rows: _Rows, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Makes the caches at the first pass, and checks that the pass follows those before."""
        sizes = k.shape[1], k.shape[3], v.shape[3]
        self._check_open()
        if not self._handles:
            self._open(sizes, q)
        if sizes != self._sizes:
            where = f"{self._sizes} in layer 0, {sizes} in layer {layer.index}"
            raise _refusal(f"layers of different sizes: Hkv, D, Dv are {where}")
        if q.shape[0] != len(self._handles):
            raise ValueError(f"the batch has {q.shape[0]} rows; this RemoteCache has {len(self._handles)}: reset() empties it")
        if rows.window != layer.window:
            raise _refusal(
                f"a mask that the config does not have: the window of layer {layer.index} is {rows.window}, by the config"
                f" {layer.window} (0: none)"
            )
        for n, handle in enumerate(self._handles):
            known = handle.lengths[layer.index]
            if known != rows.past[n]:
                raise ValueError(
                    f"row {n} has {rows.past[n]} tokens before this pass by its attention_mask, and {known} in layer"
                    f" {layer.index} of the cache. {_AFTER_AN_ERROR}"
                )
        self._padding = [layer.length + q.shape[2] - past - new for past, new in zip(rows.past, rows.new)]

    def _open(self, sizes: tuple[int, int, int], q: Tensor) -> None:
        heads, size, value_size = sizes
        shapes = [
            LayerShape(kv_heads=heads, head_size=size, value_head_size=value_size, keep_last=layer.window)
            for layer in self._layers
        ]
        dtype: Any = str(q.dtype).removeprefix("torch.")
        for client in self._clients:
            self._most_bytes[client] = client.info().max_message_bytes

        made: dict[int, Cache] = {}

        def create(row: int) -> None:
            client = self._clients[row % len(self._clients)]
            made[row] = client.create_cache(shapes, dtype, storage=self._storage, lease=self._lease)

        try:
            self._all(create, range(q.shape[0]))
        except BaseException:
            _close([*made.values()])
            raise
        self._handles += [made[row] for row in range(q.shape[0])]
        self._sizes = sizes


def _windows_of(config: Any) -> list[int]:
    """Of each layer, 0 for none."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise _refusal(f"encoder-decoder models, such as {text.model_type}: cross attention is not causal")
    types, arguments = get_layer_types_and_kwargs(text)
    known = {"full_attention", "sliding_attention"}
    for n, name in enumerate(types):
        if name not in known:
            why = "no keys of its own" if name == "dummy" else f"attention of the type {name}"
            raise _refusal(f"{text.model_type}, whose layer {n} has {why}; it must be one of {', '.join(sorted(known))}")
    return [int(one.get("sliding_window") or 0) for one in arguments]


def _calls_of(counts: Sequence[tuple[Cache, int]], most: int) -> Iterator[tuple[int, list[CacheItem]]]:
    """The calls for the tokens of sequences, of `most` rows each: the first row, and the items."""
    first, taken, items = 0, 0, []
    for handle, count in counts:
        while count > 0:
            part = min(count, most - taken)
            items.append(CacheItem(handle, part, part))
            taken, count = taken + part, count - part
            if taken == most:
                yield first, items
                first, taken, items = first + taken, 0, []
    if items:
        yield first, items


def _explained(error: CallError, layer: int, layers: int) -> CallError:
    """An error of a step, with what to do."""
    restart = "a new RemoteCache and generate() with the tokens so far"
    if isinstance(error, NotFound):
        advice = f". The keys and values are lost; go on with {restart}"
    elif isinstance(error, ResourceExhausted):
        advice = f". Once there is room, call recover() and generate() with the tokens so far; else use {restart}"
    elif isinstance(error, (Unavailable, DeadlineExceeded)):
        advice = f". If the server answers again, call recover() and generate() with the tokens so far; else use {restart}"
    else:
        advice = ""
    return type(error)(f"attention of layer {layer} of {layers}: {error}{advice}", error.status, error.reason)


# ---- Attention ------------------------------------------------------------------------------------


@_eager
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers for models with a RemoteCache: returns y as [B, S, H, D]."""
    layer, updated = getattr(key, "_rapt_update", (None, None))
    if layer is None or getattr(value, "_rapt_update", (None, None))[1] is not updated:
        raise _refusal(
            "keys and values that do not come from a RemoteCache as they are: pass cache=rapt.torch.RemoteCache(...)."
            " Layers that change them after cache.update() and cross attention cannot use one"
        )
    index = getattr(module, "layer_idx", layer.index)
    if layer.updated is not updated or index != layer.index:
        raise _refusal(f"layers that share keys: layer {index} uses those of layer {layer.index}")
    layer.updated = None
    if dropout:
        raise _refusal("dropout; call model.eval()")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, s_aux)):
        raise _refusal("gradients; use torch.no_grad()")
    if _wants_weights(module, more):
        raise _refusal("output_attentions")
    for name, x in more.items():
        if x is not None and name not in _IGNORED:
            raise _refusal(f"{name}, which this model passes")
    query, key, value = _of_one_type(query, key, value)
    rows = getattr(attention_mask, "_rapt_rows", None)
    if rows is None:
        raise _refusal("a mask of the caller's or the model's own; it must be of transformers' mask functions")
    sinks = None if s_aux is None else s_aux.detach().to(torch.promote_types(s_aux.dtype, torch.float32))
    options = {"scale": scaling, "softcap": softcap or 0.0, "head_sink": sinks}
    return layer.cache.attend(layer, rows, query, key, value, options), None
