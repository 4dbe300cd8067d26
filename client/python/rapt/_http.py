"""Calls over HTTP/1.1: connections, deadlines, retries and cancellation."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ._version import VERSION
from .errors import CallError, DeadlineExceeded, InternalError, ResourceExhausted, Unavailable, error_of

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview
PayloadAt = Callable[[Mapping[str, str], memoryview], int]  # see Calls.call()

_MOST_IDLE = 64  # connections that are kept
_MOST_BUFFERS = 64  # of a sendmsg()
_MOST_HEAD_BYTES = 65536
PEEKED_BYTES = 512  # of a body, to find where its payload begins
_ALIGNMENT = 64  # of a payload
_LONGEST = 365 * 24 * 3600.0  # s


@dataclass(frozen=True)
class Retry:
    """When a failed attempt is repeated. That is always safe: calls of attention have no state, and those of caches say
    what they expect the cache to be. An attempt is repeated if it found no server, or lost it, or got status 502 or 503;
    429 only on request. The delay before the n-th retry is random between half and all of initial_backoff * 2^(n-1), at most
    max_backoff, and at least the server's Retry-After. If it would end after the deadline, the error is raised at once."""

    attempts: int = 7  # with the first; 1: no retries
    initial_backoff: float = 0.05  # s
    max_backoff: float = 1.0
    resource_exhausted: bool = False  # a server over its memory budget may have memory a moment later

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; it must be at least 1")
        if not 0 <= self.initial_backoff <= self.max_backoff:
            raise ValueError(
                f"initial_backoff is {self.initial_backoff} and max_backoff {self.max_backoff}; the first must be at least"
                " 0, the second at least the first"
            )

    def repeats(self, error: CallError) -> bool:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            return False
        return isinstance(error, Unavailable) or (error.status == 429 and self.resource_exhausted)

    def delay(self, attempts: int, least: float) -> float:
        """The seconds to wait after that many attempts, `least` at least."""
        backoff = min(self.initial_backoff * 2.0 ** min(attempts - 1, 60), self.max_backoff)
        return max(backoff * random.uniform(0.5, 1), least)


class Stop:
    """Ends a call from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._end: Callable[[], Any] | None = None

    def request(self) -> None:
        with self._lock:
            self._event.set()
            if self._end is not None:
                self._end()

    def is_requested(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)

    def watch(self, end: Callable[[], Any] | None) -> None:
        """`end` ends what the call now waits for."""
        with self._lock:
            self._end = end
            if end is not None and self._event.is_set():
                end()

    def watch_socket(self, used: socket.socket) -> None:
        self.watch(lambda: _shut_down(used))


def _shut_down(used: socket.socket) -> None:
    try:
        socket.socket.shutdown(used, socket.SHUT_RDWR)  # of TLS, without its close_notify
    except OSError:
        pass  # it is not connected any more


# The Stop of calls that this thread makes.
current_stop: ContextVar[Stop | None] = ContextVar("current_stop", default=None)


class Deadline:
    def __init__(self, timeout: float) -> None:
        if math.isnan(timeout):
            raise ValueError("timeout is nan; it must be a number of seconds")
        self._timeout = timeout
        self._last_error: Exception | None = None  # of an attempt that failed before
        self._end = time.monotonic() + min(timeout, _LONGEST)

    def left(self) -> float:
        """In seconds, more than 0. Raises DeadlineExceeded."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.exceeded()
        return left

    def allows(self, delay: float) -> bool:
        return time.monotonic() + delay < self._end

    def survives(self, error: Exception) -> None:
        """Another attempt follows, here or of another address. If it takes too long, this error says why there was none."""
        self._last_error = error

    def exceeded(self) -> DeadlineExceeded:
        last = f"; the last error was: {self._last_error}" if self._last_error else ""
        return DeadlineExceeded(f"the timeout of {self._timeout:g} s passed{last}")

    def header(self) -> str:
        """The value of Grpc-Timeout: at most 8 digits and a unit."""
        left = self.left()
        for unit, scale in (("u", 1e6), ("m", 1e3)):
            if left * scale < 1e8:
                return f"{max(int(left * scale), 1)}{unit}"
        return f"{int(left)}S"


def retried(
    attempt: Callable[[], T], retries: Retry, deadline: Deadline, stop: Stop, is_closed: Callable[[], bool] = lambda: False
) -> T:
    """What an attempt returns, of as many as `retries` allows until the client is closed. Raises CallError."""
    attempts = 1
    while True:
        try:
            return attempt()
        except CallError as error:
            is_final = not retries.repeats(error) or attempts >= retries.attempts or is_closed()
            delay = retries.delay(attempts, error.retry_after)
            if is_final or not deadline.allows(delay):
                raise
            stop.wait(delay)
            if stop.is_requested():
                raise
            deadline.survives(error)
            attempts += 1


def checked_size(body: Sequence[Buffer], most: int) -> int:
    """The bytes of a request. Raises ResourceExhausted."""
    size = sum(memoryview(buffer).nbytes for buffer in body)
    if size > most:
        raise ResourceExhausted(f"the request has {size} bytes, more than max_message_bytes, {most}")
    return size


def room(size: int, payload_at: int) -> memoryview:
    """New memory for a message whose byte `payload_at` is aligned."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -(memory.ctypes.data + payload_at) % _ALIGNMENT
    return memory[first : first + size].data


def check_url(url: str, scheme: str, token: str | None, ca: Any, cert: Any, key: Any) -> urllib.parse.SplitResult:
    """Of a server. `scheme` is that without TLS. Raises ValueError, or OSError for a file."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in (scheme, scheme + "s") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"url is {url!r}; it must be {scheme}://HOST:PORT or {scheme}s://HOST:PORT")
    if any(ord(character) <= 32 or ord(character) == 127 for character in url) or not url.isascii():
        raise ValueError(f"url is {url!r}; it must not contain spaces, controls or other characters than ASCII")
    if parts.username is not None:
        raise ValueError("url has a user; the only credentials are token, cert and key")
    if parts.port == 0:
        raise ValueError(f"url is {url!r}; the port must be from 1 to 65535")
    if key is not None and cert is None:
        raise ValueError("key needs cert")
    if parts.scheme == scheme:
        if ca is not None or cert is not None:
            raise ValueError(f"url is {url!r}; ca and cert need {scheme}s")
        if token is not None:
            raise ValueError(f"token needs {scheme}s: it is never sent in plain text")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ValueError("token must consist of printable ASCII characters")
    for name, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path is not None:
            _check_file(name, path)
    return parts


def _check_file(name: str, path: Any) -> None:
    try:
        open(path, "rb").close()
    except OSError as error:
        raise OSError(error.errno, f"{name} cannot be read: {error.strerror}", path) from None


@dataclass(frozen=True)
class Endpoint:
    """Where a server is, and how it is reached."""

    host: str
    port: int
    prefix: str  # of paths
    tls: ssl.SSLContext | None
    server_name: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    @classmethod
    def of(cls, url: str, token: str | None, ca: Any, cert: Any, key: Any, server_name: str) -> Endpoint:
        parts = check_url(url, "http", token, ca, cert, key)
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context(cafile=ca)
            if cert is not None:
                tls.load_cert_chain(cert, key)
        port = parts.port or (443 if tls else 80)
        host = str(parts.hostname)
        return cls(host, port, parts.path.rstrip("/"), tls, server_name or host)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: memoryview


class _Malformed(Exception):
    """The bytes that were received are not a response of HTTP/1.1."""


class _Stream:
    """What a socket receives, until the deadline. ConnectionError if it ends too early."""

    def __init__(self, used: socket.socket, deadline: Deadline) -> None:
        self._socket, self._deadline = used, deadline
        self._buffer = b""  # received and not yet read

    def has_more(self) -> bool:
        return len(self._buffer) > 0

    def _receive(self, into: memoryview) -> int:
        # Anew each time: the timeout of a socket is that of one recv().
        self._socket.settimeout(self._deadline.left())
        count = self._socket.recv_into(into)
        if count == 0:
            raise ConnectionResetError("the server closed the connection in the middle of a call")
        return count

    def peek(self, count: int) -> memoryview:
        """Returns the next bytes, at least `count`, and leaves them to be read."""
        place = memoryview(bytearray(PEEKED_BYTES))
        while len(self._buffer) < count:
            self._buffer += place[: self._receive(place)]
        return memoryview(self._buffer)

    def until(self, mark: bytes, most: int) -> bytes:
        """Returns the bytes before the mark and removes both. Raises _Malformed if there are more than `most`."""
        place = memoryview(bytearray(16384))
        while mark not in self._buffer:
            if len(self._buffer) > most:
                raise _Malformed(f"more than {most} bytes without {mark!r}")
            self._buffer += place[: self._receive(place)]
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def fill(self, view: memoryview) -> None:
        ready = min(len(view), len(self._buffer))
        view[:ready] = self._buffer[:ready]
        self._buffer = self._buffer[ready:]
        while ready < len(view):
            ready += self._receive(view[ready:])

    def chunks(self, most: int) -> memoryview:
        """Reads a chunked body. Stops reading beyond `most` bytes."""
        body = bytearray()
        while len(body) <= most:
            size = self.until(b"\r\n", _MOST_HEAD_BYTES).split(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", size):
                raise _Malformed(f"a chunk of {size!r:.50} bytes")
            if int(size, 16) == 0:
                while self.until(b"\r\n", _MOST_HEAD_BYTES):
                    pass  # trailers
                break
            chunk = memoryview(bytearray(min(int(size, 16), most + 1)))
            self.fill(chunk)
            body += chunk
            if len(body) <= most and self.until(b"\r\n", 2):
                raise _Malformed("a chunk that does not end")
        return memoryview(body)

    def to_end(self, most: int) -> memoryview:
        """Reads a body that ends with the connection. Stops reading beyond `most` bytes."""
        body = bytearray(self._buffer)
        self._buffer = b""
        place = memoryview(bytearray(65536))
        while len(body) <= most:
            self._socket.settimeout(self._deadline.left())
            count = self._socket.recv_into(place)
            if count == 0:
                break
            body += place[:count]
        return memoryview(body)


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """The status, and the headers: of several of a name, the first."""
    first, *lines = head.decode("latin-1").split("\r\n")
    status = re.fullmatch(r"HTTP/1\.[01] (\d{3})(?: .*)?", first, re.ASCII)
    if status is None:
        raise _Malformed(f"{first!r:.100} in place of a status")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name.strip() != name:
            raise _Malformed(f"{line!r:.100} in place of a header")
        known = headers.setdefault(name.lower(), value.strip(" \t"))
        if name.lower() == "content-length" and known != value.strip(" \t"):
            raise _Malformed("two lengths")
    return int(status[1]), headers


def _is_ready(used: socket.socket, seconds: float, writes: bool = False) -> bool:
    """Waits until the socket can be read, or written."""
    if hasattr(select, "poll"):  # select() does not take descriptors from 1024 on
        poll = select.poll()
        poll.register(used, select.POLLOUT if writes else select.POLLIN)
        return bool(poll.poll(min(seconds * 1e3, 1e9)))
    sides = ([], [used], [used]) if writes else ([used], [], [])  # Windows: one that can't connect is exceptional
    return any(map(bool, select.select(*sides, seconds)))


def _opened(family: int, kind: int, protocol: int, address: Any, seconds: float, stop: Stop) -> socket.socket:
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setblocking(False)
        code = opened.connect_ex(address)
        stop.watch_socket(opened)  # not before: what does not connect yet cannot be shut down
        if code in (errno.EINPROGRESS, getattr(errno, "WSAEWOULDBLOCK", errno.EINPROGRESS)):
            if not _is_ready(opened, seconds, writes=True):
                raise TimeoutError
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            raise OSError(code, os.strerror(code))
    except BaseException:
        opened.close()
        raise
    return opened


def _connected(endpoint: Endpoint, deadline: Deadline, stop: Stop) -> socket.socket:
    """To the first address of the host that answers. Each has an equal share of the time that is left."""
    addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    while True:
        seconds = deadline.left() / len(addresses)
        family, kind, protocol, _, address = addresses.pop(0)
        try:
            return _opened(family, kind, protocol, address, seconds, stop)
        except OSError as error:
            if not addresses or stop.is_requested():
                raise
            if not isinstance(error, TimeoutError):
                deadline.survives(error)


def check_answer_size(size: int, most: int, status: int) -> None:
    if size > most:
        raise ResourceExhausted(f"the answer has more than max_message_bytes, {most}", status)


class _Connection:
    """An open connection, of one call at a time."""

    def __init__(self, endpoint: Endpoint, deadline: Deadline, stop: Stop) -> None:
        opened = _connected(endpoint, deadline, stop)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.tls is not None:
                name = endpoint.server_name
                opened = endpoint.tls.wrap_socket(opened, server_hostname=name, do_handshake_on_connect=False)
                stop.watch_socket(opened)
                opened.settimeout(deadline.left())
                opened.do_handshake()
        except BaseException:
            opened.close()
            raise
        self.socket = opened
        self.is_used = False  # by a call before

    def close(self) -> None:
        self.socket.close()

    def is_readable(self) -> bool:
        """Whether an idle connection is unusable: the server closed it, or sent bytes without a request."""
        return _is_ready(self.socket, 0)

    def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer) > 0]
        first = 0
        while first < len(views):
            self.socket.settimeout(deadline.left())
            if isinstance(self.socket, ssl.SSLSocket) or not hasattr(self.socket, "sendmsg"):  # Windows has none
                sent = self.socket.send(views[first])
            else:
                sent = self.socket.sendmsg(views[first : first + _MOST_BUFFERS])
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent > 0:
                views[first] = views[first][sent:]

    def receive(self, deadline: Deadline, most: int, payload_at: PayloadAt) -> tuple[Answer, bool]:
        """Returns the answer, and whether the connection can carry another call. ResourceExhausted if the answer has more
        than `most` bytes."""
        stream = _Stream(self.socket, deadline)
        status = 100
        while status < 200:
            status, headers = _parsed(stream.until(b"\r\n\r\n", _MOST_HEAD_BYTES))
        length = headers.get("content-length")
        ends = "close" in headers.get("connection", "").lower()
        if "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked" or length is not None:
                raise _Malformed("a body whose length is unclear")
            body = stream.chunks(most)
        elif length is None:
            ends, body = True, stream.to_end(most)
        elif not re.fullmatch(r"[0-9]{1,18}", length):
            raise _Malformed(f"a body of {length!r:.50} bytes")
        else:
            size = int(length)
            check_answer_size(size, most, status)
            body = room(size, payload_at(headers, stream.peek(min(size, PEEKED_BYTES))))
            stream.fill(body)
        check_answer_size(len(body), most, status)
        return Answer(status, headers, body), not (ends or stream.has_more())


class Calls:
    """Calls of one server. Thread-safe; calls at the same time have a connection each."""

    def __init__(
        self, endpoint: Endpoint, token: str | None, retries: Retry, timeout: float, max_message_bytes: int
    ) -> None:
        self._endpoint, self._retries, self._timeout = endpoint, retries, timeout
        self._max_message_bytes = max_message_bytes
        self._fields = f"Host: {endpoint.authority}\r\nUser-Agent: rapt-python/{VERSION}\r\n"
        if token is not None:
            self._fields += f"Authorization: Bearer {token}\r\n"
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._is_closed = False
        self.pid = os.getpid()

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for connection in idle:
            connection.close()

    def deadline(self, timeout: float | None) -> Deadline:
        """Of a call with this timeout; None: the client's."""
        return Deadline(self._timeout if timeout is None else timeout)

    def call(
        self,
        method: str,
        path: str,
        body: Sequence[Buffer] = (),
        headers: str = "",
        timeout: float | None = None,
        retries: Retry | None = None,
        payload_at: PayloadAt = lambda headers, start: 0,
    ) -> Answer:
        """Returns the answer of status 200. `headers`: lines. `payload_at` tells from the headers and the first bytes of the
        answer which byte is to be aligned. Raises CallError."""
        if os.getpid() != self.pid:
            raise RuntimeError("the client was made by another process; make one after fork()")
        deadline = self.deadline(timeout)
        stop = current_stop.get() or Stop()
        size = checked_size(body, self._max_message_bytes)
        head = f"{method} {self._endpoint.prefix}{path} HTTP/1.1\r\n{self._fields}{headers}Content-Length: {size}\r\n"

        def attempt() -> Answer:
            answer = self._attempt(head, body, deadline, stop, payload_at)
            if answer.status != 200:
                raise _error_of(answer)
            return answer

        return retried(attempt, retries or self._retries, deadline, stop)

    def _attempt(
        self, head: str, body: Sequence[Buffer], deadline: Deadline, stop: Stop, payload_at: PayloadAt
    ) -> Answer:
        connection: _Connection | None = None
        try:
            connection = self._take() or _Connection(self._endpoint, deadline, stop)
            stop.watch_socket(connection.socket)
            try:
                answer, is_reusable = self._exchange(connection, head, body, deadline, payload_at)
            except (ConnectionError, ssl.SSLError):
                # The server may have closed it while it was idle. On a new one the call starts anew.
                if not connection.is_used or stop.is_requested():
                    raise
                connection.close()
                connection = _Connection(self._endpoint, deadline, stop)
                stop.watch_socket(connection.socket)
                answer, is_reusable = self._exchange(connection, head, body, deadline, payload_at)
            stop.watch(None)  # before another call has the connection
            if is_reusable and self._give(connection):
                connection = None
            return answer
        except CallError:
            raise
        except TimeoutError as error:
            raise deadline.exceeded() from error
        except _Malformed as error:
            raise InternalError(f"{self._endpoint.url}: not an answer in HTTP: {error}") from error
        except OSError as error:
            raise Unavailable(f"{self._endpoint.url}: {error}") from error
        finally:
            stop.watch(None)
            if connection is not None:
                connection.close()

    def _exchange(
        self, connection: _Connection, head: str, body: Sequence[Buffer], deadline: Deadline, payload_at: PayloadAt
    ) -> tuple[Answer, bool]:
        try:
            connection.send([f"{head}Grpc-Timeout: {deadline.header()}\r\n\r\n".encode(), *body], deadline)
        except (BrokenPipeError, ConnectionResetError):
            # An answer that came before the whole request was sent says why.
            try:
                return connection.receive(deadline, self._max_message_bytes, payload_at)[0], False
            except (OSError, _Malformed):
                pass
            raise
        return connection.receive(deadline, self._max_message_bytes, payload_at)

    def _take(self) -> _Connection | None:
        while True:
            with self._lock:
                if self._is_closed:
                    raise ValueError("the client was closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_readable():
                return connection
            connection.close()

    def _give(self, connection: _Connection) -> bool:
        connection.is_used = True
        with self._lock:
            if self._is_closed or len(self._idle) >= _MOST_IDLE:
                return False
            self._idle.append(connection)
            return True


def _error_of(answer: Answer) -> CallError:
    try:
        message = str(json.loads(bytes(answer.body))["error"])
    except (ValueError, TypeError, LookupError):
        text = bytes(answer.body[:200]).decode(errors="replace").strip()
        message = f"HTTP {answer.status}"
        message += f": {text}" if text else ""
    error = error_of(answer.status, message, answer.headers.get("rapt-reason", ""))
    error.retry_after = _retry_after(answer)
    return error


def _retry_after(answer: Answer) -> float:
    """In seconds; a date is ignored."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() else 0.0
