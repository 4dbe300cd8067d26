"""The `rapt-load` binary as users run it, against a real server and one with wrong results."""

import concurrent.futures
import csv
import http.server
import json
import os
import pty
import re
import shlex
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest
from rapt_server import RaptServer
from tritonclient.grpc import service_pb2

RAPT_LOAD = os.environ["RAPT_LOAD"]
OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
TINY = ("--shape", "1x2x16x8")
BRIEF = ("--duration", "0.3", "--warmup", "0.1")


@pytest.fixture(scope="session")
def server():
    with RaptServer("--allow_shared_memory", "--kv_cache_bytes=268435456") as running:
        yield running


def run(address, cwd, *arguments, code=OK):
    ran = subprocess.run(
        [RAPT_LOAD, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "RAPT_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == code, ran
    return ran


@pytest.fixture
def load(tmp_path, server):
    """load(*flags): runs it and returns its JSON report."""

    def run_json(*flags, code=OK, address=None):
        address = address or (server.http_address if "http" in flags else server.grpc_address)
        return json.loads(run(address, tmp_path, *flags, "--json", "-", code=code).stdout)

    return run_json


def calls_above(result, kind, milliseconds):
    return sum(count for value, count in result["histograms_ns"][kind] if value > milliseconds * 1e6)


def metrics_of(server):
    return urllib.request.urlopen(f"http://{server.metrics_address}/metrics").read().decode()


def calls_of(server):
    return sum(float(n) for n in re.findall(r"^rapt_requests_total\{[^}]*\} (\S+)$", metrics_of(server), re.MULTILINE))


def caches_of(server):
    return int(re.search(r"^rapt_kv_caches (\d+)$", metrics_of(server), re.MULTILINE)[1])


def wait_for_a_call(server, before=0, calls=1):
    deadline = time.monotonic() + 60
    while calls_of(server) < before + calls:
        assert time.monotonic() < deadline, "no call arrived"
        time.sleep(0.01)


# --- Calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interface",
    [
        (),
        ("--stream",),
        ("--shared-memory",),
        ("--protocol", "oip"),
        ("--protocol", "oip", "--stream"),
        ("--protocol", "oip", "--shared-memory"),
        ("--protocol", "http"),
    ],
    ids=lambda flags: " ".join(flags) or "rapt",
)
def test_responses_are_correct_over_every_interface(load, interface):
    connections = () if "http" in interface else ("--connections", 2)
    result = load(*TINY, *BRIEF, "-c", 4, *connections, *interface)
    assert result["summary"]["ok"] > 0 and result["summary"]["failed"] == 0
    assert result["checked"] == {"responses": 4, "wrong": 0, "examples": []}
    assert sum(count for _, count in result["histograms_ns"]["latency"]) == result["summary"]["ok"]
    # The report includes server times, which ModelStreamInfer does not send in its trailing metadata.
    assert ("server" in result["milliseconds"]) == (interface != ("--protocol", "oip", "--stream"))


@pytest.mark.parametrize(
    "shape",
    [
        "1x2x600x8 causal",
        "2x4/2x3:700x8 bf16",
        "2x2x300:600x8 ragged",
        "2x2x600x8 mask=float",
        "2x2x3:600x8 mask=padding",
    ],
)
def test_streams_of_many_chunks_are_correct(load, shape):
    result = load(*BRIEF, "--stream", "--shape", shape, "-c", 2)
    assert result["summary"]["failed"] == 0
    assert result["checked"]["responses"] == 2 and result["checked"]["wrong"] == 0


@pytest.mark.parametrize("protocol", ["rapt", "oip", "http"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
def test_responses_are_correct_for_all_attributes(load, tmp_path, protocol, dtype):
    shapes = [
        f"2x4/2x{lengths}x8 {words}"
        for lengths in ("8", "3:16")
        for words in ("", "causal", "ragged", "mask=bool", "mask=float", "mask=padding")
    ]
    # A trace sends every shape in turn, and the last response of each stream is checked.
    (tmp_path / "trace").write_text("\n".join(f"0 {shape}" for shape in shapes))
    result = load("--trace", "trace", "--dtype", dtype, "--protocol", protocol, "-c", len(shapes))
    assert result["summary"]["ok"] == len(shapes) and result["summary"]["failed"] == 0
    assert result["checked"]["responses"] > 0 and result["checked"]["wrong"] == 0
    assert all(shape["latency_ms"]["count"] == 1 for shape in result["shapes"])


def test_a_wrong_response_is_detected(load):
    def infer(request, _):
        y = service_pb2.ModelInferResponse.InferOutputTensor(
            name="Y", datatype="FP32", shape=request.inputs[0].shape
        )
        return service_pb2.ModelInferResponse(
            outputs=[y], raw_output_contents=[bytes(len(request.raw_input_contents[0]))]
        )

    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            infer,
            service_pb2.ModelInferRequest.FromString,
            service_pb2.ModelInferResponse.SerializeToString,
        )
    }
    wrong_server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    wrong_server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
    )
    port = wrong_server.add_insecure_port("127.0.0.1:0")
    wrong_server.start()
    result = load(*TINY, *BRIEF, "--protocol", "oip", code=FAILED, address=f"127.0.0.1:{port}")
    wrong_server.stop(None)
    assert result["checked"]["wrong"] == 1
    assert "1x2x16x8 FP32 is wrong: Y[0, 0, 0, 0] is 0" in result["checked"]["examples"][0]


class WrongModel(http.server.BaseHTTPRequestHandler):
    """A server of the Open Inference Protocol whose Y is zero, and which takes no binary data from model `text`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._respond(b'{"name": "wrong"}')

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        json_bytes = int(self.headers["Inference-Header-Content-Length"])
        inputs = json.loads(body[:json_bytes])["inputs"]
        assert sum(i["parameters"]["binary_data_size"] for i in inputs) == len(body) - json_bytes
        head = b'{"outputs": []}'
        y = bytes(inputs[0]["parameters"]["binary_data_size"])
        if "text" in self.path:
            return self._respond(head)
        self._respond(head + y, {"Inference-Header-Content-Length": len(head)})

    def _respond(self, body, headers={}):
        self.send_response(200)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("model, example", [("zero", "1x2x16x8 FP32 is wrong"), ("text", "it has no binary data")])
def test_a_wrong_response_over_http_is_detected(load, model, example):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WrongModel) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        flags = ("--protocol", "http", "--model", model, "-c", 2)
        address = f"127.0.0.1:{server.server_port}"
        result = load(*TINY, *BRIEF, *flags, address=address, code=FAILED)
        server.shutdown()
        thread.join()
    assert result["server"]["name"] == "wrong" and result["summary"]["failed"] == 0
    assert result["checked"]["responses"] == result["checked"]["wrong"] == 2
    assert example in result["checked"]["examples"][0]


def test_calls_to_a_server_that_has_gone_fail(tmp_path):
    with RaptServer() as server:
        flags = ("--protocol", "http", "--address", server.http_address, *TINY, "-c", "4", "-d", "600", "--warmup", "0")
        running = subprocess.Popen([RAPT_LOAD, *flags, "--json", "-"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        wait_for_a_call(server, calls=32)  # the first ones are not measured
    host, port = server.http_address.split(":")
    with socket.create_server((host, int(port))) as closing:
        for _ in range(8):  # calls of the 4 streams, of which the first have failed
            closing.accept()[0].close()
    running.send_signal(signal.SIGINT)
    result = json.loads(running.communicate(timeout=120)[0])
    assert result["summary"]["ok"] > 0
    assert {failure["code"] for failure in result["failures"]} == {"UNAVAILABLE"}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """(certificate, key): the paths of a self-signed certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    new = shlex.split("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x")
    subprocess.run(
        [*new, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


class ResettingModel(WrongModel):
    """Resets the connection within the body of a call."""

    def do_POST(self):
        self.connection.shutdown(socket.SHUT_WR)  # a reset after it is EPIPE, one without it ECONNRESET
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def test_a_reset_within_a_body_over_tls_is_a_failed_call(load, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ResettingModel) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        flags = ("--protocol", "http", "--tls-ca", certificate[0], "--shape", "1x8x4096x64")
        result = load(*flags, *BRIEF, address=f"127.0.0.1:{server.server_port}", code=FAILED)
        server.shutdown()
        thread.join()
    assert {failure["code"] for failure in result["failures"]} == {"UNAVAILABLE"}


# --- Schedules ------------------------------------------------------------------------------------


def test_an_open_loop_offers_its_rate(load):
    result = load(*TINY, "--rate", 200, "--arrivals", "constant", "-d", 1, "--warmup", 0.2)
    assert result["summary"]["offered_rate"] == pytest.approx(200, rel=0.05)
    assert result["summary"]["dropped"] == 0
    assert len(result["series"]) >= 5


def test_a_stalled_server_shows_in_latency_but_not_in_service_time(tmp_path):
    """Coordinated omission: with few streams, most calls due during a stall cannot be sent."""
    stall_ms = 1000
    with RaptServer() as server:
        command = [RAPT_LOAD, "--address", server.grpc_address, *TINY, "-c", "4", "--json", "-"]
        command += ["--rate", "100", "--arrivals", "constant", "-d", "3", "--warmup", "0"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as running:
            wait_for_a_call(server)
            server.signal(signal.SIGSTOP)
            time.sleep(stall_ms / 1000)  # the stall itself
            server.signal(signal.SIGCONT)
            result = json.loads(running.communicate(timeout=120)[0])
    assert result["summary"]["failed"] == result["summary"]["dropped"] == 0
    # Of the 100 calls due in that second, those of its first half waited half a second or more,
    # four of them in the server.
    slow = stall_ms / 2
    assert calls_above(result, "latency", slow) >= 40
    assert calls_above(result, "service", slow) <= 8
    assert result["milliseconds"]["latency"]["max"] >= stall_ms * 0.9
    assert any("waited because all 4 streams were busy" in w for w in result["warnings"])


def test_calls_that_could_not_be_sent_in_time_are_dropped(load):
    # One stream, whose calls take far longer than the gaps between them.
    flags = ("--warmup", 0, "--deadline", 1000)
    result = load("--shape", "1x8x512x64", "-c", 1, "--rate", 3000, "-d", 2, *flags)
    summary = result["summary"]
    assert summary["dropped"] > 0
    assert summary["rate"] < summary["offered_rate"]
    assert any("the server is overloaded" in warning for warning in result["warnings"])


def test_a_trace_is_replayed_to_its_end(load, tmp_path):
    (tmp_path / "trace").write_text("".join(f"{i / 100} 1x1x{1 + i % 3}x8\n" for i in range(30)))
    result = load("--trace", "trace")
    assert result["summary"]["ok"] == 30
    assert [shape["latency_ms"]["count"] for shape in result["shapes"]] == [10, 10, 10]


def test_a_mix_follows_the_weights(load):
    result = load("--shape", "1x1x1x8, 1x1x2x8 weight=9", "-c", 2, "--requests", 400, *BRIEF)
    few, many = (shape["latency_ms"]["count"] for shape in result["shapes"])
    assert few + many >= 400 and 5 < many / few < 20


# --- Scenarios and objectives ---------------------------------------------------------------------


def test_multi_stream_measures_whole_queries(load):
    result = load(*TINY, *BRIEF, "--scenario", "multi-stream")
    calls, queries = result["summary"]["ok"], result["milliseconds"]["query"]["count"]
    assert abs(calls - 8 * queries) <= 8
    assert result["milliseconds"]["query"]["p50"] >= result["milliseconds"]["service"]["min"]


@pytest.mark.parametrize("scenario", ["single-stream", "offline"])
def test_scenarios_of_closed_loops(load, scenario):
    result = load(*TINY, *BRIEF, "--scenario", scenario, "--requests", 50)
    assert result["scenario"] == scenario and result["summary"]["ok"] >= 50


def test_a_search_finds_a_rate(load):
    result = load(*TINY, "--scenario", "server", "--search", "--slo", 10000, "-d", 0.8, "--warmup", 0)
    passed = [trial["offered"] for trial in result["search"] if trial["passed"]]
    assert passed and result["summary"]["meets_objective"]
    assert result["summary"]["offered_rate"] == pytest.approx(max(passed), rel=0.5)


def test_a_missed_objective_is_an_exit_code(load):
    result = load(*TINY, *BRIEF, "--slo", 0.001, code=FAILED)
    assert not result["summary"]["meets_objective"] and result["summary"]["goodput"] == 0


# --- Failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["oip", "http"])
def test_failures_are_counted_separately_by_code(load, protocol):
    result = load(*TINY, *BRIEF, "--protocol", protocol, "--model", "other", code=FAILED)
    (failure,) = result["failures"]
    assert failure["code"] == "NOT_FOUND" and "other" in failure["example"]
    assert failure["count"] == result["summary"]["failed"] > 0
    assert [cause["count"] for cause in failure["causes"]] == [failure["count"]]
    assert "other" in failure["causes"][0]["message"]
    assert result["summary"]["error_share"] == 1 and "latency" not in result["milliseconds"]


def test_errors_within_a_stream_are_failures(load):
    flags = ("--protocol", "oip", "--stream", "--model", "other")
    result = load(*TINY, *BRIEF, *flags, code=FAILED)
    assert result["summary"]["ok"] == 0 and "other" in result["failures"][0]["example"]


@pytest.mark.parametrize("protocol", ["rapt", "http"])
def test_calls_have_the_deadline(load, protocol):
    result = load("--shape", "1x8x2048x64", *BRIEF, "--deadline", 0.5, "--protocol", protocol, code=FAILED)
    counts = {failure["code"]: failure["count"] for failure in result["failures"]}
    assert set(counts) == {"DEADLINE_EXCEEDED"}


# --- Caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["1x4/2x100x8", "3x4/2x2:100x8 bf16", "2x2x1x16 fp16, 1x2x700x16 fp64"])
@pytest.mark.parametrize("kind", ["decode", "prefill-decode", "shared-prefix"])
def test_steps_of_sequences_are_correct(load, server, kind, shape):
    flags = ("--cache", kind, "--steps", 5, "--shape", shape, "-c", 3, "--connections", 2)
    result = load(*BRIEF, "--requests", 40, *flags)
    assert result["summary"]["ok"] >= 40 and result["summary"]["failed"] == 0
    assert result["checked"] == {"responses": 3, "wrong": 0, "examples": []}
    assert result["settings"]["cache"] == kind and result["settings"]["steps"] == "5"
    assert "server" in result["milliseconds"]
    assert caches_of(server) == 0


def test_prompts_are_measured_when_sequences_begin_during_the_load(load):
    flags = ("--shape", "1x2x600x8", "--steps", 3, "-c", 2, "--requests", 60)
    decode = load(*BRIEF, "--cache", "decode", *flags)
    assert [shape["shape"] for shape in decode["shapes"]] == ["1x2x1:600x8 FP32 causal"]
    mixed = load(*BRIEF, "--cache", "prefill-decode", *flags)
    steps, prompts = mixed["shapes"]
    assert steps["shape"] == "1x2x1:600x8 FP32 causal" and prompts["shape"] == "1x2x600x8 FP32 causal"
    # A prompt of 600 tokens comes in two calls, and three steps follow.
    assert 0 < prompts["latency_ms"]["count"] < steps["latency_ms"]["count"]


def test_forks_of_one_prompt_share_it(load, server):
    flags = (*BRIEF, "--shape", "4x8/2x600x8")
    load("--cache", "decode", *flags)
    saved = "^rapt_kv_saved_bytes_total (\\S+)$"
    before = re.search(saved, metrics_of(server), re.MULTILINE)[1]
    load("--cache", "shared-prefix", *flags)
    assert float(re.search(saved, metrics_of(server), re.MULTILINE)[1]) > float(before)


def test_refusals_of_caches_are_counted_by_reason(load):
    # A sequence takes 1 MiB.
    flags = ("--cache", "prefill-decode", "--shape", "1x4x1000x32", "--steps", 5, "-c", 4)
    of_caches = ("--kv_cache_bytes=16777216", "--kv_max_caches_per_caller=2")
    for limits, reason in ((of_caches, "quota"), (("--kv_cache_bytes=4194304",), "pages")):
        with RaptServer(*limits) as small:
            result = load(*BRIEF, *flags, address=small.grpc_address)
            assert caches_of(small) == 0
        (failures,) = result["failures"]
        assert failures["code"] == "RESOURCE_EXHAUSTED"
        assert [cause["message"] for cause in failures["causes"]] == [reason]
        assert result["summary"]["ok"] > 0 and result["checked"]["wrong"] == 0


def test_a_load_that_cannot_keep_its_sequences_does_not_begin(server, tmp_path):
    with RaptServer("--kv_cache_bytes=16777216", "--kv_max_caches_per_caller=2") as small:
        flags = ("--cache", "decode", "-c", 3, *TINY)
        assert "quota" in run(small.grpc_address, tmp_path, *flags, code=FAILED).stderr
        assert caches_of(small) == 0
    with RaptServer() as without:
        assert "--kv_cache_bytes" in run(without.grpc_address, tmp_path, *flags, code=FAILED).stderr


@pytest.mark.parametrize("kind", ["decode", "prefill-decode", "shared-prefix"])
def test_an_interrupt_closes_the_caches(server, tmp_path, kind):
    command = [RAPT_LOAD, "--address", server.grpc_address, "--cache", kind, *TINY, "-c", "3", "-d", "600"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while caches_of(server) < 3:
            assert time.monotonic() < deadline, "no cache was made"
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)
    assert running.returncode in (OK, FAILED)
    assert caches_of(server) == 0


def test_integers_out_of_range_name_their_flag(tmp_path):
    text = run("", tmp_path, "--help").stdout
    names = re.findall(r"^  (?:-\w,)?--([\w-]+) N(?= |$)", text, re.MULTILINE)
    assert {"concurrency", "threads", "seed"} <= set(names)
    for name in names:
        for value in ("", "1e9", "abc", "18446744073709551616"):
            assert f"--{name} is '{value}'; it takes" in run("", tmp_path, f"--{name}={value}", code=USAGE).stderr
        for value in ("0", "-1", "2147483648", "9223372036854775808"):
            # Valid ones fail to connect.
            command = [RAPT_LOAD, "--address", "unix:none", f"--{name}={value}"]
            ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert ran.returncode == UNREACHABLE or (ran.returncode == USAGE and f"--{name} is " in ran.stderr), ran


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--shape", "1x2x3"), "--shape: the shape '1x2x3' has 3 axes"),
        (("--shape", "@none"), "--shape: can't read none"),
        (("--dtype", "int8"), "--dtype: unknown type 'int8'"),
        (("--rate", "fast"), "--rate is 'fast'"),
        (("--rate", "5", "--trace", "t"), "--rate and --trace are mutually exclusive"),
        (("--rate", "5", "--arrivals", "x"), "--arrivals is 'x'"),
        (("--protocol", "rest"), "--protocol is 'rest'"),
        (("--protocol", "http", "--stream"), "--protocol http excludes --stream"),
        (("--protocol", "http", "--shared-memory"), "--protocol http excludes --shared-memory"),
        (("--protocol", "http", "--connections", "2"), "--protocol http excludes --connections"),
        (("--protocol", "http", "--cache", "decode"), "--protocol http excludes --cache"),
        (("--protocol", "http", "--model", "a b"), "--model is 'a b'"),
        (("--protocol", "http", "--address", "unix:/x"), "over HTTP it must be HOST:PORT"),
        (("--shared-memory", "--address", "example.com:1"), "on this machine"),
        (("--scenario", "x"), "--scenario is 'x'"),
        (("--scenario", "server"), "needs --rate"),
        (("--scenario", "offline", "--rate", "5"), "closed loop"),
        (("--search",), "--search needs --slo"),
        (("--cache", "x"), "--cache: 'x'; it takes decode, prefill-decode or shared-prefix"),
        (("--cache", "decode", "--rate", "5"), "--cache excludes --rate"),
        (("--cache", "decode", "--protocol", "oip"), "--cache excludes --protocol oip"),
        (("--cache", "decode", "--mask", "bool"), "--shape: 1x8x1024x64 FP32 mask=bool has a mask"),
        (("--cache", "decode", "--shape", "2000x1x8x8"), "a call on caches has at most 1024"),
        (("--cache", "decode", "--steps", "0"), "--steps is 0"),
        (("--duration", "0"), "--duration is 0"),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--durations", "1"), "did you mean --duration?"),
        (("more",), "unexpected argument 'more'"),
    ],
)
def test_wrong_flags_are_named(tmp_path, flags, message):
    ran = run("127.0.0.1:1", tmp_path, *flags, code=USAGE)
    assert ran.stderr.startswith("rapt-load: ") and message in ran.stderr


def test_no_server_is_an_exit_code(server, tmp_path):
    assert "127.0.0.1:1" in run("127.0.0.1:1", tmp_path, code=UNREACHABLE).stderr
    for address in ("127.0.0.1:1", server.grpc_address):
        ran = run(address, tmp_path, "--protocol", "http", code=UNREACHABLE)
        assert "by default 127.0.0.1:8000" in ran.stderr


# --- User interface -------------------------------------------------------------------------------


def test_the_examples_of_help_run(server, tmp_path):
    examples = re.findall(r"^  (rapt-load .*)$", run("", tmp_path, "--help").stdout, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        # The last of repeated flags wins; a slow test machine may miss an objective.
        flags = [*shlex.split(example)[1:], "-d", "0.5", "--warmup", "0", "--slo", "60000"]
        assert "requests/s" in run(server.grpc_address, tmp_path, *flags).stdout, example


@pytest.mark.parametrize("what", [(), ("--cache", "prefill-decode")], ids=["calls", "sequences"])
def test_reports_are_written(server, tmp_path, what):
    for label in ("one, two", "three"):
        flags = ("--csv", "l.csv", "--html", "l.html", "--json", "l.json", "--label", label)
        table = run(server.grpc_address, tmp_path, *TINY, *BRIEF, *what, *flags).stdout
        assert "latency" in table and "checked against the definition, 0 wrong" in table
    rows = list(csv.DictReader((tmp_path / "l.csv").open()))
    assert [row["label"] for row in rows] == ["one, two", "three"]
    assert all(float(row["latency_p99.99_ms"]) > 0 for row in rows)
    result = json.loads((tmp_path / "l.json").read_text())
    assert result["format"] == "rapt-load/1" and result["build"]["version"]
    assert result["server"]["name"] == "rapt-server" and result["machine"]["cores"] >= 1
    page = (tmp_path / "l.html").read_text()
    assert page.count("<svg") == 3 and "three" in page
    assert not re.search(r"(src|href)=|@import|<script", page)


def test_reports_say_what_ran_where_and_when(server, tmp_path):
    label = "it's \x01"
    run(server.grpc_address, tmp_path, *TINY, *BRIEF, "--label", label, "--html", "l.html", "--json", "l.json")
    report = json.loads((tmp_path / "l.json").read_text())
    assert report["command"].startswith("rapt-load --shape 1x2x16x8 ")
    assert shlex.split(report["command"])[-5:] == [label, "--html", "l.html", "--json", "l.json"]
    assert report["server"]["address"] == server.grpc_address
    page = (tmp_path / "l.html").read_text()
    head = page[page.index("<h1>") : page.index("<svg")]
    assert "it&#39;s \ufffd" in head and "\x01" not in page
    for part in (server.grpc_address, "rapt-server " + report["server"]["version"], report["started"], "--shape"):
        assert part in head, part


def test_calls_that_end_after_the_measured_time_are_told(server, tmp_path):
    flags = ("--shape", "1x8x1024x64", "-c", 16, "-d", 0.01, "--warmup", 0, "--html", "l.html", "--json", "l.json")
    table = run(server.grpc_address, tmp_path, *flags).stdout
    summary = json.loads((tmp_path / "l.json").read_text())["summary"]
    assert summary["ended_after"] > 0
    assert summary["rate"] * summary["seconds"] == pytest.approx(summary["ok"] - summary["ended_after"], abs=1e-3)
    assert f"{summary['ok']} succeeded, 0 failed; {summary['ended_after']} ended later" in table
    largest = max(map(float, re.findall(r"<title>max: (\S+)</title>", (tmp_path / "l.html").read_text())))
    assert largest == pytest.approx(json.loads((tmp_path / "l.json").read_text())["milliseconds"]["latency"]["max"], rel=1e-3)


def test_reports_without_a_success_have_no_durations(server, tmp_path):
    flags = ("--shape", "1x8x2048x64", *BRIEF, "--deadline", 0.5, "--html", "l.html", "--json", "l.json", "--csv", "l.csv")
    table = run(server.grpc_address, tmp_path, *flags, code=FAILED).stdout
    assert re.search(r"latency( +-){9}\n", table)
    page = (tmp_path / "l.html").read_text()
    assert "<b>-</b><span>ms at p99" in page and page.count("no data") == 2
    assert all(interval["p99_ms"] is None for interval in json.loads((tmp_path / "l.json").read_text())["series"])
    assert next(csv.DictReader((tmp_path / "l.csv").open()))["latency_p99_ms"] == ""


def test_two_results_are_compared(server, tmp_path):
    for name, shape in (("a", "1x1x1x8"), ("b", "1x8x256x64")):
        run(server.grpc_address, tmp_path, *BRIEF, "--shape", shape, "--json", f"{name}.json")
    table = run("", tmp_path, "compare", "a.json", "b.json").stdout
    (ratio,) = re.findall(r"^  p50 ms .* (\S+)   \S+ to \S+$", table, re.MULTILINE)
    assert float(ratio) > 1 and "shapes differs: 1x1x1x8, 1x8x256x64" in table
    (tmp_path / "c.json").write_text("{}")
    assert "c.json: not a rapt-load JSON report" in run("", tmp_path, "compare", "a.json", "c.json", code=USAGE).stderr
    assert "takes two files" in run("", tmp_path, "compare", "a.json", code=USAGE).stderr


def test_shows_progress_on_a_terminal(server, tmp_path):
    ours, theirs = pty.openpty()
    command = [RAPT_LOAD, "--address", server.grpc_address, *TINY, "-d", "0.5", "--warmup", "0"]
    ran = subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs, timeout=120)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert ran.returncode == OK
    assert re.search(r"\[=* *>? *\] +\d+%  [\d.e+]+/s  p50 [\d.e+]+ ms  p99 ", shown), shown


def test_an_interrupt_ends_the_load_with_a_report(server, tmp_path):
    command = [RAPT_LOAD, "--address", server.grpc_address, *TINY, "-d", "600", "--csv", "l.csv"]
    before = calls_of(server)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        wait_for_a_call(server, before)
        running.send_signal(signal.SIGINT)
        table = running.communicate(timeout=120)[0]
    assert running.returncode == OK or ": 0 succeeded" in table
    assert (tmp_path / "l.csv").exists()
