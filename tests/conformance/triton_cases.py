"""The same requests to Triton and to rapt-server. `./dev test clients` runs it. docs/rest.md lists the differences."""

import contextlib
import gzip
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sysconfig
import zlib

import grpc
import numpy as np
import pytest
from rapt_server import RaptServer
from tritonclient.grpc import service_pb2, service_pb2_grpc

HERE = pathlib.Path(__file__).resolve().parent
INFER = "/v2/models/attention/infer"
X = np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)


def free_ports(count):
    """The first of so many adjacent ports that nobody listens on."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


class TritonServer:
    def __enter__(self):
        port = free_ports(3)
        self.grpc_address, self.http_address = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
        libraries = f"{sysconfig.get_config_var('LIBDIR')}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        self._process = subprocess.Popen(
            [os.environ["RAPT_PYTRITON_ENV"] + "/bin/python", HERE / "triton_server.py", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"LD_LIBRARY_PATH": libraries},
            start_new_session=True,
        )
        assert "ready\n" in iter(self._process.stdout.readline, ""), "PyTriton does not start"
        return self

    def __exit__(self, *_):
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # PyTriton does not stop its tritonserver
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def servers():
    with TritonServer() as triton, RaptServer() as rapt:
        yield triton, rapt


# --- HTTP -----------------------------------------------------------------------------------------


def body(q=None, **members):
    inputs = [{"name": n, "datatype": "FP32", "shape": [1, 1, 2, 2], "data": [1, 0, 0, 1]} for n in "QKV"]
    inputs[0].update(q or {})
    return {"inputs": inputs, "outputs": [{"name": "Y"}], **members}


def y(**members):
    return body(outputs=[{"name": "Y", **members}])


def without(name):
    message = body()
    del message["inputs"][0][name]
    return message


def parameters(**values):
    return {"parameters": values}


# The status of both.
ALIKE = {
    "nothing odd": (body(), 200),
    "the model in the body": (body(model_name="attention"), 200),
    "another model in the body": (body(model_name="other", model_version="9"), 200),
    "an unknown member": (body(x={"a": [1, {"b": 2}]}, z=None), 200),
    "an unknown member of an input": (body({"x": [[1]]}), 200),
    "members of an output": (y(datatype="FP64", shape=[7], data=[1], x={}), 200),
    "null for a tensor's parameters": (body({"parameters": None}), 200),
    "an unknown parameter of an input": (body(parameters(x=1, z={"a": None})), 200),
    "content_type": (body(parameters(content_type="np"), **parameters(content_type="np")), 200),
    "parameters of an output": (y(**parameters(content_type="np", x=None, binary_data_size=16)), 200),
    "headers": (body(**parameters(headers="x")), 200),
    "a sequence": (body(**parameters(sequence_id=5, sequence_start=True, sequence_end=True)), 200),
    "priority and timeout": (body(**parameters(priority=1, timeout=60_000_000)), 200),
    "an empty list of outputs": (body(outputs=[]), 200),
    "nested data": (body({"data": [[[[1, 0], [0, 1]]]]}), 200),
    "ragged data": (body({"data": [[1], [0, [0]], 1]}), 200),
    "binary outputs": (y(**parameters(binary_data=True)), 200),
    "all outputs binary": (body(outputs=[], **parameters(binary_data_output=True)), 200),
    "an array for a parameter": (body(**parameters(x=[1])), 400),
    "null for a parameter": (body(**parameters(x=None)), 400),
    "no inputs": (body(inputs=[]), 400),
    "an input twice": (body(inputs=body()["inputs"][:1] * 2 + body()["inputs"][1:]), 400),
    "an unknown input": (body(inputs=[*body()["inputs"], {**body()["inputs"][0], "name": "W"}]), 400),
    "an unknown output": (y(name="Z"), 400),
    "an input without data": (without("data"), 400),
    "a type in small letters": (body({"datatype": "fp32"}), 400),
    "data twice": (body(parameters(binary_data_size=16)), 400),
}

# The status of Triton, then that of rapt.
DIFFERENT = {
    "an unknown parameter": (body(**parameters(is_casual=True)), 200, 400),
    "classification": (y(**parameters(classification=1)), 200, 400),
    "an output twice": (body(outputs=[{"name": "Y"}] * 2), 200, 400),
    "a size without a region": (body(parameters(shared_memory_byte_size=16)), 200, 400),
    "an array for a tensor's parameters": (body({"parameters": [1]}), 200, 400),
    "a number beyond the type": (body({"data": [1e39, 0, 0, 1]}), 200, 400),
    "a short timeout": (body(**parameters(timeout=1)), 200, 504),
    "null": (body(id=None, outputs=None, parameters=None), 500, 200),
    "a parameter of Triton": (body(**parameters(triton_x=1)), 400, 200),
    "sequence_start as a number": (body(**parameters(sequence_id=5, sequence_start=1)), 500, 200),
    "priority as text": (body(**parameters(priority="1")), 500, 200),
    "NaN as text": (body({"data": ["NaN", 0, 0, 1]}), 500, 200),
    "id as a number": (body(id=5), 500, 400),
    "an object of outputs": (body(outputs={}), 500, 400),
    "an output without a name": (body(outputs=[{}]), 500, 400),
    "an input without a type": (without("datatype"), 500, 400),
    "too few numbers": (body({"data": [1]}), 500, 400),
    "text for a number": (body({"data": ["1", 0, 0, 1]}), 500, 400),
    "no elements": (body(inputs=[{**x, "shape": [1, 1, 0, 2], "data": []} for x in body()["inputs"]]), 500, 200),
    "a fraction in a shape": (body({"shape": [1, 1, 2.0, 2]}), 500, 400),
    "binary_data as a number": (y(**parameters(binary_data=1)), 500, 400),
}


def send(server, method, path, data=None, headers=None):
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    try:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def infer(server, message):
    return send(server, "POST", INFER, json.dumps(message).encode())


@pytest.mark.parametrize("message, status", ALIKE.values(), ids=ALIKE)
def test_alike(servers, message, status):
    answers = [infer(server, message) for server in servers]
    assert [code for code, _ in answers] == [status] * 2, answers
    if status == 200 and b"binary_data_size" not in answers[0][1]:
        triton, rapt = ({o["name"]: o for o in json.loads(text)["outputs"]}["Y"] for _, text in answers)
        np.testing.assert_allclose(rapt.pop("data"), triton.pop("data"), rtol=1e-6)
        assert rapt == triton


@pytest.mark.parametrize("message, triton, rapt", DIFFERENT.values(), ids=DIFFERENT)
def test_different(servers, message, triton, rapt):
    answers = [infer(server, message) for server in servers]
    assert [code for code, _ in answers] == [triton, rapt], answers


def test_outputs_if_none_is_named(servers):
    answers = [json.loads(infer(server, body(outputs=[]))[1]) for server in servers]
    names = [sorted(output["name"] for output in answer["outputs"]) for answer in answers]
    assert names == [["Y", "lse"], ["Y"]]


def test_named_outputs_follow_the_requests_default(servers):
    answers = [infer(server, body(**parameters(binary_data_output=True))) for server in servers]
    assert [b"binary_data_size" in text for _, text in answers] == [False, True]


TEXT = json.dumps(body())
BINARY = TEXT.replace('"data": [1, 0, 0, 1]', '"parameters": {"binary_data_size": 16}')
LENGTH = "Inference-Header-Content-Length"
BINARY_LENGTH = {LENGTH: str(len(BINARY))}
BODIES = {
    "space after it": (TEXT + " \n", {}, 200, 200),
    "a nested member": (TEXT[:-1] + ', "x":' + "[" * 60 + "]" * 60 + "}", {}, 200, 200),
    "a deep member": (TEXT[:-1] + ', "x":' + "[" * 2000 + "]" * 2000 + "}", {}, 200, 400),
    "a member twice": (TEXT[:-1] + ', "id": "a", "id": "b"}', {}, 200, 400),
    "a zero byte after it": (TEXT + "\0]]]]", {}, 200, 400),
    "text after it": (TEXT + "x", {}, 500, 400),
    "a comma too many": (TEXT[:-1] + ",}", {}, 500, 400),
    "an array": ("[1]", {}, 500, 400),
    "bare NaN": (TEXT.replace("[1, 0", "[NaN, 0", 1), {}, 200, 400),
    "no UTF-8": (TEXT[:-1].encode() + b', "id": "\xff"}', {}, 200, 400),
    "gzip": (gzip.compress(TEXT.encode()), {"Content-Encoding": "gzip"}, 200, 415),
    "deflate": (zlib.compress(TEXT.encode()), {"Content-Encoding": "deflate"}, 200, 415),
    "another type of content": (TEXT, {"Content-Type": "text/plain"}, 200, 200),
    "binary data": (BINARY.encode() + X.tobytes() * 3, BINARY_LENGTH, 200, 200),
    "too much of it": (BINARY.encode() + X.tobytes() * 4, BINARY_LENGTH, 400, 400),
    "too little of it": (BINARY.encode() + X.tobytes() * 2, BINARY_LENGTH, 400, 400),
    "a length beyond the body": (BINARY, {LENGTH: "100000"}, 400, 400),
    "a length of no bytes": (BINARY, {LENGTH: "-1"}, 400, 400),
}


@pytest.mark.parametrize("data, headers, triton, rapt", BODIES.values(), ids=BODIES)
def test_bodies(servers, data, headers, triton, rapt):
    answers = [send(server, "POST", INFER, data, headers) for server in servers]
    assert [code for code, _ in answers] == [triton, rapt], answers


def test_bodies_of_health(servers):
    for probe in ("ready", "live"):
        texts = [send(server, "GET", f"/v2/health/{probe}")[1] for server in servers]
        assert texts[0] == b"" and json.loads(texts[1]) == {probe: True}


PATHS = {
    ("GET", "/v2"): (200, 200),
    ("GET", "/v2/"): (404, 404),
    ("GET", "/v2/health/live"): (200, 200),
    ("GET", "/v2/health/ready"): (200, 200),
    ("HEAD", "/v2/health/ready"): (405, 200),
    ("POST", "/v2/health/ready"): (405, 405),
    ("GET", "/v2/models/attention/ready"): (200, 200),
    ("GET", "/v2/models/attention/versions/1/ready"): (200, 200),
    ("GET", "/v2/models/attention/versions/9/ready"): (400, 404),
    ("GET", "/v2/models/none/ready"): (400, 404),
    ("GET", "/v2/models/none"): (404, 404),
    ("GET", "/v2/models/none/config"): (404, 404),
    ("GET", INFER): (405, 405),
    ("POST", INFER.replace("attention", "none")): (404, 404),
    ("POST", "/v2/models/attention/versions/9/infer"): (404, 404),
    ("GET", "/none"): (404, 404),
}


@pytest.mark.parametrize("request_line, statuses", PATHS.items(), ids=map(" ".join, PATHS))
def test_paths(servers, request_line, statuses):
    data = TEXT if request_line[0] == "POST" else None
    assert tuple(send(server, *request_line, data)[0] for server in servers) == statuses


# --- gRPC -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stubs(servers):
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(server.grpc_address)) for server in servers]
        yield [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]


def message(model="attention", request_id=""):
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name in "QKV":
        request.inputs.add(name=name, datatype="FP32", shape=X.shape)
        request.raw_input_contents.append(X.tobytes())
    request.outputs.add(name="Y")
    return request


def in_small_letters(request):
    request.inputs[0].datatype = "fp32"


def typed(request):
    del request.raw_input_contents[:]
    for tensor in request.inputs:
        tensor.contents.fp32_contents.extend(X.ravel().tolist())


def in_version(version):
    return lambda request: setattr(request, "model_version", version)


def setting(name, of=lambda request: request, **value):
    """Sets a parameter, by default of the request."""
    return lambda request: of(request).parameters[name].CopyFrom(service_pb2.InferParameter(**value))


def first_input(request):
    return request.inputs[0]


def first_output(request):
    return request.outputs[0]


# The codes of Triton and of rapt.
CALLS = {
    "nothing odd": (lambda r: None, "OK", "OK"),
    "typed contents": (typed, "OK", "OK"),
    "a size beside raw contents": (setting("binary_data_size", first_input, int64_param=99), "OK", "OK"),
    "a parameter without a value": (setting("x", first_input), "OK", "OK"),
    "a parameter of an output": (setting("binary_data", first_output), "OK", "OK"),
    "binary_data_output": (setting("binary_data_output", bool_param=True), "OK", "OK"),
    "content_type": (setting("content_type", string_param="np"), "OK", "OK"),
    "an unknown parameter": (setting("is_casual", bool_param=True), "OK", "INVALID_ARGUMENT"),
    "classification": (setting("classification", first_output, int64_param=1), "OK", "INVALID_ARGUMENT"),
    "an output twice": (lambda r: r.outputs.add(name="Y"), "OK", "INVALID_ARGUMENT"),
    "too many raw contents": (lambda r: r.raw_input_contents.append(b""), "OK", "INVALID_ARGUMENT"),
    "too few": (lambda r: r.raw_input_contents.pop(), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    "raw and typed contents": (lambda r: r.inputs[0].contents.SetInParent(), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    "a type in small letters": (in_small_letters, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    "a size without a region": (
        setting("shared_memory_byte_size", first_input, int64_param=16),
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
    ),
    "no model": (lambda r: r.ClearField("model_name"), "NOT_FOUND", "NOT_FOUND"),
    "a version that is no number": (in_version("x"), "INVALID_ARGUMENT", "NOT_FOUND"),
    "a timeout below 0": (setting("timeout", int64_param=-1), "OK", "INVALID_ARGUMENT"),
}


def code_of(call, *arguments, **options):
    try:
        call(*arguments, **options, timeout=60)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("change, triton, rapt", CALLS.values(), ids=CALLS)
def test_calls(stubs, change, triton, rapt):
    request = message()
    change(request)
    assert [code_of(stub.ModelInfer, request) for stub in stubs] == [triton, rapt]


def test_compression(stubs):
    codes = [code_of(stub.ModelInfer, message(), compression=grpc.Compression.Gzip) for stub in stubs]
    assert codes == ["OK", "UNIMPLEMENTED"]


def test_readiness_of_an_unknown_model(stubs):
    assert [stub.ModelReady(service_pb2.ModelReadyRequest(name="none")).ready for stub in stubs] == [False, False]


def stream(stub, model, **flag):
    """Returns the id and triton_final_response of each response to two requests."""
    requests = [message(model, str(n)) for n in range(2)]
    for request in requests:
        for name, value in flag.items():
            request.parameters[name].bool_param = value
    responses = [answer.infer_response for answer in stub.ModelStreamInfer(iter(requests), timeout=60)]
    return [(r.id, r.parameters["triton_final_response"].bool_param, len(r.outputs)) for r in responses]


@pytest.mark.parametrize("flag", [{}, *({"triton_enable_empty_final_response": value} for value in (True, False))])
def test_the_last_response_of_a_request(stubs, flag):
    for stub in stubs:
        assert stream(stub, "attention", **flag) == [("0", True, 1), ("1", True, 1)]
    # A decoupled model of Triton has an empty response for it, if the request asks for that.
    last = [response for response in stream(stubs[0], "streamed", **flag) if response[1]]
    assert last == ([("0", True, 0), ("1", True, 0)] if flag.get("triton_enable_empty_final_response") else [])


def test_an_error_in_a_stream(stubs):
    request = message(request_id="7")
    request.inputs[0].shape[0] = 2
    for stub, is_last in zip(stubs, (False, True)):
        (answer,) = stub.ModelStreamInfer(iter([request]), timeout=60)
        assert answer.error_message and answer.infer_response.id == "7"
        assert answer.infer_response.parameters["triton_final_response"].bool_param == is_last


# --- PyTriton's client ----------------------------------------------------------------------------

PROGRAM = """
import sys
import numpy as np
from pytriton.client import ModelClient

x = np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)
with ModelClient(sys.argv[1], "attention") as client:
    answer = client.infer_sample(Q=x, K=x, V=x)
print([*answer["Y"].ravel().tolist(), *answer["lse"].ravel().tolist()])
"""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_pytritons_client(servers, protocol):
    """It asks for every output that the model's configuration has."""

    def ask(server):
        address = f"{protocol}://{server.grpc_address if protocol == 'grpc' else server.http_address}"
        command = [os.environ["RAPT_PYTRITON_ENV"] + "/bin/python", "-W", "ignore", "-c", PROGRAM, address]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    triton, rapt = (ask(server) for server in servers)
    np.testing.assert_allclose(rapt, triton, rtol=1e-6)
