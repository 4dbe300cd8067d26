"""The client for asyncio: the same calls in threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from ._caches import Cache
from ._client import Client, ClientOptions
from ._http import Stop, current_stop
from ._reports import CacheInfo

P = ParamSpec("P")
R = TypeVar("R")


class _Threads:
    """Runs calls in threads."""

    def __init__(self, most: int) -> None:
        self._executor = ThreadPoolExecutor(most, thread_name_prefix="rapt-client")
        self._is_closed = False

    async def run(self, function: Callable[..., R], *arguments: Any, **options: Any) -> R:
        stop = Stop()
        context = contextvars.copy_context()
        context.run(current_stop.set, stop)
        call = functools.partial(context.run, function, *arguments, **options)
        if self._is_closed:
            return call()  # of a closed client, which raises at once
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except asyncio.CancelledError:
            stop.request()
            raise

    def close(self) -> None:
        """After the client is closed. Calls that wait for a thread learn from the client that it is."""
        self._is_closed = True
        self._executor.shutdown(wait=False)


class _Asynchronous:
    """What has the methods of another object as coroutines."""

    def __init__(self, object: Any, threads: _Threads) -> None:
        self._object, self._threads = object, threads


def _in_thread(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def call(self: _Asynchronous, /, *arguments: P.args, **options: P.kwargs) -> R:
        return await self._threads.run(method, self._object, *arguments, **options)

    return call


def _makes_cache(
    method: Callable[Concatenate[Any, P], Cache],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncCache]]:
    @functools.wraps(method)
    async def call(self: _Asynchronous, /, *arguments: P.args, **options: P.kwargs) -> AsyncCache:
        return AsyncCache(await self._threads.run(method, self._object, *arguments, **options), self._threads)

    return call


class AsyncCache(_Asynchronous):
    """rapt.Cache with coroutines; `handle` is that cache."""

    def __init__(self, handle: Cache, threads: _Threads) -> None:
        super().__init__(handle, threads)
        self.handle = handle

    append = _in_thread(Cache.append)
    append_layers = _in_thread(Cache.append_layers)
    attend = _in_thread(Cache.attend)
    diagnose = _in_thread(Cache.diagnose)
    fork = _makes_cache(Cache.fork)
    truncate = _in_thread(Cache.truncate)
    renew = _in_thread(Cache.renew)
    info = _in_thread(Cache.info)
    close = _in_thread(Cache.close)

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.run(self.handle.__exit__, kind, error, trace)


class AsyncClient(_Asynchronous):
    """rapt.Client with coroutines, and its arguments. Calls run in at most `threads` threads, and others wait. Cancelling a
    call closes its connection, which stops the server's work; a cancelled step of a cache may have been applied, or
    not."""

    def __init__(self, url: str, *, threads: int = 32, **options: Unpack[ClientOptions]) -> None:
        super().__init__(Client(url, **options), _Threads(threads))

    attention = _in_thread(Client.attention)
    attend = _in_thread(Client.attend)
    attend_backward = _in_thread(Client.attend_backward)
    linear_attention = _in_thread(Client.linear_attention)
    lsh_attention = _in_thread(Client.lsh_attention)
    rotary_embedding = _in_thread(Client.rotary_embedding)
    positional_encoding = _in_thread(Client.positional_encoding)
    infer = _in_thread(Client.infer)
    diagnose = _in_thread(Client.diagnose)
    estimate_memory = _in_thread(Client.estimate_memory)
    estimate_layer_memory = _in_thread(Client.estimate_layer_memory)
    info = _in_thread(Client.info)
    ready = _in_thread(Client.ready)
    create_cache = _makes_cache(Client.create_cache)
    list_caches = _in_thread(Client.list_caches)
    attend_caches = _in_thread(Client.attend_caches)

    def open_cache(self, info: CacheInfo) -> AsyncCache:
        """As Client.open_cache(). Makes no call."""
        return AsyncCache(self._object.open_cache(info), self._threads)

    async def update_caches(
        self,
        *,
        forks: Sequence[AsyncCache] = (),
        truncates: Sequence[tuple[AsyncCache, int]] = (),
        closes: Sequence[AsyncCache] = (),
        timeout: float | None = None,
    ) -> list[AsyncCache]:
        """As Client.update_caches()."""
        made = await self._threads.run(
            self._object.update_caches,
            forks=[cache.handle for cache in forks],
            truncates=[(cache.handle, length) for cache, length in truncates],
            closes=[cache.handle for cache in closes],
            timeout=timeout,
        )
        return [AsyncCache(cache, self._threads) for cache in made]

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As Client.close(). Calls that wait for a thread raise ValueError."""
        self._object.close()
        self._threads.close()
