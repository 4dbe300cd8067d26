"""Triton's own Python client over HTTP, sync and aio, and curl, against a running server."""

import asyncio
import base64
import json
import os
import pathlib
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
import yaml
from attention_client import DATATYPES, assert_close
from onnx_test import CASES, INPUTS, OUTPUTS, by_name
from rapt_server import RaptServer, wait_until
from tritonclient.utils import InferenceServerException

import onnx

ROOT = pathlib.Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(24)


@pytest.fixture(scope="module")
def server():
    with RaptServer("--allow_shared_memory", "--kv_cache_bytes=67108864") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.http_address) as connected:
        yield connected


@pytest.fixture(scope="module")
def grpc_client(server):
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def to_input(name, array, binary=True):
    tensor = triton.InferInput(name, list(array.shape), DATATYPES[array.dtype])
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def qkv(dtype=np.float32, shape=(1, 2, 5, 8)):
    return {name: RNG.standard_normal(shape).astype(dtype) for name in "QKV"}


def attend(client, arrays, outputs=("Y",), parameters=None, binary=True):
    result = client.infer(
        "attention",
        [to_input(name, array, binary) for name, array in arrays.items()],
        outputs=[triton.InferRequestedOutput(name, binary_data=binary) for name in outputs],
        parameters=parameters,
    )
    assert [output["name"] for output in result.get_response()["outputs"]] == list(outputs)
    return {name: result.as_numpy(name) for name in outputs}


def has_json(array):
    """Whether tritonclient sends the array as JSON: it refuses other types, and has no numbers for infinities."""
    return array.dtype not in (np.float16, ml_dtypes.bfloat16) and (array.dtype == bool or np.isfinite(array).all())


# --- Inference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_case(client, case):
    (node,) = case.model.graph.node
    parameters = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        arrays = by_name(INPUTS, node.input, inputs)
        want = by_name(OUTPUTS, node.output, outputs)
        got = attend(client, arrays, want, parameters)
        for name in want:
            assert got[name].dtype == want[name].dtype
            assert_close(name, got[name], want[name])
        if all(has_json(array) for array in arrays.values()):
            numbers = attend(client, arrays, want, parameters, binary=False)
            for name in want:
                np.testing.assert_array_equal(numbers[name].astype(got[name].dtype), got[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_same_bits_as_over_grpc(client, grpc_client, dtype):
    arrays = qkv(dtype, (1, 4, 65, 32))
    inputs = []
    for name, array in arrays.items():
        inputs.append(tritonclient.grpc.InferInput(name, array.shape, DATATYPES[array.dtype]))
        inputs[-1].set_data_from_numpy(array)
    want = grpc_client.infer("attention", inputs, parameters={"is_causal": True})
    got = attend(client, arrays, parameters={"is_causal": True})
    np.testing.assert_array_equal(got["Y"].view(np.uint8), want.as_numpy("Y").view(np.uint8))


def test_numbers_round_trip(client):
    arrays = qkv(np.float32)
    binary, numbers = attend(client, arrays), attend(client, arrays, binary=False)
    np.testing.assert_array_equal(numbers["Y"].astype(np.float32), binary["Y"])


def test_answers_are_binary_unless_a_request_says_otherwise(client):
    result = client.infer("attention", [to_input(name, array) for name, array in qkv().items()], request_id="seven")
    response = result.get_response()
    assert response["id"] == "seven"
    assert response["outputs"][0]["parameters"] == {"binary_data_size": 2 * 5 * 8 * 4}
    assert result.as_numpy("Y").shape == (1, 2, 5, 8)


def test_large_tensors(client):
    arrays = qkv(np.float32, (1, 8, 256, 1024))
    arrays["K"][:], arrays["V"][:] = 0, 1
    np.testing.assert_allclose(attend(client, arrays)["Y"], 1, rtol=1e-6)


def test_errors(client):
    arrays = qkv()
    arrays["K"] = arrays["K"][..., :4]
    with pytest.raises(InferenceServerException, match="head size") as caught:
        attend(client, arrays)
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="unknown model 'none'") as caught:
        client.infer("none", [to_input("Q", qkv()["Q"])])
    assert caught.value.status() == "404"


def test_compressed_requests_are_refused(client):
    with pytest.raises(InferenceServerException, match="must not be compressed"):
        client.infer("attention", [to_input("Q", qkv()["Q"])], request_compression_algorithm="gzip")


def test_aio_client(server):
    async def ask():
        async with triton_aio.InferenceServerClient(server.http_address) as client:
            assert await client.is_server_live()
            inputs = [to_input(name, array) for name, array in qkv().items()]
            results = await asyncio.gather(*[client.infer("attention", inputs) for _ in range(20)])
            return [result.as_numpy("Y") for result in results]

    answers = asyncio.run(ask())
    for answer in answers:
        np.testing.assert_array_equal(answer, answers[0])


def test_a_sequence_keeps_its_keys(client):
    q, k, v = (RNG.standard_normal((1, 2, 6, 8)).astype(np.float32) for _ in range(3))
    whole = attend(client, {"Q": q, "K": k, "V": v}, parameters={"is_causal": True})["Y"]
    for first in range(0, 6, 2):
        step = {name: array[:, :, first : first + 2] for name, array in zip("QKV", (q, k, v))}
        result = client.infer(
            "attention_session",
            [to_input(name, np.ascontiguousarray(array)) for name, array in step.items()],
            sequence_id=5,
            sequence_start=first == 0,
            sequence_end=first == 4,
        )
        assert_close("Y", result.as_numpy("Y"), whole[:, :, first : first + 2])


# --- The other paths ------------------------------------------------------------------------------


def test_health(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("attention")
    assert client.is_model_ready("attention", "1")
    assert not client.is_model_ready("none")


def as_dict(message):
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True)


def test_metadata_is_that_of_grpc(client, grpc_client):
    def numbers(value):
        """Protobuf's JSON has 64-bit integers as strings."""
        if isinstance(value, dict):
            return {key: numbers(item) for key, item in value.items()}
        if isinstance(value, list):
            return [numbers(item) for item in value]
        return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d+", value) else value

    assert client.get_server_metadata() == as_dict(grpc_client.get_server_metadata())
    for model in ("attention", "rotary_embedding", "attention_session"):
        got, want = client.get_model_metadata(model), as_dict(grpc_client.get_model_metadata(model))
        assert numbers(got) == numbers(want)
        got, want = client.get_model_config(model), as_dict(grpc_client.get_model_config(model))["config"]
        assert got["name"] == want["name"] and got["max_batch_size"] == 0
        assert [t["name"] for t in got["input"]] == [t["name"] for t in want["input"]]
        assert got["input"][0]["data_type"] == want["input"][0]["data_type"]
        assert got["input"][0]["dims"] == [-1] * len(got["input"][0]["dims"])


def test_statistics_count_calls_of_both_protocols(client, grpc_client):
    def successes():
        (model,) = client.get_inference_statistics("attention")["model_stats"]
        return model["inference_stats"]["success"]["count"]

    before = successes()
    arrays = qkv()
    attend(client, arrays)
    inputs = [tritonclient.grpc.InferInput(name, array.shape, "FP32") for name, array in arrays.items()]
    for tensor, array in zip(inputs, arrays.values()):
        tensor.set_data_from_numpy(array)
    grpc_client.infer("attention", inputs)
    wait_until(lambda: successes() == before + 2, "the two calls are not counted")
    assert len(client.get_inference_statistics()["model_stats"]) > 1


def test_a_failure_is_that_of_the_model_in_the_path(server, client):
    def failures():
        stats = client.get_inference_statistics()["model_stats"]
        return {model["name"]: model["inference_stats"]["fail"]["count"] for model in stats}

    before = failures()
    for model in ("transformer", "positional_encoding"):
        status, _ = ask(server, f"/v2/models/{model}/infer", ["no", "object"])
        assert status == (404 if model == "transformer" else 400)
    wait_until(lambda: failures() != before, "the failure is not counted")  # once its response was sent
    assert failures() == before | {"positional_encoding": before["positional_encoding"] + 1}


def test_repository(client):
    index = client.get_model_repository_index()
    assert {"name": "attention", "version": "1", "state": "READY", "reason": ""} in index
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="not supported") as caught:
            call("attention")
        assert caught.value.status() == "501"


def test_settings(client):
    assert client.get_trace_settings() == {}
    assert client.get_trace_settings("attention") == {}
    assert client.get_log_settings() == {}
    with pytest.raises(InferenceServerException, match="unknown trace setting trace_level"):
        client.update_trace_settings(settings={"trace_level": ["OFF"]})
    with pytest.raises(InferenceServerException, match="unknown log setting log_info"):
        client.update_log_settings({"log_info": True})


def test_shared_memory(client):
    arrays = qkv(shape=(1, 2, 33, 16))
    total = sum(array.nbytes for array in arrays.values())
    key = f"/rapt-{os.getpid()}-http"
    handle = shm.create_shared_memory_region("http", key, 2 * total, create_only=True)
    try:
        shm.set_shared_memory_region(handle, list(arrays.values()))
        client.register_system_shared_memory("http", key, 2 * total)
        (status,) = client.get_system_shared_memory_status()
        assert status["name"] == "http" and status["byte_size"] == 2 * total
        inputs, offset = [], 0
        for name, array in arrays.items():
            inputs.append(triton.InferInput(name, array.shape, "FP32"))
            inputs[-1].set_shared_memory("http", array.nbytes, offset)
            offset += array.nbytes
        y = triton.InferRequestedOutput("Y")
        y.set_shared_memory("http", arrays["Q"].nbytes, total)
        result = client.infer("attention", inputs, outputs=[y])
        got = shm.get_contents_as_numpy(handle, np.float32, arrays["Q"].shape, total)
        np.testing.assert_array_equal(got, attend(client, arrays)["Y"])
        # Triton's C++ client takes any parameters of an output for those of binary data.
        assert result.get_output("Y").keys() == {"name", "datatype", "shape"}
        client.unregister_system_shared_memory("http")
        assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(handle)
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException):
        client.register_cuda_shared_memory("gpu", b"AAAA", 0, 16)


# --- rapt.v1 --------------------------------------------------------------------------------------


def ask(server, path, message=None):
    """Returns the status and the JSON of the answer."""
    body = None if message is None else json.dumps(message).encode()
    try:
        with urllib.request.urlopen(f"http://{server.http_address}{path}", body) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def oip_tensor(name, array):
    """As an input of the Open Inference Protocol."""
    return {"name": name, "datatype": "FP32", "shape": array.shape, "data": array.tolist()}


def tensor(array):
    return {"dtype": "FP32", "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}


def test_server_info(server):
    status, info = ask(server, "/rapt/v1/server")
    assert status == 200
    assert info["version"] and info["computeThreads"] >= 1
    assert info["caches"]["maxBytes"] == "67108864" and info["caches"]["defaultLeaseMs"] == "600000"


def test_estimate_of_memory(server):
    call = {"batch": 1, "queryHeads": 2, "lengths": [64, 128]}
    status, estimate = ask(server, "/rapt/v1/estimate-memory", call)
    assert status == 200 and len(estimate["estimates"]) == 2
    status, error = ask(server, "/rapt/v1/estimate-memory", {"batch": 1, "heads": 2})
    assert status == 400 and "heads" in error["error"]
    assert ask(server, "/rapt/v1/estimate-memory", {})[0] == 400


def test_diagnosis(server):
    x = RNG.standard_normal((1, 1, 512, 16)).astype(np.float32)
    x[0, 0, 0, 0] = np.nan
    call = {"call": {name: tensor(x) for name in "qkv"}}
    status, report = ask(server, "/rapt/v1/diagnose", call)
    assert status == 200, report
    assert "nanCount" in json.dumps(report)
    call["call"]["k"]["shape"] = [1, 1, 1, 1]
    assert ask(server, "/rapt/v1/diagnose", call)[0] == 400


def test_tensors_may_be_those_of_the_open_inference_protocol(server):
    arrays = {name.lower(): array for name, array in qkv().items()}
    want = ask(server, "/rapt/v1/attend", {name: tensor(array) for name, array in arrays.items()})
    assert want[0] == 200
    named = {name: oip_tensor(name, array) for name, array in arrays.items()}
    flat = {
        name: {"data": array.ravel().tolist(), "shape": array.shape, "dtype": "FP32"} for name, array in arrays.items()
    }
    for call in (named, flat):
        status, answer = ask(server, "/rapt/v1/attend", call)
        assert status == 200 and answer["y"] == want[1]["y"], answer
        status, report = ask(server, "/rapt/v1/diagnose", {"call": call})
        np.testing.assert_allclose(report["inputs"][1]["max"], arrays["k"].max())


@pytest.mark.parametrize(
    "dtype, data, named",
    [
        ("FP32", [1e39], "q has 1e+39 in data; it must be a number within the type"),
        ("FP16", [[65520]], "q has 65520 in data"),
        ("FP32", [None], "q has null in data"),
        ("FP32", [{}], "q has an object in data"),
        ("FP32", ["inf"], "q has 'inf' in data"),
        ("FP32", [1, 2], "q"),
        ("FP8", [1], "q has dtype 'FP8' and numbers in data; it must be FP32"),
        (None, [1], "q has dtype '' and numbers in data"),
        ("UINT16", [1], "q has dtype 'UINT16' and numbers in data"),
    ],
)
def test_wrong_numbers_are_refused_by_name(server, dtype, data, named):
    q = {"shape": [1, 1, 1, 1], "data": data} | ({"dtype": dtype} if dtype else {})
    status, error = ask(server, "/rapt/v1/attend", {"q": q, "k": tensor(np.zeros((1, 1, 1, 1), np.float32))})
    assert status == 400 and named in error["error"], error


@pytest.mark.parametrize(
    "body", ["{", "[]", '{"q":{"data":' + "[" * 1000, '{"q":' * 100, '{"q":{"data":[1e400]}}', '{"q":{"shape":1,"data":[NaN]}}', '{"q":{"name":{"a":[1]}}}', '{"q":{"name":1}}', '{"q":[{"data":[1]}]}', '{"q":{"data":"*"}}']
)
def test_hostile_json_is_refused(server, body):
    for path in ("attend", "diagnose", "caches/append"):
        request = urllib.request.Request(f"http://{server.http_address}/rapt/v1/{path}", body.encode())
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            urllib.request.urlopen(request)
        assert json.load(caught.value)["error"]


def test_caches_are_listed_in_pages(server):
    shape = {"layers": 1, "kvHeads": 1, "headSize": 4}
    for n in range(5):
        status, _ = ask(server, "/rapt/v1/caches", {"name": f"page-{n}", "shapes": [shape], "dtype": "FP32"})
        assert status == 200
    names, token, pages = [], "", 0
    while pages == 0 or token:
        query = {"pageSize": 2, "namePrefix": "page-", "pageToken": token}
        status, caches = ask(server, "/rapt/v1/caches?" + urllib.parse.urlencode(query))
        assert status == 200, caches
        assert len(caches["caches"]) <= 2
        names += [cache["name"] for cache in caches["caches"]]
        token, pages = caches["nextPageToken"], pages + 1
    assert names == [f"page-{n}" for n in range(5)] and pages == 3
    assert len(ask(server, "/rapt/v1/caches")[1]["caches"]) >= 5


@pytest.mark.parametrize(
    "query, named",
    [("pageSize=x", "page_size"), ("size=2", "size"), ("pageSize=%4", "query"), ("pageToken=no", "page_token")],
)
def test_a_wrong_query_is_refused_by_name(server, query, named):
    status, error = ask(server, f"/rapt/v1/caches?{query}")
    assert status == 400 and named in error["error"], error


def test_a_get_request_has_no_body(server):
    request = urllib.request.Request(f"http://{server.http_address}/rapt/v1/caches", b"{}", method="GET")
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(request)
    assert "parameters of the query" in json.load(caught.value)["error"]


def test_answers_have_a_limit():
    with RaptServer("--max_json_bytes=300") as small:
        call = {"batch": 1, "queryHeads": 1, "lengths": list(range(1, 65))}
        for path, message in (("server", None), ("estimate-memory", call)):
            status, error = ask(small, f"/rapt/v1/{path}", message)
            assert status == 413 and "--max_json_bytes allows 300" in error["error"]


def numbers(answer):
    return np.frombuffer(base64.b64decode(answer["data"]), np.float32).reshape([int(n) for n in answer["shape"]])


def test_attend(server, client):
    arrays = qkv()
    message = {name.lower(): tensor(array) for name, array in arrays.items()} | {"attention": {"causal": True}}
    status, answer = ask(server, "/rapt/v1/attend", message)
    assert status == 200 and answer["backend"] == "cpu", answer
    want = attend(client, arrays, parameters={"is_causal": True})["Y"]
    np.testing.assert_array_equal(numbers(answer["y"]), want)


def test_protocol_buffers_instead_of_json(server):
    """EstimateMemoryRequest {query_heads: 2, lengths: [64]}; the answer's fields are those of its JSON."""

    def post(body, **headers):
        url = f"http://{server.http_address}/rapt/v1/estimate-memory"
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
                return answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    message, kind = b"\x08\x01\x10\x02\x22\x01\x40", "application/x-protobuf"
    json_type, as_json = post(b'{"batch": 1, "queryHeads": 2, "lengths": [64]}')
    assert json_type == "application/json"
    assert post(message, Content_Type=kind) == ("application/json", as_json)
    answer_type, answer = post(message, Content_Type=f"{kind}; charset=binary", Accept=kind)
    assert answer_type == kind and json.loads(as_json)["estimates"][0]["plan"].encode() in answer
    status, error = post(b"\xff", Content_Type=kind, Accept=kind)
    assert status == 400 and "not a valid rapt.v1.EstimateMemoryRequest" in json.loads(error)["error"]


def test_caches(server):
    shape = {"layers": 1, "kvHeads": 2, "headSize": 8}
    status, cache = ask(server, "/rapt/v1/caches", {"shapes": [shape], "dtype": "FP32"})
    assert status == 200, cache
    q, k, v = (RNG.standard_normal((5, 2, 8)).astype(np.float32) for _ in range(3))
    item = {"cache": cache["id"], "at": 0, "generation": 1}
    status, answer = ask(server, "/rapt/v1/caches/append", {"parts": [item | {"k": tensor(k[:4]), "v": tensor(v[:4])}]})
    assert status == 200 and answer["results"][0]["length"] == "4", answer
    step = {"items": [item | {"at": 4, "rows": 5, "newTokens": 1}], "q": tensor(q), "k": tensor(k[4:]), "v": tensor(v[4:])}
    status, answer = ask(server, "/rapt/v1/caches/attend", step)
    assert status == 200, answer
    scores = np.einsum("qhd,khd->hqk", q.astype(float), k) / 8**0.5
    weights = np.exp(np.where(np.tri(5), scores, -np.inf))
    want = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    assert_close("y", numbers(answer["y"]), want)
    step = {"items": [{"cache": cache["id"], "rows": 5, "generation": 1}], "q": tensor(q)}
    status, report = ask(server, "/rapt/v1/caches/diagnose", step)
    assert status == 200 and report["pairs"] == "50", report

    status, fork = ask(server, "/rapt/v1/caches/fork", {"cache": cache["id"], "generation": 1, "length": 3})
    assert status == 200 and fork["lengths"] == ["3"], fork
    status, cut = ask(server, "/rapt/v1/caches/truncate", {"cache": cache["id"], "generation": 1, "length": 2})
    assert status == 200 and cut["lengths"] == ["2"] and cut["generation"] == "2", cut
    changes = {"forks": [{"cache": fork["id"], "generation": 1}], "closes": [fork["id"], "nobody"]}
    status, done = ask(server, "/rapt/v1/caches/update", changes)
    fork = done["forks"][0]["cache"]
    assert status == 200 and fork["lengths"] == ["3"] and done["closes"][1]["reason"] == "unknown", done
    both = {"caches": [cache["id"], fork["id"]]}
    for method in ("get", "renew", "close"):
        status, found = ask(server, f"/rapt/v1/caches/{method}", both)
        assert status == 200 and [c["id"] for c in found["caches"]] == both["caches"], found
    assert both["caches"][0] not in {c["id"] for c in ask(server, "/rapt/v1/caches")[1]["caches"]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{server.http_address}/rapt/v1/caches/get", json.dumps(both).encode())
    assert (caught.value.code, caught.value.headers["rapt-reason"]) == (404, "closed")


@pytest.mark.parametrize("method", ["fork", "truncate", "update", "get", "append", "attend", "diagnose"])
def test_a_call_on_caches_without_fields_names_what_is_missing(server, method):
    request = urllib.request.Request(f"http://{server.http_address}/rapt/v1/caches/{method}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code == 400 and re.match(r"(cache|caches|forks|parts|items)\b", error), error


# --- KServe ---------------------------------------------------------------------------------------


def test_kserve_example_serves_what_a_router_sends():
    """The arguments of the runtime; requests with the host and the headers that a router in front leaves or adds."""
    runtime, service = yaml.safe_load_all((ROOT / "deploy/kubernetes/kserve-http.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    arguments = [re.sub(r":800\d$", ":0", argument) for argument in container["args"]]
    with RaptServer(*arguments, own_addresses=True) as running:
        address = "127.0.0.1:" + running.http_address.rpartition(":")[2]
        model = service["spec"]["predictor"]["model"]["modelFormat"]["name"]
        headers = {
            "Host": "attention.default.example.com",
            "X-Forwarded-For": "10.0.0.7",
            "X-Forwarded-Proto": "https",
            "X-Request-Id": "7",
            "K-Proxy-Request": "activator",
            "Content-Type": "application/json",
        }

        def send(path, body=None):
            request = urllib.request.Request(f"http://{address}{path}", body, headers)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)

        assert send(container["readinessProbe"]["httpGet"]["path"]) == {"ready": True}
        for path in (f"/v2/models/{model}/ready", "/v2/health/ready"):
            assert send(path) == {"ready": True}
        assert send("/v2/health/live") == {"live": True}
        assert send("/v2")["name"] and send(f"/v2/models/{model}")["name"] == model
        tensor = {"shape": [1, 1, 1, 1], "datatype": "FP32", "data": [3.0]}
        answer = send(f"/v2/models/{model}/infer", json.dumps({"inputs": [{"name": n, **tensor} for n in "QKV"]}).encode())
        assert answer["outputs"][0]["data"] == [3]


# --- The documents --------------------------------------------------------------------------------


def test_the_example_of_the_readme_works_with_another_import_and_port(server):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [code] = [block for block in blocks if "tritonclient.grpc" in block]
    assert "127.0.0.1:8001" in code
    code = code.replace("tritonclient.grpc", "tritonclient.http").replace("127.0.0.1:8001", server.http_address)
    printed = []
    exec(code, {"print": printed.append})  # pylint: disable=exec-used
    assert printed == [(1, 8, 128, 64)]


def examples():
    """The commands of docs/rest.md, each with what it prints."""
    text = (ROOT / "docs" / "rest.md").read_text()
    return re.findall(r"```sh\n(.*?)```\n\n```json\n(.*?)```", text, re.DOTALL)


def test_every_command_is_an_example():
    assert len(examples()) == (ROOT / "docs" / "rest.md").read_text().count("```sh\n") >= 5


@pytest.fixture(scope="module")
def default_server():
    with RaptServer() as running:
        yield running


@pytest.mark.parametrize("command, prints", examples())
def test_an_example_of_the_docs(default_server, command, prints):
    command = command.replace("localhost:8000", default_server.http_address)
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(prints), done.stdout


def test_probes_have_the_same_server(server):
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as page:
        assert 'rapt_requests_total{method="v2/ModelInfer"' in page.read().decode()
