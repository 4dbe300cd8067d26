"""Keys and values that stay with the server, docs/kv-cache.md."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Annotated, Any, Generic, TypedDict, Unpack

from . import _arrays, _messages
from ._arrays import A, Array, short_repr
from ._attention import Number, boolean, check, choice, integer, real, text, window_sides
from ._messages import Method
from ._options import Option, describe, shows, unknown
from ._reports import ENUMERATORS, CacheInfo, Diagnosis, Float, LayerShape, Storage
from ._server import DTYPES, Sent, Server, dtype_name, received
from .errors import CallError, InternalError, NotFound, error_of_code


_MOST_IDS = 1024  # of a call


class StepOptions(TypedDict, total=False):
    """The options of a step of a cache."""

    scale: Annotated[Number | None, Option(None, "of the scores; None: 1 / sqrt(D)")]
    softcap: Annotated[Number, Option(0, "scores become softcap * tanh(score / softcap); 0: none")]
    window: Annotated[
        tuple[int | None, int | None] | None,
        Option(None, "(left, right): how many keys before and after its own a row sees; None: unbounded"),
    ]
    head_sink: Annotated[Array | None, Option(None, "[Hq], float32 or q's type: the score of one more key without a value")]
    lse: Annotated[bool, Option(False, "return it")]
    output: Annotated[Float | None, Option(None, "the type of y; None: the cache's")]
    share_prefix: Annotated[bool, Option(True, "False: bits do not depend on the other caches of the call")]


describe(StepOptions)


@dataclass(frozen=True)
class Appended:
    length: int = 0  # of the layer at the server, after the call
    applied_before: bool = False  # the tokens were there already


@dataclass(frozen=True, repr=False)
class StepResult(Generic[A]):
    """What a step of caches returns."""

    y: A | None  # [rows, Hq, Dv]; None without queries
    lse: A | None  # [rows, Hq], natural logarithm
    items: list[Appended]  # one for each cache
    plan: str  # "cpu/avx512 q24 k64 s1 32 items"

    __repr__ = short_repr


@dataclass(frozen=True)
class CacheItem:
    """A cache's part of a batch: its rows of q and new tokens of k and v, after those of the items before."""

    cache: Cache
    rows: int = 0
    new_tokens: int = 0
    position: int | None = None  # of the first row; None: the last row sees the last token


class Lease:
    """When a cache was last renewed. The times are of time.monotonic()."""

    def __init__(self, cache: str, seconds: float, counted_from: float) -> None:
        self.cache, self.seconds, self.renewed = cache, seconds, counted_from
        self.not_before = 0.0


class Renewals:
    """One thread for the leases of a client, from the first cache on until the last handle is gone. Renews a lease a third of
    its length after the last call that renewed it. Thread-safe."""

    def __init__(self, renew: Callable[[list[str], float], set[str]]) -> None:
        """`renew` takes ids and a timeout and returns the ids that the server does not have. Raises CallError."""
        self._renew = renew
        self._changed = threading.Condition()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._is_running = False

    def add(self, lease: Lease) -> None:
        with self._changed:
            self._leases.add(lease)
            self._changed.notify()
            if not self._is_running:
                threading.Thread(target=self._run, name="rapt-renewals", daemon=True).start()
                self._is_running = True

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._leases.discard(lease)
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._leases.clear()
            self._changed.notify()

    def _run(self) -> None:
        while self._renew_due():
            pass

    def _renew_due(self) -> bool:
        """Waits until leases are due, and renews them. False if there are none any more. Between two calls nothing here holds
        the leases of handles that are gone."""
        due = self._wait_for_due()
        start = time.monotonic()
        try:
            gone = self._renew([lease.cache for lease in due], min(lease.seconds for lease in due) / 3) if due else set()
        except (CallError, ValueError):  # ValueError: the client was closed
            for lease in due:
                lease.not_before = time.monotonic() + lease.seconds / 6
            return True
        for lease in due:
            lease.renewed = max(lease.renewed, start)
            if lease.cache in gone:
                lease.not_before = math.inf  # the next call tells its caller why
        return len(due) > 0

    def _wait_for_due(self) -> list[Lease]:
        """Empty if there are no leases any more."""
        with self._changed:
            while self._leases:
                now = time.monotonic()
                times = {lease: max(lease.renewed + lease.seconds / 3, lease.not_before) for lease in self._leases}
                if min(times.values()) <= now:
                    # Those that are due soon come along, so that many caches need few calls.
                    due = [lease for lease, at in times.items() if at <= now + lease.seconds / 12]
                    return sorted(due, key=lambda lease: times[lease])[:_MOST_IDS]
                wait = min(min(times.values()) - now, 60)
                del times
                self._changed.wait(wait)
            self._is_running = False
            return []


class Cache:
    """A handle of keys and values that stay with the server; Client.create_cache() makes it. Tokens of a layer are counted
    from 0, keys come after rotary embedding, and attention is causal.

    While the handle lives, its client renews the lease in the background. As a context manager it closes the cache at the
    end; a handle that is dropped without close() lets the cache expire.

    The handle knows how many tokens each layer has and says so with every call, so that the server never applies a call
    twice, and calls are retried as Retry says. After an error that leaves open whether tokens were appended
    (TimeoutError, ConnectionError), make the same call again: the answer is the same whether they were or not.

    Thread-safe, but only one call at a time may append to a layer, or truncate."""

    def __init__(self, caches: Caches, info: CacheInfo, counted_from: float, is_owned: bool) -> None:
        self._caches, self._is_owned = caches, is_owned
        self._lease = Lease(info.id, info.lease_ms / 1e3, counted_from)
        self._lock = threading.Lock()
        self._lengths, self._generation = list(info.lengths), info.generation
        self._is_closed = False
        self.id, self.shapes, self.dtype = info.id, info.shapes, info.dtype
        if is_owned:
            caches.renewals.add(self._lease)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Waits at most a second; a cache that could not be closed expires."""
        if self._is_closed or not self._is_owned:
            return
        try:
            self.close(timeout=1)
        except (CallError, ValueError):  # ValueError: the client was closed
            pass

    def __repr__(self) -> str:
        return f"<rapt.Cache {self.id}, lengths {self.lengths}>"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer that this handle knows of."""
        with self._lock:
            return list(self._lengths)

    @property
    def generation(self) -> int:
        with self._lock:
            return self._generation

    def append(self, layer: int, k: Array, v: Array, *, timeout: float | None = None) -> Appended:
        """Appends tokens to a layer: k [n, Hkv, D], v [n, Hkv, Dv]."""
        return self.append_layers({layer: (k, v)}, timeout=timeout)[0]

    def append_layers(
        self, tokens: Mapping[int, tuple[Array, Array]], *, timeout: float | None = None
    ) -> list[Appended]:
        """Appends to several layers, {layer: (k, v)}: to all, or to none."""
        start = time.monotonic()
        parts, counts = [], []
        for layer, (k, v) in tokens.items():
            counts.append(_rows("k", k))
            tensors = {"k": Sent.of("k", k).message(), "v": Sent.of("v", v).message()}
            parts.append(self._known(layer) | {"layer": layer} | tensors)
        results = self._caches.server.compute(
            _messages.APPEND_TO_CACHES,
            {"parts": parts},
            lambda response: _appended(response["results"], len(parts)),
            timeout,
        )
        for part, count in zip(parts, counts):
            self._applied(part["layer"], part["at"], count, start)
        return results

    @shows(StepOptions)
    def attend(
        self,
        layer: int,
        q: A | None = None,
        k: Array | None = None,
        v: Array | None = None,
        *,
        position: int | None = None,
        timeout: float | None = None,
        **options: Unpack[StepOptions],
    ) -> StepResult[A]:
        """Appends n tokens, k [n, Hkv, D] and v [n, Hkv, Dv], then attends with R rows, q [R, Hq, D]. The last row sees the
        last token, unless `position` is that of the first row. Either q, or k and v, may be absent."""
        item = CacheItem(self, 0 if q is None else _rows("q", q), 0 if k is None else _rows("k", k), position)
        return self._caches.attend(layer, [item], q, k, v, timeout, options)

    @shows(StepOptions)
    def diagnose(
        self,
        layer: int,
        q: Array,
        *,
        position: int | None = None,
        timeout: float | None = None,
        **options: Unpack[StepOptions],
    ) -> Diagnosis:
        """Explains an attend() whose result looks wrong, over the tokens that this handle knows of. Appends nothing, and
        does not renew the lease. ValueError, reason "evicted", if the layer has evicted tokens."""
        request = self._caches.step(layer, [CacheItem(self, _rows("q", q), 0, position)], q, None, None, options)
        return self._caches.server.report(Diagnosis, _messages.DIAGNOSE_CACHES, request, timeout)

    def fork(
        self,
        length: int | None = None,
        *,
        name: str = "",
        reserve_tokens: int = 0,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> Cache:
        """A cache of the first tokens of every layer, which shares their pages. `length` None: that of the shortest layer.
        `name` is as of create_cache(); `lease` in seconds, None: as this cache."""
        request = self._state() | {"reserve_tokens": integer("reserve_tokens", reserve_tokens)}
        if length is not None:
            request["length"] = integer("length", length)
        return self._caches.make(_messages.FORK_CACHE, request, name, lease, timeout)

    def truncate(self, length: int, *, timeout: float | None = None) -> None:
        """Every layer keeps its first `length` tokens. Calls sent before, and late, then fail."""
        request = self._state() | {"length": integer("length", length)}
        self._take(self._caches.server.ask(CacheInfo, _messages.TRUNCATE_CACHE, request, timeout))

    def renew(self, *, timeout: float | None = None) -> CacheInfo:
        """Renews the lease now."""
        self._check_open()
        start = time.monotonic()
        info = self._caches.one(_messages.RENEW_CACHES, self.id, timeout)
        self._lease.renewed = start
        return info

    def info(self, *, timeout: float | None = None) -> CacheInfo:
        """What the server has; the handle takes over its lengths and generation. Does not renew the lease. No other call of
        the cache may run."""
        self._check_open()
        info = self._caches.one(_messages.GET_CACHES, self.id, timeout)
        self._take(info)
        return info

    def close(self, *, timeout: float | None = None) -> None:
        """Ends the cache. The handle is then unusable, also after an error."""
        self._check_open()
        self.release()
        try:
            self._caches.one(_messages.CLOSE_CACHES, self.id, timeout)
        except NotFound as error:
            if error.reason != "closed":  # it may have been this call that closed it, and whose answer was lost
                raise

    def release(self) -> str:
        """Gives the cache up without closing it, and returns its id. Nothing renews it any more."""
        self._is_closed = True
        self._caches.renewals.remove(self._lease)
        return self.id

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the cache was closed or released")

    def _state(self) -> dict[str, Any]:
        """The fields of a fork or a truncation by which the server knows a repeated one."""
        self._check_open()
        return {"cache": self.id, "generation": self.generation}

    def _known(self, layer: int) -> dict[str, Any]:
        """The fields of a call on a layer by which the server knows a repeated one."""
        self._check_open()
        with self._lock:
            if not 0 <= integer("layer", layer) < len(self._lengths):
                raise ValueError(f"layer is {layer}; the cache has {len(self._lengths)} layers")
            return {"cache": self.id, "at": self._lengths[layer], "generation": self._generation}

    def _applied(self, layer: int, at: int, new_tokens: int, start: float) -> None:
        """A call that began at `start` has appended new_tokens after `at`. One that appended none may have run beside an
        append, whose length stays."""
        with self._lock:
            if new_tokens > 0:
                self._lengths[layer] = at + new_tokens
            self._lease.renewed = max(self._lease.renewed, start)

    def _take(self, info: CacheInfo) -> None:
        with self._lock:
            self._lengths, self._generation = list(info.lengths), info.generation


def _rows(name: str, x: Any) -> int:
    shape = _arrays.kind_of(name, x).read(name, x)[1].shape
    check(len(shape) == 3, f"{name} has shape {text(shape)}; it must be [rows, heads, head size]")
    return int(shape[0])


def _appended(results: Sequence[Mapping[str, Any]], count: int) -> list[Appended]:
    if len(results) != count:
        raise ValueError(f"{len(results)} results of {count} items")
    return [Appended(one.get("length", 0), bool(one.get("applied_before"))) for one in results]


def _shape_message(shape: LayerShape) -> dict[str, int]:
    return {name: integer(name, number) for name, number in asdict(shape).items()}


def _drawn_name() -> str:
    """That no other cache has, so that the server knows a call that is repeated."""
    return f"drawn-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class _Missing:
    cache: str = ""


@dataclass(frozen=True)
class _Page:
    """Caches of cache.proto."""

    caches: list[CacheInfo] = field(default_factory=list)
    missing: list[_Missing] = field(default_factory=list)
    next_page_token: str = ""


_Change = tuple[str, Cache, Any]  # a list of UpdateRequest, whose cache it is about, and the entry


@dataclass(frozen=True)
class _Result:
    """UpdateResult of cache.proto."""

    code: int = 0
    message: str = ""
    reason: str = ""
    cache: CacheInfo = CacheInfo()


@dataclass(frozen=True)
class _Results:
    forks: list[_Result] = field(default_factory=list)
    truncates: list[_Result] = field(default_factory=list)
    closes: list[_Result] = field(default_factory=list)


class Caches:
    """The caches of a server. Thread-safe."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.renewals = Renewals(self._renew)

    def _renew(self, ids: list[str], timeout: float) -> set[str]:
        try:
            page = self.server.ask(_Page, _messages.RENEW_CACHES, {"caches": ids}, timeout)
        except NotFound as error:
            if not error.reason:  # of a proxy
                raise
            return set(ids)
        return {missing.cache for missing in page.missing}

    def create(
        self,
        shapes: Sequence[LayerShape] | LayerShape,
        dtype: Float,
        name: str,
        storage: Storage,
        reserve_tokens: int,
        lease: float | None,
        first_position: int,
        timeout: float | None,
    ) -> Cache:
        choice("storage", storage, {"plain": 0, "int8": 1})
        request = {
            "shapes": [_shape_message(shape) for shape in ([shapes] if isinstance(shapes, LayerShape) else shapes)],
            "dtype": dtype_name("dtype", dtype),
            "storage": ENUMERATORS[storage],
            "reserve_tokens": integer("reserve_tokens", reserve_tokens),
            "first_position": integer("first_position", first_position),
        }
        return self.make(_messages.CREATE_CACHE, request, name, lease, timeout)

    def make(self, method: Method, request: dict[str, Any], name: str, lease: float | None, timeout: float | None) -> Cache:
        request = request | {"name": name or _drawn_name()}
        if lease is not None:
            check(0 < real("lease", lease) < math.inf, f"lease is {lease}; it must be more than 0 and finite")
            request["lease_ms"] = max(round(real("lease", lease) * 1e3), 1)
        start = time.monotonic()
        return self._made(self.server.ask(CacheInfo, method, request, timeout), start)

    def _made(self, info: CacheInfo, start: float) -> Cache:
        # A cache that existed keeps its lease, which may end sooner than a new one.
        return Cache(self, info, start + min(info.expires_in_ms - info.lease_ms, 0) / 1e3, is_owned=True)

    def open(self, info: CacheInfo) -> Cache:
        return Cache(self, info, time.monotonic(), is_owned=False)

    def one(self, method: Method, cache: str, timeout: float | None) -> CacheInfo:
        page = self.server.ask(_Page, method, {"caches": [cache]}, timeout)
        if len(page.caches) != 1:
            raise InternalError(f"not an answer of rapt-server: {len(page.caches)} caches in place of 1")
        return page.caches[0]

    def close(self, caches: Sequence[Cache], timeout: float | None = None) -> None:
        """Ends caches of this client in one call. The handles are then unusable, also after an error."""
        ids = [cache.release() for cache in caches]
        for first in range(0, len(ids), _MOST_IDS):
            try:
                self.server.ask(_Page, _messages.CLOSE_CACHES, {"caches": ids[first : first + _MOST_IDS]}, timeout)
            except NotFound as error:
                if not error.reason:  # of a proxy
                    raise

    def update(
        self,
        forks: Sequence[Cache],
        truncates: Sequence[tuple[Cache, int]],
        closes: Sequence[Cache],
        timeout: float | None,
    ) -> list[Cache]:
        """See Client.update_caches()."""
        for cache in (*forks, *(cut for cut, _ in truncates), *closes):
            check(cache._caches is self, f"{cache!r} is of another client; all must be of this one")
        changes: list[_Change] = [("forks", cache, cache._state() | {"name": _drawn_name()}) for cache in forks]
        changes += [("truncates", cut, cut._state() | {"length": integer("length", length)}) for cut, length in truncates]
        changes += [("closes", cache, cache._state()["cache"]) for cache in closes]
        made: list[Cache] = []
        try:
            for first in range(0, len(changes), _MOST_IDS):
                self._change(changes[first : first + _MOST_IDS], made, timeout)
        except CallError:
            with contextlib.suppress(CallError, ValueError):  # ValueError: the client was closed
                self.close(made, timeout)
            raise
        return made

    def _change(self, changes: Sequence[_Change], made: list[Cache], timeout: float | None) -> None:
        """Makes changes by one call, and adds the forks to `made`."""
        lists = {kind: [change for change in changes if change[0] == kind] for kind in ("forks", "truncates", "closes")}
        request = {kind: [entry for *_, entry in some] for kind, some in lists.items()}
        start = time.monotonic()
        answer = self.server.ask(_Results, _messages.UPDATE_CACHES, request, timeout)
        for kind, some in lists.items():
            results: list[_Result] = getattr(answer, kind)
            failed: list[CallError] = []
            for (_, cache, _), result in zip(some, results):
                if kind == "closes":
                    cache.release()  # or there was none
                elif result.code != 0:
                    failed.append(error_of_code(result.code, result.message, result.reason))
                elif kind == "forks":
                    made.append(self._made(replace(result.cache, shapes=cache.shapes), start))
                else:
                    cache._take(result.cache)
            if failed:
                raise failed[0]  # what follows was not done
            if len(results) != len(some):
                raise InternalError(f"not an answer of rapt-server: {len(results)} results of {len(some)} {kind}")

    def list(self, name_prefix: str, timeout: float | None) -> list[CacheInfo]:
        deadline = self.server.deadline(timeout)
        found: list[CacheInfo] = []
        request = {"name_prefix": name_prefix}
        while True:
            page = self.server.ask(_Page, _messages.LIST_CACHES, request, deadline.left())
            found += page.caches
            if not page.next_page_token:
                return found
            request["page_token"] = page.next_page_token

    def attend(
        self,
        layer: int,
        items: Sequence[CacheItem],
        q: A | None,
        k: Array | None,
        v: Array | None,
        timeout: float | None,
        options: StepOptions,
    ) -> StepResult[A]:
        start = time.monotonic()
        request = self.step(layer, items, q, k, v, options)

        def read(response: dict[str, Any]) -> StepResult[A]:
            return StepResult(
                None if q is None else received("y", response.get("y"), q),
                None if q is None or "lse" not in response else received("lse", response["lse"], q),
                _appended(response["items"], len(items)),
                response.get("plan", ""),
            )

        result = self.server.compute(_messages.ATTEND_CACHES, request, read, timeout)
        for item, known in zip(items, request["items"]):
            item.cache._applied(layer, known["at"], item.new_tokens, start)
        return result

    def step(
        self,
        layer: int,
        items: Sequence[CacheItem],
        q: Array | None,
        k: Array | None,
        v: Array | None,
        options: StepOptions,
    ) -> dict[str, Any]:
        """The fields of AttendCachedRequest."""
        for name in options:
            if name not in StepOptions.__annotations__:
                raise unknown(name, StepOptions.__annotations__)
        given = {name: value for name, value in options.items() if value is not None}
        known = []
        for n, item in enumerate(items):
            check(item.cache._caches is self, f"items[{n}] is a cache of another client; all must be of this one")
            rows = {"rows": item.rows, "new_tokens": item.new_tokens, "position": item.position}
            known.append(item.cache._known(layer) | rows)
        tensors = {"q": q, "k": k, "v": v, "head_sink": given.get("head_sink")}
        return {
            "layer": layer,
            "items": known,
            "scale": real("scale", given["scale"]) if "scale" in given else None,
            "softcap": real("softcap", given.get("softcap", 0)),
            "window": window_sides(given.get("window", (None, None))) or None,
            "want_lse": boolean("lse", given.get("lse", False)),
            "output": choice("output", given["output"], DTYPES) if "output" in given else None,
            "share_prefix": 0 if boolean("share_prefix", given.get("share_prefix", True)) else 1,
        } | {name: Sent.of(name, x).message() for name, x in tensors.items() if x is not None}
