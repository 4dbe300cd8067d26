"""rapt.Client against servers that answer badly, late or not at all."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import rapt
from rapt import _http, _messages
from rapt._reports import CacheInfo
from rapt._server import Sent
from scripted_server import ScriptedServer, answer, read_message

CLOSE = ScriptedServer.CLOSE
INFO = answer(body={"version": "7.8"})
X = np.zeros((1, 1, 4, 8), np.float32)
QUICK = rapt.Retry(initial_backoff=0, max_backoff=0)


def poll(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition does not become true"
        time.sleep(0.01)


def client_of(server, **options):
    return rapt.Client(server.url, **{"retries": QUICK, "timeout": 30} | options)


def outcome(*script, call=lambda client: client.info(), **options):
    """The result or the error of a call, and the server after it."""
    with ScriptedServer(*script) as server, client_of(server, **options) as client:
        try:
            return call(client), server
        except rapt.errors.CallError as error:
            return error, server


# --- Retries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", (CLOSE, [answer()[:20]], [answer(body=b"x" * 100)[:-1]], answer(503), answer(502)))
def test_a_failed_attempt_is_repeated(failure):
    result, server = outcome(failure, failure, INFO)
    assert result.version == "7.8" and len(server.requests) == 3


def test_attempts_are_counted():
    error, server = outcome(CLOSE, retries=rapt.Retry(attempts=4, initial_backoff=0, max_backoff=0))
    assert type(error) is rapt.errors.Unavailable and isinstance(error, ConnectionError) and server.url in str(error)
    assert len(server.requests) == 4
    error, server = outcome(answer(503, {"error": "draining"}, rapt_reason="draining"), retries=rapt.Retry(attempts=1))
    assert (str(error), error.status, error.reason, len(server.requests)) == ("draining", 503, "draining", 1)


@pytest.mark.parametrize(
    ("status", "kind", "builtin"),
    (
        (400, "InvalidArgument", ValueError),
        (401, "PermissionDenied", PermissionError),
        (403, "PermissionDenied", PermissionError),
        (404, "NotFound", LookupError),
        (408, "DeadlineExceeded", TimeoutError),
        (409, "Conflict", RuntimeError),
        (413, "ResourceExhausted", MemoryError),
        (417, "InvalidArgument", ValueError),
        (429, "ResourceExhausted", MemoryError),
        (500, "InternalError", RuntimeError),
        (501, "Unimplemented", NotImplementedError),
        (504, "DeadlineExceeded", TimeoutError),
        (302, "InternalError", RuntimeError),
    ),
)
def test_other_errors_are_not_repeated(status, kind, builtin):
    error, server = outcome(answer(status, {"error": f"because of {status}"}, rapt_reason="why"))
    assert type(error) is getattr(rapt.errors, kind) and isinstance(error, builtin)
    assert (str(error), error.status, error.reason) == (f"because of {status}", status, "why")
    assert len(server.requests) == 1


def test_429_is_repeated_on_request():
    busy = answer(429, {"error": "full"}, Retry_After=0)
    result, server = outcome(busy, INFO, retries=rapt.Retry(resource_exhausted=True))
    assert result.version == "7.8" and len(server.requests) == 2


@pytest.mark.parametrize("status", (429, 503))
def test_a_retry_after_the_deadline_is_not_waited_for(status):
    retries = rapt.Retry(resource_exhausted=True, initial_backoff=0)
    error, server = outcome(answer(status, {"error": "later"}, Retry_After=1000), retries=retries)
    assert str(error) == "later" and len(server.requests) == 1


def test_the_delay_before_a_retry():
    retry = rapt.Retry(initial_backoff=0.05, max_backoff=1)
    for attempts, most in ((1, 0.05), (2, 0.1), (5, 0.8), (6, 1), (1000, 1)):
        delays = [retry.delay(attempts, 0) for _ in range(200)]
        assert most / 2 <= min(delays) < 0.6 * most and 0.9 * most < max(delays) <= most
    assert retry.delay(1, 3) == 3
    for wrong in ({"attempts": 0}, {"initial_backoff": -1}, {"initial_backoff": 2, "max_backoff": 1}):
        with pytest.raises(ValueError, match="it must be at least 1|the first must be at least 0"):
            rapt.Retry(**wrong)


# --- Connections ------------------------------------------------------------------------------------


def test_a_connection_is_used_again():
    with ScriptedServer(INFO) as server, client_of(server) as client:
        for _ in range(5):
            client.info()
        assert server.accepted == 1 and len(server.requests) == 5


def test_calls_at_the_same_time_have_a_connection_each():
    arrived = threading.Barrier(4, timeout=30)

    def wait(connection):
        arrived.wait()
        connection.sendall(INFO)

    with ScriptedServer(wait) as server, client_of(server) as client:
        threads = [threading.Thread(target=client.info) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.accepted == 4


def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_attempt():
    """Also if it is closed when the next request arrives: then nothing of the answer has come."""
    with ScriptedServer(INFO, CLOSE, INFO) as server, client_of(server, retries=rapt.Retry(attempts=1)) as client:
        assert client.info().version == "7.8"
        assert client.info().version == "7.8"
        assert len(server.requests) == 3 and server.accepted == 2
    with ScriptedServer([INFO]) as server, client_of(server, retries=rapt.Retry(attempts=1)) as client:
        for _ in range(5):
            assert client.info().version == "7.8"
        assert len(server.requests) == 5


def test_bytes_after_an_answer_are_not_the_next_answer():
    with ScriptedServer(INFO + answer(body={"version": "6"})) as server, client_of(server) as client:
        for _ in range(5):
            assert client.info().version == "7.8"
        assert server.accepted == 5


def test_an_answer_that_ends_the_connection():
    with ScriptedServer(answer(body={"version": "7.8"}, Connection="close")) as server, client_of(server) as client:
        for _ in range(3):
            assert client.info().version == "7.8"
        assert server.accepted == 3


def test_an_answer_without_a_length():
    result, _ = outcome([b'HTTP/1.1 200 OK\r\n\r\n{"version": "7.8"}'])
    assert result.version == "7.8"


def test_an_answer_in_chunks():
    result, _ = outcome(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"versio\r\n9\r\nn":"7.8"}\r\n0\r\n\r\n')
    assert result.version == "7.8"
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ScriptedServer(head + b'11;a=b\r\n{"version":"7.8"}\r\n000\r\nTrailer: x\r\n\r\n') as server, client_of(server) as client:
        assert client.info().version == client.info().version == "7.8" and server.accepted == 1
    error, _ = outcome([head + b"7fffffff\r\n" + bytes(2000)], max_message_bytes=1000)
    assert isinstance(error, MemoryError)


def test_an_answer_before_the_end_of_the_request():
    """The server refuses a request whose body it does not read, and resets the connection."""

    def refuse(connection):
        connection.recv(1000)
        connection.sendall(answer(413, {"error": "too large"}))

    with ScriptedServer() as server, client_of(server, retries=rapt.Retry(attempts=1)) as client:
        server.serve = refuse
        large = np.zeros((1, 64, 1024, 64), np.float32)
        with pytest.raises(MemoryError, match="^too large$"):
            client.attend(large, large, large)


def test_no_server():
    with ScriptedServer(INFO) as server:
        url = server.url
    with rapt.Client(url, retries=QUICK) as client:
        with pytest.raises(ConnectionError, match=f"^{url}: .*refused"):
            client.info()
        with pytest.raises(rapt.errors.Unavailable):
            client.ready()


def test_a_closed_client():
    with ScriptedServer(INFO) as server:
        client = client_of(server)
        client.close()
        with pytest.raises(ValueError, match="the client was closed"):
            client.info()


def test_a_child_made_by_fork_cannot_use_the_client_of_its_parent():
    with ScriptedServer(INFO) as server, client_of(server) as client:
        client.info()
        child = os.fork()
        if child == 0:
            try:
                client.info()
            except RuntimeError as error:
                os._exit(7 if "another process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.info().version == "7.8"


# --- Caches -----------------------------------------------------------------------------------------


def cache_of(client):
    """A handle of an empty cache of one layer. Makes no call."""
    return client.open_cache(CacheInfo(id="c", shapes=[rapt.LayerShape(1, 8)], lengths=[0], generation=1, lease_ms=60000))


def test_a_query_beside_an_append_keeps_the_longer_length():
    """The query is sent before the append, and answered after it."""
    x = X[0]
    asked, appended = threading.Event(), threading.Event()

    def encoded(schema, values):
        return answer(body=b"".join(_messages.encode(schema, values)))

    def hold(connection):
        asked.set()
        assert appended.wait(30)
        result = {"y": Sent.of("y", x).message(), "items": [{"length": 1}]}
        connection.sendall(encoded(_messages.ATTEND_CACHED_RESPONSE, result))

    append = encoded(_messages.APPEND_RESPONSE, {"results": [{"length": 1}]})
    with ScriptedServer(hold, append) as server, client_of(server) as client:
        cache = cache_of(client)
        query = threading.Thread(target=cache.attend, args=(0, x))
        query.start()
        assert asked.wait(30)
        cache.append(0, x, x)
        appended.set()
        query.join()
        assert cache.lengths == [1]


def test_leaving_a_cache_of_a_closed_client_keeps_the_error():
    with ScriptedServer(answer(body={"id": "c", "lengths": ["0"], "leaseMs": "60000", "expiresInMs": "60000"})) as server:
        with pytest.raises(KeyError), client_of(server) as client, client.create_cache(rapt.LayerShape(1, 8)):
            client.close()
            raise KeyError


def test_the_timeout_of_a_list_covers_all_pages():
    def page(connection):
        time.sleep(0.3)
        connection.sendall(answer(body={"nextPageToken": "more"}))

    error, _ = outcome(page, page, page, answer(), call=lambda client: client.list_caches(timeout=0.5))
    assert isinstance(error, TimeoutError)


def test_a_proxy_without_the_path_does_not_end_a_lease():
    """A 404 without a reason is not the server's."""
    made = answer(body={"id": "c", "lengths": ["0"], "leaseMs": "300", "expiresInMs": "300"})
    with ScriptedServer(made, answer(404), answer(404), answer()) as server, client_of(server) as client:
        cache = client.create_cache(rapt.LayerShape(1, 8))
        poll(lambda: len(server.requests) >= 4)
        cache.release()


@pytest.mark.parametrize("lease", (0, -1, float("nan"), float("inf")))
def test_a_wrong_lease(lease):
    with ScriptedServer(INFO) as server, client_of(server) as client:
        with pytest.raises(ValueError, match=f"^lease is {lease}; it must be more than 0 and finite$"):
            client.create_cache(rapt.LayerShape(1, 8), lease=lease)


def test_integers_of_numpy():
    with ScriptedServer(answer()) as server, client_of(server) as client:
        client.estimate_memory(np.array([64, 4096]), query_heads=np.int64(2))
        assert len(server.requests) == 1


# --- Answers that are none ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    (
        [b"garbage\r\n\r\n"],
        [b"HTTP/1.1 abc OK\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n"],
        [b"HTTP/1.1 200 OK\r\na: " + b"b" * 100000 + b"\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} "],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\nno header\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n"],
        answer(body=b"<html>"),
        answer(body=[]),
        answer(body={"version": "1", "admission": 5}),
        answer(body={"computeThreads": "many"}),
    ),
)
def test_what_is_no_answer_is_an_internal_error(garbage):
    error, server = outcome(garbage)
    assert type(error) is rapt.errors.InternalError and "not an answer" in str(error)
    assert len(server.requests) == 1


# y FP32 [1, 1, 4, 8] of 127 bytes; a shape that is too large, one that is negative, no type; a length beyond the end.
TENSORS = (
    b"",
    b"\x0a\x8b\x01\x08\x01\x12\x04\x01\x01\x04\x08\x1a\x7f" + bytes(127),
    b"\x0a\x08\x08\x01\x12\x04\x7f\x7f\x7f\x7f",
    b"\x0a\x0d\x08\x01\x12\x09\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x0a\x02\x12\x00",
    b"\x0a\x7f",
    b"\x0a",
    b"\x08\x01",
    b"\x0b",
    b"\xff" * 20,
)


@pytest.mark.parametrize("body", TENSORS)
def test_what_is_no_tensor_is_an_internal_error(body):
    error, _ = outcome(answer(body=body), call=lambda client: client.attend(X, X, X))
    assert type(error) is rapt.errors.InternalError and "not an answer of rapt-server" in str(error)


@pytest.mark.parametrize("size", ("all", "9" * 5000))
def test_a_wrong_length_of_json_is_an_internal_error(size):
    wrong = answer(Inference_Header_Content_Length=size)
    error, _ = outcome(wrong, call=lambda client: client.infer("model", {"X": X}))
    assert type(error) is rapt.errors.InternalError and "not an answer of rapt-server" in str(error)


@pytest.mark.parametrize("names", ([], ["Z"], ["Y", "Z"]))
def test_other_outputs_than_those_asked_for_are_an_internal_error(names):
    outputs = [{"name": name, "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}} for name in names]
    body = json.dumps({"outputs": outputs}).encode()
    wrong = answer(body=body, Inference_Header_Content_Length=str(len(body)))
    error, _ = outcome(wrong, call=lambda client: client.rotary_embedding(X, rope_theta=100))
    assert type(error) is rapt.errors.InternalError and "not an answer of rapt-server" in str(error)


@pytest.mark.parametrize("kind", ("forks", "truncates", "closes"))
def test_an_update_without_a_result_for_each_change_is_an_internal_error(kind):
    def update(client):
        cache = client.open_cache(rapt._caches.CacheInfo(id="here", lengths=[1], generation=1))
        return client.update_caches(**{kind: [(cache, 0) if kind == "truncates" else cache]})

    error, _ = outcome(answer(body={}), call=update)
    assert type(error) is rapt.errors.InternalError and f"0 results of 1 {kind}" in str(error)


def test_random_bytes_are_an_internal_error():
    rng = np.random.default_rng(3)
    with ScriptedServer(INFO) as server, client_of(server) as client:
        for size in range(200):
            server._script[:] = [answer(body=rng.bytes(size))]
            with pytest.raises(rapt.errors.InternalError):
                client.attend(X, X, X)


def test_an_error_without_its_text():
    error, _ = outcome(answer(500, b"<html>\n"))
    assert str(error) == "HTTP 500: <html>"


def test_a_large_answer_is_refused_before_it_is_received():
    error, _ = outcome([b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n"])
    assert isinstance(error, MemoryError) and "the answer has more than max_message_bytes, 268435456" in str(error)
    endless = [b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2000)]
    error, _ = outcome(endless, max_message_bytes=1000)
    assert isinstance(error, MemoryError)


def test_a_large_request_is_not_sent():
    error, server = outcome(INFO, call=lambda client: client.attend(X, X, X), max_message_bytes=300)
    assert isinstance(error, MemoryError) and "the request has" in str(error) and not server.requests


# --- Deadlines --------------------------------------------------------------------------------------


def drip(data):
    """A step that sends a byte at a time until the client has left."""

    def run(connection):
        while True:
            for n in range(len(data)):
                connection.sendall(data[n : n + 1])
                time.sleep(0.02)

    return run


@pytest.mark.parametrize(
    "step",
    (
        lambda connection: read_message(connection),  # silent
        drip(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50),
        drip(answer(body=b"x" * 1000)),
    ),
    ids=("silent", "slow head", "slow body"),
)
def test_the_timeout_ends_a_call(step):
    error, server = outcome(step, timeout=0.4)
    assert isinstance(error, TimeoutError) and str(error) == "the timeout of 0.4 s passed"
    assert len(server.requests) <= 1


class Clock:
    """Stands still, or goes on by `step` when it is read."""

    now, step = 0.0, 0.0

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of deadlines."""
    clock = Clock()
    monkeypatch.setattr(_http, "time", clock)
    return clock


def test_a_timeout_tells_the_last_error(clock):
    def pass_timeout(connection):
        clock.now += 31
        connection.sendall(b"H")

    error, server = outcome(CLOSE, pass_timeout)
    assert isinstance(error, TimeoutError) and len(server.requests) == 2
    assert str(error).startswith(f"the timeout of 30 s passed; the last error was: {server.url}: ")


@pytest.mark.parametrize("reads", range(2, 12))  # of the clock; the second one is before the first attempt
def test_a_timeout_without_a_server_tells_that_there_is_none(clock, reads):
    """However the attempts and the end of the timeout fall together."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = "http://127.0.0.1:%d" % listener.getsockname()[1]
    clock.step = 30
    with rapt.Client(url, retries=rapt.Retry(attempts=10**9, initial_backoff=0, max_backoff=0)) as client:
        with pytest.raises((ConnectionError, TimeoutError), match=f"{url}.*Connection refused"):
            client.info(timeout=reads * clock.step)


def test_a_timeout_tells_why_another_address_failed(clock, monkeypatch):
    """A name with two addresses: nothing listens at the first, the second does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refuses = closed.getsockname()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in (refuses, listener.getsockname())]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(places))
        with rapt.Client("http://server:1") as client, pytest.raises(TimeoutError, match="the last error was:.*Connection refused"):
            client.info(timeout=0.3)


def test_the_timeout_ends_a_request_that_nobody_reads():
    with ScriptedServer() as server, client_of(server) as client:
        left = threading.Event()
        server.serve = lambda connection: left.wait(30)
        large = np.zeros((1, 64, 2048, 64), np.float32)
        with pytest.raises(TimeoutError):
            client.attend(large, large, large, timeout=0.4)
        left.set()


def test_the_server_gets_the_rest_of_the_timeout():
    for timeout, unit, least in ((30, "u", 20e6), (3600, "m", 3.5e6), (1e9, "S", 3e7)):
        _, server = outcome(INFO, timeout=timeout)
        value = re.search(r"\r\nGrpc-Timeout: (\d{1,8})([umS])\r\n", server.requests[0] + "\r\n")
        assert value[2] == unit and int(value[1]) >= least


# --- What is sent -----------------------------------------------------------------------------------


def test_the_head_of_a_request():
    with ScriptedServer(INFO) as server, rapt.Client(server.url + "/behind/proxy/", retries=QUICK) as client:
        client.info()
        head = server.requests[0]
    assert head.startswith("GET /behind/proxy/rapt/v1/server HTTP/1.1\r\n")
    assert f"\r\nHost: {server.address}\r\n" in head and f"\r\nUser-Agent: rapt-python/{rapt.__version__}\r\n" in head


@pytest.mark.parametrize(
    ("url", "options", "message"),
    (
        ("localhost:8000", {}, "url is 'localhost:8000'; it must be http://HOST:PORT"),
        ("ftp://x", {}, "it must be http://HOST:PORT or https://HOST:PORT"),
        ("http://x/?a", {}, "it must be"),
        ("http://x/a\r\nB: c", {}, "url is"),
        ("http://x y/", {}, "must not contain spaces"),
        ("http://x:99999", {}, "Port"),
        ("http://x:0", {}, "the port must be from 1 to 65535"),
        ("https://user:secret@x", {}, "^url has a user; the only credentials are token, cert and key$"),
        ("https://x", {"key": "file"}, "key needs cert"),
        ("http://x", {"token": "secret"}, "token needs https"),
        ("http://x", {"ca": "file"}, "ca and cert need https"),
        ("https://x", {"token": "a\r\nb"}, "token must consist of printable"),
        ("grpc://x", {}, "url is 'grpc://x'; it must be grpc://HOST:PORT or grpcs://HOST:PORT"),
        ("grpc://x:1/path", {}, "it must be grpc://HOST:PORT"),
        ("GRPC://x", {}, "it must be grpc://HOST:PORT"),
        ("grpc://x:1", {"token": "secret"}, "token needs grpcs"),
        ("grpc://x:1", {"cert": "file"}, "ca and cert need grpcs"),
    ),
)
def test_wrong_arguments(url, options, message):
    with pytest.raises(ValueError, match=message):
        rapt.Client(url, **options)


@pytest.mark.parametrize("scheme", ("https", "grpcs"))
@pytest.mark.parametrize("option", ("ca", "cert"))
def test_a_file_that_cannot_be_read(scheme, option):
    with pytest.raises(FileNotFoundError, match=f"{option} cannot be read: No such file.*'absent.pem'"):
        rapt.Client(f"{scheme}://x:1", **{option: "absent.pem"})


@pytest.mark.parametrize("scheme", ("http", "grpc"))
def test_a_timeout_that_is_no_number(scheme):
    with rapt.Client(f"{scheme}://127.0.0.1:1") as client, pytest.raises(ValueError, match="^timeout is nan; it must be"):
        client.info(timeout=float("nan"))


# --- gRPC -------------------------------------------------------------------------------------------


def test_grpc_without_grpcio_names_the_package():
    program = "import sys; sys.modules['grpc'] = None; import rapt; rapt.Client('grpc://127.0.0.1:1')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: a url of grpc:// needs grpcio: pip install 'rapt-attention[grpc]'" in ran.stderr


def test_no_server_of_grpc():
    with ScriptedServer(INFO) as server:
        url = f"grpc://{server.address}"
    with rapt.Client(url, retries=rapt.Retry(attempts=2, initial_backoff=0, max_backoff=0)) as client:
        with pytest.raises(ConnectionError, match="refused"):
            client.info()
        with pytest.raises(rapt.errors.Unavailable):
            client.ready()
    with pytest.raises(ValueError, match="the client was closed"):
        client.info()


def test_a_deadline_without_an_answer_of_grpc():
    def hold(connection):
        while connection.recv(4096):
            pass

    with ScriptedServer(hold) as server, rapt.Client(f"grpc://{server.address}") as client:
        with pytest.raises(TimeoutError, match=r"^the timeout of 0\.2 s passed"):
            client.info(timeout=0.2)


def test_closing_a_client_of_grpc_ends_its_calls():
    arrived = threading.Event()

    def hold(connection):
        arrived.set()
        while connection.recv(4096):
            pass

    with ScriptedServer(hold) as server, rapt.Client(f"grpc://{server.address}") as client:
        threading.Thread(target=lambda: (arrived.wait(30), client.close())).start()
        with pytest.raises(ConnectionError, match="closed"):
            client.info()


def test_a_large_request_is_not_sent_over_grpc():
    with rapt.Client("grpc://127.0.0.1:1", max_message_bytes=300) as client:
        with pytest.raises(MemoryError, match="the request has .* bytes, more than max_message_bytes, 300"):
            client.attend(X, X, X)


# --- TLS --------------------------------------------------------------------------------------------


def test_a_server_without_tls():
    with ScriptedServer(INFO) as server:
        with rapt.Client(server.url.replace("http", "https"), retries=QUICK, timeout=2) as client:
            with pytest.raises((ConnectionError, TimeoutError)):
                client.info()


def test_a_certificate_that_is_not_trusted_is_not_tried_again(tmp_path):
    import ssl

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-subj", "/CN=x",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "certificate")  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with ScriptedServer(INFO) as server:
        serve = server.serve
        server.serve = lambda connection: serve(context.wrap_socket(connection, server_side=True))
        url = server.url.replace("http", "https")
        with rapt.Client(url) as client, pytest.raises(ConnectionError, match="certificate verify failed"):
            client.info()
        assert server.accepted == 1
        with rapt.Client(url, ca=tmp_path / "certificate", token="t0k3n") as client:
            assert client.info().version == client.info().version == "7.8"
        assert server.accepted == 2 and "\r\nAuthorization: Bearer t0k3n\r\n" in server.requests[0]
        with rapt.Client(url, ca=tmp_path / "certificate", server_name="other") as client:
            with pytest.raises(ConnectionError, match="Hostname mismatch"):
                client.info()


# --- Cancellation -----------------------------------------------------------------------------------


def cancelled(client, began):
    """Cancels a call once `began` is set, and returns whether it ended."""

    async def run():
        async with client:
            call = asyncio.create_task(client.info())
            await asyncio.to_thread(began.wait, 30)
            call.cancel()
            try:
                await call
            except asyncio.CancelledError:
                return True

    return asyncio.run(run())


def test_cancelling_closes_the_connection():
    began, left = threading.Event(), threading.Event()

    def wait(connection):
        began.set()
        assert connection.recv(1) == b""
        left.set()

    with ScriptedServer(wait) as server:
        assert cancelled(rapt.AsyncClient(server.url, timeout=30), began)
        assert left.wait(30)
        assert len(server.requests) == 1


def test_cancelling_ends_a_handshake():
    began, left = threading.Event(), threading.Event()

    def wait(connection):
        began.set()
        while connection.recv(65536):
            pass
        left.set()

    with ScriptedServer() as server:
        server.serve = wait
        assert cancelled(rapt.AsyncClient(server.url.replace("http", "https"), timeout=300), began)
        assert left.wait(30)


def test_stopping_a_call_that_connects():
    """The listener accepts nothing and its queue is full, so that the kernel answers no SYN."""
    stop = _http.Stop()
    outcomes = []

    def call():
        _http.current_stop.set(stop)
        try:
            client.info()
        except ConnectionError as error:
            outcomes.append(error)

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        client = stack.enter_context(rapt.Client("http://127.0.0.1:%d" % listener.getsockname()[1], timeout=300))
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        poll(lambda: stop._end is not None)
        stop.request()
        thread.join(30)
    assert len(outcomes) == 1


def test_closing_an_asynchronous_client():
    """The calls that wait for a thread, and later ones, get the error of a closed client."""
    began, closed = threading.Event(), threading.Event()

    def wait(connection):
        began.set()
        assert closed.wait(30)
        connection.sendall(INFO)

    async def run(url):
        client = rapt.AsyncClient(url, threads=1, retries=QUICK, timeout=30)
        calls = [asyncio.create_task(client.info()) for _ in range(3)]
        await asyncio.to_thread(began.wait, 30)
        client.close()
        closed.set()
        first, *waited = await asyncio.gather(*calls, return_exceptions=True)
        assert first.version == "7.8"
        later = await asyncio.gather(client.info(), client.ready(), return_exceptions=True)
        assert {(type(error), str(error)) for error in waited + later} == {(ValueError, "the client was closed")}
        with pytest.raises(KeyError):
            async with cache_of(client):
                raise KeyError

    with ScriptedServer(wait) as server:
        asyncio.run(run(server.url))


def test_cancelling_ends_the_wait_before_a_retry():
    began = threading.Event()

    def fail(connection):
        connection.sendall(answer(503, Retry_After=25))
        began.set()

    with ScriptedServer(fail) as server:
        assert cancelled(rapt.AsyncClient(server.url, timeout=30), began)
        poll(lambda: not any(thread.name.startswith("rapt-client") for thread in threading.enumerate()))
        assert len(server.requests) == 1


def test_a_stopped_call_has_no_more_attempts():
    stop = _http.Stop()
    stop.request()
    token = _http.current_stop.set(stop)
    try:
        error, server = outcome(CLOSE)
    finally:
        _http.current_stop.reset(token)
    assert isinstance(error, ConnectionError) and len(server.requests) <= 1
