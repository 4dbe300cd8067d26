"""gRPC's client libraries, unmodified: calls of every kind and outcome.

RAPT_CLIENTS names them. `./dev test clients` installs all, and waits for those that ping seldom (RAPT_PATIENT).
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import time

import numpy as np
import pytest
from grpc import StatusCode
from grpc_clients import CLIENTS, TOOLS
from rapt_server import RaptServer
from tritonclient.grpc import service_pb2

NAMES = os.environ.get("RAPT_CLIENTS", "grpcio aio go").split()

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = b"\x08\x01"  # HealthCheckResponse

MAX_PING_STRIKES = 2  # of gRPC's servers, for pings that come too early
SLOW_ROWS = 1024  # take about a second on the backend "reference"


def request(q_rows=4, k_rows=4, model="attention", identifier=""):
    """A ModelInferRequest whose V is 0.5 everywhere."""
    message = service_pb2.ModelInferRequest(model_name=model, id=identifier)
    for name, rows in {"Q": q_rows, "K": k_rows, "V": k_rows}.items():
        message.inputs.add(name=name, datatype="FP32", shape=[1, 1, rows, 64])
        message.raw_input_contents.append(np.full((rows, 64), 0.5, np.float32).tobytes())
    return message.SerializeToString()


def check_answer(response, rows=4):
    (y,) = service_pb2.ModelInferResponse.FromString(response).raw_output_contents
    np.testing.assert_array_equal(np.frombuffer(y, np.float32), np.full(rows * 64, 0.5, np.float32))


def slow_request(times=1):
    return request(times * SLOW_ROWS, SLOW_ROWS)


def wait_for_computation(server, runs):
    """Waits until a call is computed, or none."""
    deadline = time.monotonic() + 60
    while (server.read_gauge('rapt_memory_reserved_bytes{kind="compute"}') > 0) != runs:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server():
    with RaptServer("--backend=reference") as running:
        yield running


@pytest.fixture(scope="module", params=NAMES)
def client(request, server):
    connected = CLIENTS[request.param](server.grpc_address)
    yield connected
    connected.close()


def test_unary_call(client):
    code, message, responses = client.call("unary", INFER, request())
    assert (code, message) == (StatusCode.OK, "")
    check_answer(*responses)


def test_health(client):
    assert client.call("unary", CHECK, b"") == (StatusCode.OK, "", [SERVING])


@pytest.mark.parametrize("name", ["modèle 100 %41\n", "\t\nwhitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"])
def test_error_with_code_and_message(client, name):
    code, message, responses = client.call("unary", INFER, request(model=name))
    assert code == StatusCode.NOT_FOUND
    assert name in message
    assert responses == []


@pytest.mark.parametrize("method", ["/no.Service/Method", "/inference.GRPCInferenceService/NoMethod"])
def test_unknown_method(client, method):
    assert client.call("unary", method, b"").code == StatusCode.UNIMPLEMENTED


def test_metadata_both_ways(client):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert client.call("unary", INFER, request(), metadata={"traceparent": trace, "ignored-bin": b"abc"}).code == StatusCode.OK
    assert client.trailers["traceparent"] == trace
    assert client.trailers["rapt-backend"] == "reference"


def test_stream_without_messages(client):
    assert client.call("stream", STREAM_INFER) == (StatusCode.OK, "", [])


def test_stream_answers_in_order(client):
    names = ["first", "second", "third"]
    code, _, responses = client.call("stream", STREAM_INFER, *(request(identifier=name) for name in names))
    assert code == StatusCode.OK
    answers = [service_pb2.ModelStreamInferResponse.FromString(response) for response in responses]
    assert [(answer.infer_response.id, answer.error_message) for answer in answers] == [(n, "") for n in names]
    for answer in answers:
        check_answer(answer.infer_response.SerializeToString())


def test_6_mib_in_both_directions(client):
    rows = (6 << 20) // (64 * 4)
    code, message, responses = client.call("unary", INFER, request(rows, 1))
    assert (code, message) == (StatusCode.OK, "")
    check_answer(*responses, rows=rows)


def test_deadline(client):
    assert client.call("unary", INFER, slow_request(10), timeout=0.3).code == StatusCode.DEADLINE_EXCEEDED


def test_cancellation_stops_the_computation(server, client):
    before = time.monotonic()
    assert client.call("unary", INFER, slow_request(100), cancel_after=0.5).code == StatusCode.CANCELLED
    wait_for_computation(server, runs=False)
    assert time.monotonic() - before < 50  # the whole computation takes longer


def test_cancellation_ends_a_stream(server, client):
    before = time.monotonic()
    assert client.call("stream", WATCH, b"", cancel_after=0.5).code == StatusCode.CANCELLED
    assert time.monotonic() - before < 50  # before its deadline


@pytest.mark.parametrize("name", NAMES)
def test_keepalive_during_a_silent_stream(server, name):
    if CLIENTS[name].keepalive_seconds > 1 and "RAPT_PATIENT" not in os.environ:
        pytest.skip("it pings every 10 s; ./dev test clients waits for that")
    client = CLIENTS[name](server.grpc_address)
    seconds = client.keepalive_seconds * (MAX_PING_STRIKES + 2.5)
    code, _, responses = client.call("stream", WATCH, b"", timeout=seconds)
    client.close()
    assert (code, responses) == (StatusCode.DEADLINE_EXCEEDED, [SERVING])


@pytest.mark.parametrize("name", NAMES)
def test_a_drained_server_completes_its_calls(name):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the client's

        def call(*args, **kwargs):
            return thread.submit(client.call, *args, **kwargs)

        with RaptServer("--backend=reference", "--threads=1", "--grace_period=60s") as server:
            address = server.grpc_address
            client = thread.submit(CLIENTS[name], address).result()
            slow = call("unary", INFER, slow_request())
            wait_for_computation(server, runs=True)
            server.stop()
            code, message, responses = slow.result()
            assert (code, message) == (StatusCode.OK, "")
            check_answer(*responses, rows=SLOW_ROWS)
        assert call("unary", CHECK, b"").result().code == StatusCode.UNAVAILABLE
        with RaptServer(grpc_address=address):
            outcome = call("unary", CHECK, b"", wait_for_ready=True).result()
            assert outcome == (StatusCode.OK, "", [SERVING])
        thread.submit(client.close).result()


# --- docs/clients.md ------------------------------------------------------------------------------

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = HERE.parents[1] / "proto"


def first_call(name, stubs):
    """The command and environment of the example of a client's language. Python's stubs are generated into a folder."""
    if name == "go":
        return [f"{TOOLS}/go-first-call/first-call"], {}
    if name == "java":
        return ["java", "-cp", f"{TOOLS}/java-client:{TOOLS}/java-client/*", "FirstCall"], {}
    if name == "node":
        modules = {"NODE_PATH": f"{TOOLS}/node-client/node_modules"}
        return ["node", HERE / "clients/node/first_call.js"], modules
    python = os.environ["RAPT_KSERVE_ENV"] + "/bin/python"
    generate = ["-m", "grpc_tools.protoc", "-I", PROTOS, f"--python_out={stubs}", f"--grpc_python_out={stubs}"]
    subprocess.run([python, *generate, "rapt/v1/attention.proto"], check=True)
    return [python, HERE / "clients/python/first_call.py"], {"PYTHONPATH": str(stubs)}


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"aio"}))
def test_the_first_call_of_the_docs(server, name, tmp_path):
    command, environment = first_call(name, tmp_path)
    command = [*command, server.grpc_address, PROTOS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert [float(number) for number in re.findall(r"[\d.]+", done.stdout)] == [1, 1, 1, 2, 2, 3], done.stdout
