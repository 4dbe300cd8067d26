"""Layers of a model repository: each naming against its definition in float64 and ONNX Runtime's Attention, and the
protocol's methods for repositories."""

import contextlib
import json
import math
import os
import shutil
import threading
import time
import urllib.error
import urllib.request

import make_layers
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from attention_client import to_input
from onnx import TensorProto, helper
from rapt_server import RaptServer
from tritonclient.utils import InferenceServerException

RNG = np.random.default_rng(26)
LAYERS = make_layers.layers()
BATCH, QUERIES, KEYS = 2, 7, 9
# max|got - want| <= t * max|want|
TOLERANCES = {np.float32: 1e-5, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}


# --- The definition -------------------------------------------------------------------------------


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def join(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def rotate(x, theta):
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def rms_norm(x, weight, epsilon=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def t5_bias(table, queries, keys, bidirectional, max_distance):
    bias = np.zeros((table.shape[1], queries, keys))
    for i in range(queries):
        for j in range(keys):
            n, bucket, d = table.shape[0], 0, max(i - j, 0)
            if bidirectional:
                n, d = n // 2, abs(j - i)
                bucket = n if j > i else 0
            m = n // 2
            far = m + int(math.log(max(d, 1) / m) / math.log(max_distance / m) * (n - m)) if d >= m else d
            bias[:, i, j] = table[bucket + min(far, n - 1)]
    return bias


def linear(x, tensors, name):
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def define(name, query, key, value, visible=None):
    """Returns Y and the weights of every head in float64."""
    config, stored = LAYERS[name]
    own = config.get("rapt", {})
    prefix = own.get("prefix", "")
    t = {tensor.removeprefix(prefix): array.astype(np.float64) for tensor, array in stored.items()}
    heads = config.get("num_attention_heads") or config.get("n_head") or config.get("num_heads") or 1
    kv_heads = config.get("num_key_value_heads", heads)
    causal = own.get("is_causal", name.startswith("gpt2"))
    scale, bias, output = None, 0.0, lambda x: x
    if "in_proj_weight" in t:
        if base := own.get("positional_base"):
            encode = lambda x: x + encoding(base, x.shape[1], x.shape[2])  # noqa: E731
            query, key, value = encode(query), encode(key), encode(value)
        w, b = np.split(t["in_proj_weight"], 3), np.split(t.get("in_proj_bias", np.zeros(len(t["in_proj_weight"]))), 3)
        q, k, v = query @ w[0].T + b[0], key @ w[1].T + b[1], value @ w[2].T + b[2]
        output = lambda x: linear(x, t, "out_proj")  # noqa: E731
    elif "c_attn.weight" in t:
        w, b = np.split(t["c_attn.weight"], 3, axis=1), np.split(t["c_attn.bias"], 3)
        q, k, v = query @ w[0] + b[0], key @ w[1] + b[1], value @ w[2] + b[2]
        output = lambda x: x @ t["c_proj.weight"] + t["c_proj.bias"]  # noqa: E731
    elif "self.query.weight" in t:
        q, k, v = linear(query, t, "self.query"), linear(key, t, "self.key"), linear(value, t, "self.value")
        output = lambda x: linear(x, t, "output.dense")  # noqa: E731
    elif "q_proj.weight" in t:
        q, k, v = linear(query, t, "q_proj"), linear(key, t, "k_proj"), linear(value, t, "v_proj")
        output = lambda x: linear(x, t, "o_proj")  # noqa: E731
    elif "q.weight" in t:
        q, k, v = linear(query, t, "q"), linear(key, t, "k"), linear(value, t, "v")
        table, distance = t["relative_attention_bias.weight"], config["relative_attention_max_distance"]
        bias, scale = t5_bias(table, query.shape[1], key.shape[1], not causal, distance), 1.0
        output = lambda x: linear(x, t, "o")  # noqa: E731
    elif "W_q" in t:
        q, k, v = query @ t["W_q"].T, key @ t["W_k"].T, value @ t["W_v"].T
    elif "W1" in t:  # Bahdanau: v . tanh(W1 h + W2 s)
        q, k, v = query @ t["W2"].T, key @ t["W1"].T, value
        scores = (np.tanh(q[:, :, None] + k[:, None]) @ t["v"][0])[:, None]
        return weigh(scores, visible, v[:, None], output)
    elif "v" in t:  # Luong: v . tanh(W [s; h])
        size = query.shape[-1]
        q, k, v = query @ t["W"][:, :size].T, key @ t["W"][:, size:].T, value
        scores = (np.tanh(q[:, :, None] + k[:, None]) @ t["v"])[:, None]
        return weigh(scores, visible, v[:, None], output)
    elif "W" in t:  # Luong: s W h
        q, k, v, scale = query @ t["W"], key, value, 1.0
    else:
        q, k, v, scale = query, key, value, 1.0
    q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    if "q_norm.weight" in t:
        q, k = rms_norm(q, t["q_norm.weight"]), rms_norm(k, t["k_norm.weight"])
    if theta := config.get("rope_theta"):
        q, k = rotate(q, theta), rotate(k, theta)
    k, v = np.repeat(k, heads // kv_heads, 1), np.repeat(v, heads // kv_heads, 1)
    scores = q @ k.transpose(0, 1, 3, 2) * (scale or 1 / math.sqrt(q.shape[-1])) + bias
    if causal:
        below = np.tri(scores.shape[2], scores.shape[3], dtype=bool)
        visible = below if visible is None else visible & below
    return weigh(scores, visible, v, output)


def weigh(scores, visible, v, output):
    weights = softmax(scores if visible is None else np.where(visible, scores, -np.inf))
    return output(join(weights @ v)), weights


def encoding(base, length, size):
    angles = np.arange(length)[:, None] * base ** (-2.0 * np.arange((size + 1) // 2) / size)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, -1)[:, :size]


# --- Calls ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (config, tensors) in LAYERS.items():
        make_layers.write_layer(folder / name, config, tensors)
    return folder


@pytest.fixture(scope="module")
def server(repository):
    with RaptServer(f"--model_repository={repository}") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def infer(client, name, inputs, outputs=("Y",), parameters=None):
    result = client.infer(
        name,
        [to_input(tensor, array) for tensor, array in inputs.items()],
        outputs=[triton.InferRequestedOutput(output) for output in outputs],
        parameters=parameters,
    )
    return [result.as_numpy(output) for output in outputs]


def check(got, want, dtype=np.float32):
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max()
    assert error <= TOLERANCES[dtype] * np.abs(want).max(), f"off by {error}"


def sizes_of(name):
    """The sizes of query, key and value."""
    tensors = LAYERS[name][1]
    state = 16 if name in ("bahdanau", "luong_general", "luong_concat") else 32
    assert any(state in array.shape or 3 * state in array.shape for array in tensors.values()) or not tensors
    return state, 32, 32


def random_inputs(name, queries, keys, dtype=np.float32):
    sizes = sizes_of(name)
    lengths = (queries, keys, keys)
    return {
        tensor: RNG.standard_normal((BATCH, length, size)).astype(dtype)
        for tensor, length, size in zip(("query", "key", "value"), lengths, sizes)
    }


def wide(inputs):
    return {name: array.astype(np.float64) for name, array in inputs.items()}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", list(LAYERS))
def test_a_layer_is_its_definition(client, name, dtype):
    inputs = random_inputs(name, QUERIES, KEYS, dtype)
    want, weights = define(name, **wide(inputs))
    got, got_weights = infer(client, name, inputs, ["Y", "weights"])
    assert got.dtype == dtype
    check(got, want, dtype)
    check(got_weights, weights, dtype)


@pytest.mark.parametrize("name", [name for name in LAYERS if len(set(sizes_of(name))) == 1])
def test_key_and_value_default_to_the_query(client, name):
    query = random_inputs(name, QUERIES, KEYS)["query"]
    want, _ = define(name, *[query.astype(np.float64)] * 3)
    check(infer(client, name, {"query": query})[0], want)


@pytest.mark.parametrize("name", ["torch_block", "t5_block"])
def test_a_call_may_be_causal(client, name):
    inputs = random_inputs(name, KEYS, KEYS)
    config = LAYERS[name][0]
    config["rapt"] = {"is_causal": True}
    want, _ = define(name, **wide(inputs))
    del config["rapt"]
    check(infer(client, name, inputs, parameters={"is_causal": True})[0], want)


def test_averaged_weights(client):
    inputs = random_inputs("torch_block", QUERIES, KEYS)
    want = define("torch_block", **wide(inputs))[1].mean(1)
    check(infer(client, "torch_block", inputs, ["weights"], {"average_attn_weights": True})[0], want)


def test_masks_lengths_and_padding_hide_keys(client):
    inputs = random_inputs("bert_block", QUERIES, KEYS)
    visible = RNG.random((BATCH, 1, QUERIES, KEYS)) < 0.7
    visible[..., 0] = True
    want, _ = define("bert_block", **wide(inputs), visible=visible)
    check(infer(client, "bert_block", inputs | {"attn_mask": visible})[0], want)
    lengths = np.array([KEYS - 2, 3], np.int64)
    visible = (np.arange(KEYS) < lengths[:, None])[:, None, None]
    want, _ = define("bert_block", **wide(inputs), visible=visible)
    check(infer(client, "bert_block", inputs | {"nonpad_kv_seqlen": lengths})[0], want)
    ids = RNG.integers(1, 100, (BATCH, KEYS))
    ids[:, 4:6] = 0
    want, _ = define("bert_block", **wide(inputs), visible=(ids != 0)[:, None, None])
    check(infer(client, "bert_block", inputs | {"input_ids": ids})[0], want)


def test_dropout_is_drawn_by_its_seed(client):
    inputs = random_inputs("torch_block", QUERIES, KEYS)
    draw = lambda seed: infer(  # noqa: E731
        client, "torch_block", inputs, parameters={"dropout_probability": 0.5, "dropout_seed": seed}
    )[0]
    np.testing.assert_array_equal(draw(1), draw(1))
    assert np.abs(draw(1) - draw(2)).max() > 0.01


def attention_of_onnxruntime(x, weights, bias, heads, causal):
    import onnxruntime

    node = helper.make_node(
        "Attention", ["x", "w", "b"], ["y"], domain="com.microsoft", num_heads=heads, unidirectional=int(causal)
    )
    arrays = {"x": x, "w": weights, "b": bias}
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in arrays.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, arrays)[0]


def test_layers_agree_with_onnxruntime(client):
    x = random_inputs("torch_block", QUERIES, KEYS)["query"]
    config, t = LAYERS["torch_block"]
    y = attention_of_onnxruntime(x, t["in_proj_weight"].T.copy(), t["in_proj_bias"], 4, causal=False)
    want = y @ t["out_proj.weight"].T + t["out_proj.bias"]
    check(infer(client, "torch_block", {"query": x})[0], want)
    config, t = LAYERS["gpt2_block"]
    y = attention_of_onnxruntime(x, t["h.0.attn.c_attn.weight"], t["h.0.attn.c_attn.bias"], 4, causal=True)
    want = y @ t["h.0.attn.c_proj.weight"] + t["h.0.attn.c_proj.bias"]
    check(infer(client, "gpt2_block", {"query": x})[0], want)


def test_http_and_grpc_agree_to_the_bit(client, server):
    inputs = random_inputs("llama_block", QUERIES, KEYS)
    want = infer(client, "llama_block", inputs)[0]
    with triton_http.InferenceServerClient(server.http_address) as http:
        tensors = [triton_http.InferInput(name, list(array.shape), "FP32") for name, array in inputs.items()]
        for tensor, array in zip(tensors, inputs.values()):
            tensor.set_data_from_numpy(array)
        np.testing.assert_array_equal(http.infer("llama_block", tensors).as_numpy("Y"), want)
        assert http.get_model_metadata("llama_block")["inputs"][0] == {
            "name": "query",
            "datatype": "FP32",
            "shape": [-1, -1, 32],
        }


# --- The protocol ---------------------------------------------------------------------------------


def test_layers_are_listed_described_and_counted(client, server):
    index = client.get_model_repository_index(as_json=True)["models"]
    assert {model["name"] for model in index} > set(LAYERS) | {"attention"}
    assert all(model["state"] == "READY" for model in index)
    assert client.is_model_ready("bert_block")
    inputs = client.get_model_metadata("bert_block", as_json=True)["inputs"]
    assert [tensor["name"] for tensor in inputs] == [
        "query",
        "key",
        "value",
        "attn_mask",
        "nonpad_kv_seqlen",
        "input_ids",
    ]
    outputs = client.get_model_metadata("plain_block", as_json=True)["outputs"]
    assert outputs[0] == {"name": "Y", "datatype": "FP32", "shape": ["-1", "-1", "28"]}
    config = client.get_model_config("torch_block", as_json=True)["config"]
    assert [tensor["name"] for tensor in config["input"] if not tensor.get("optional")] == ["query"]
    for name, is_causal in (("torch_block", "false"), ("gpt2_block", "true")):
        config = client.get_model_config(name, as_json=True)["config"]
        assert config["parameters"]["is_causal"] == {"string_value": is_causal}
    before = counted(client, "luong_dot")
    infer(client, "luong_dot", random_inputs("luong_dot", 2, 2))
    assert counted(client, "luong_dot") == before + 1
    assert server.read_gauge('rapt_model_requests_total{model="luong_dot"}') == before + 1


def counted(client, name):
    (statistics,) = client.get_inference_statistics(name, as_json=True)["model_stats"]
    return int(statistics["inference_stats"]["success"].get("count", 0))


@pytest.mark.parametrize(
    ("inputs", "parameters", "outputs", "message"),
    [
        ({"query": (1, 2, 31)}, {}, ["Y"], "query"),
        ({"query": (1, 2, 32), "key": (1, 2, 3)}, {}, ["Y"], "key"),
        ({"query": (1, 2, 32), "input_ids": (1, 2)}, {}, ["Y"], "input_ids"),
        ({"query": (1, 2, 32)}, {"softcap": 1.0}, ["Y"], "unknown request parameter softcap"),
        ({"query": (1, 2, 32)}, {"is_causal": 2}, ["Y"], "is_causal"),
        ({"query": (1, 2, 32)}, {}, ["lse"], "unknown output lse; the outputs are Y, weights"),
        ({"key": (1, 2, 32)}, {}, ["Y"], "query"),
    ],
)
def test_errors_name_the_field(client, inputs, parameters, outputs, message):
    arrays = {name: np.zeros(shape, np.int64 if name == "input_ids" else np.float32) for name, shape in inputs.items()}
    with pytest.raises(InferenceServerException, match=message) as error:
        infer(client, "torch_block", arrays, outputs, parameters)
    assert "INVALID_ARGUMENT" in error.value.status()


# --- Loading --------------------------------------------------------------------------------------


def constant_layer(value, size=64, factor=1):
    """A layer whose every output is `value`, the bias of V, times `factor`, of the output projection."""
    zeros = np.zeros((size, size), np.float32)
    return (
        {"num_attention_heads": 2},
        {
            "in_proj_weight": np.zeros((3 * size, size), np.float32),
            "in_proj_bias": np.concatenate([np.zeros(2 * size, np.float32), np.full(size, value, np.float32)]),
            "out_proj.weight": zeros + factor * np.eye(size, dtype=np.float32),
        },
    )


@contextlib.contextmanager
def serving(folder, *flags):
    with RaptServer(f"--model_repository={folder}", *flags) as running:
        with triton.InferenceServerClient(running.grpc_address) as connected:
            yield running, connected


def test_load_unload_and_replace(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(1))
    x = {"query": np.ones((1, 3, 64), np.float32)}
    with serving(tmp_path) as (server, client):
        held = server.read_gauge("rapt_model_weights_bytes")
        assert held > 4 * 64 * 64 * 4
        make_layers.write_layer(tmp_path / "b", *constant_layer(2))
        assert not client.is_model_ready("b")
        client.load_model("b")
        np.testing.assert_array_equal(infer(client, "b", x)[0], np.full((1, 3, 64), 2.0))
        assert server.read_gauge("rapt_model_weights_bytes") == 2 * held
        make_layers.write_layer(tmp_path / "b", *constant_layer(3))
        client.load_model("b")
        np.testing.assert_array_equal(infer(client, "b", x)[0], np.full((1, 3, 64), 3.0))
        assert server.read_gauge("rapt_model_weights_bytes") == 2 * held
        client.unload_model("b")
        assert server.read_gauge("rapt_model_weights_bytes") == held
        assert server.read_gauge('rapt_memory_reserved_bytes{kind="compute"}') == held
        with pytest.raises(InferenceServerException, match="unknown model 'b'"):
            infer(client, "b", x)
        (entry,) = [model for model in client.get_model_repository_index(as_json=True)["models"] if model["name"] == "b"]
        assert entry["state"] == "UNAVAILABLE" and entry["reason"] == "unloaded"


def test_a_model_that_can_not_be_loaded_again_keeps_serving(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(1))
    x = {"query": np.ones((1, 3, 64), np.float32)}
    with serving(tmp_path) as (_, client):
        config, tensors = constant_layer(2)
        del tensors["out_proj.weight"]
        make_layers.write_layer(tmp_path / "a", config, tensors)
        with pytest.raises(InferenceServerException, match="model 'a': .*out_proj.weight is missing"):
            client.load_model("a")
        np.testing.assert_array_equal(infer(client, "a", x)[0], np.full((1, 3, 64), 1.0))


def test_replacing_under_load_gives_no_wrong_answer(tmp_path):
    # Each version has a prime in both projections: a product of different primes mixes two versions.
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]
    make_layers.write_layer(tmp_path / "a", *constant_layer(primes[0], factor=primes[0]))
    x = {"query": np.ones((1, 200, 64), np.float32)}
    stop, wrong, calls = threading.Event(), [], [0]

    def call(address):
        with triton.InferenceServerClient(address) as client:
            while not stop.is_set():
                y = infer(client, "a", x)[0]
                calls[0] += 1
                if not (y == y.flat[0]).all() or y.flat[0] not in {prime**2 for prime in primes}:
                    wrong.append(y)

    with serving(tmp_path) as (server, client):
        held = server.read_gauge("rapt_model_weights_bytes")
        threads = [threading.Thread(target=call, args=(server.grpc_address,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for prime in primes[1:]:
            make_layers.write_layer(tmp_path / "a", *constant_layer(prime, factor=prime))
            client.load_model("a")
            assert infer(client, "a", x)[0].flat[0] == prime**2
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong and calls[0] > 0
        assert server.read_gauge("rapt_model_weights_bytes") == held


def test_writing_into_a_file_beside_loads_leaves_the_server_alone(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(3, size=1024, factor=3))
    file = tmp_path / "a/model.safetensors"
    content = file.read_bytes()
    stop, loads = threading.Event(), {"whole": 0, "refused": 0}

    def overwrite():
        while not stop.is_set():
            file.write_bytes(content)
            time.sleep(0.002)  # loads begin to read it
            os.truncate(file, 4096)  # as cp, which then writes
            time.sleep(0.002)

    with serving(tmp_path) as (_, client):
        writer = threading.Thread(target=overwrite)
        writer.start()
        for _ in range(50):
            try:
                client.load_model("a")
                loads["whole"] += 1
            except InferenceServerException:
                loads["refused"] += 1
            y = infer(client, "a", {"query": np.ones((1, 2, 1024), np.float32)})[0]
            np.testing.assert_array_equal(y, np.full((1, 2, 1024), 9.0))
        stop.set()
        writer.join()
        assert loads["refused"] > 0
        file.write_bytes(content)
        client.load_model("a")


def post(server, path):
    request = urllib.request.Request(f"http://{server.http_address}{path}", b"{}", method="POST")
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_rest_loads_and_unloads(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(1))
    with serving(tmp_path) as (server, client):
        assert post(server, "/v2/repository/models/a/unload") == (200, {})
        assert not client.is_model_ready("a")
        assert post(server, "/v2/repository/models/a/load") == (200, {})
        assert client.is_model_ready("a")
        status, body = post(server, "/v2/repository/models/absent/load")
        assert status == 404 and body["error"] == "model 'absent': the folder 'absent' does not exist"
        status, body = post(server, "/v2/repository/models/attention/unload")
        assert status == 400 and "built in" in body["error"]
        status, body = post(server, "/v2/repository/models/..%2Fa/load")
        assert status == 400 and "a name consists of" in body["error"]


def test_without_a_repository_loading_is_unimplemented():
    with RaptServer() as server, triton.InferenceServerClient(server.grpc_address) as client:
        with pytest.raises(InferenceServerException, match="needs --model_repository"):
            client.load_model("a")


def start_fails(folder, *flags):
    with pytest.raises(AssertionError) as error:
        with RaptServer(f"--model_repository={folder}", *flags):
            pass
    return str(error.value)


def test_the_start_fails_by_name(tmp_path):
    config, tensors = constant_layer(1)
    misshapen = tensors | {"out_proj.weight": np.zeros((64, 63), np.float32)}
    for name, broken, message in [
        ("missing", {k: v for k, v in tensors.items() if k != "in_proj_weight"}, "no naming fits"),
        ("misshapen", misshapen, "out_proj.weight has shape"),
        ("ambiguous", tensors | {"q.weight": np.zeros((1, 1), np.float32)}, "fit torch and t5"),
    ]:
        make_layers.write_layer(tmp_path / name / name, config, broken)
        log = start_fails(tmp_path / name)
        assert f"model '{name}'" in log and message in log
    make_layers.write_layer(tmp_path / "taken/attention", config, tensors)
    assert "model 'attention' is built in" in start_fails(tmp_path / "taken")
    make_layers.write_layer(tmp_path / "reserved/others", config, tensors)
    assert "model 'others' is built in or reserved" in start_fails(tmp_path / "reserved")
    make_layers.write_layer(tmp_path / "half/folder", config, tensors)
    (tmp_path / "half/folder/config.json").unlink()
    assert "model 'folder': config.json" in start_fails(tmp_path / "half")
    assert "--model_repository can't be read" in start_fails(tmp_path / "absent")


def test_folders_that_are_no_models_are_left_alone(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(1))
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "README").write_text("")
    with serving(tmp_path) as (server, client):
        loaded = {model["name"] for model in client.get_model_repository_index(as_json=True)["models"]}
        assert "a" in loaded and not loaded & {"lost+found", "loop", "README"}


def test_a_folder_that_can_not_be_read_leaves_the_server_alone(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(1))
    make_layers.write_layer(tmp_path / "b", *constant_layer(2))
    with serving(tmp_path) as (_, client):
        client.unload_model("b")
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "b").symlink_to("b")
        client.load_model("a")
        index = {model["name"]: model for model in client.get_model_repository_index(as_json=True)["models"]}
        assert index["b"]["reason"] == "unloaded"
        (tmp_path / "b").unlink()
        client.load_model("a")
        index = {model["name"] for model in client.get_model_repository_index(as_json=True)["models"]}
        assert "a" in index and "b" not in index


def save_shards(folder, config, shards):
    """Each shard is a dictionary of tensors."""
    folder.mkdir(parents=True)
    weight_map = {}
    for n, tensors in enumerate(shards, 1):
        shard = f"model-{n:05}-of-{len(shards):05}.safetensors"
        make_layers.save_tensors(folder / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def test_shards_are_one_model(tmp_path):
    config, tensors = LAYERS["bert_block"]
    names = sorted(tensors)
    save_shards(tmp_path / "a", config, [{name: tensors[name] for name in names[i::2]} for i in range(2)])
    inputs = random_inputs("bert_block", QUERIES, KEYS)
    want, _ = define("bert_block", **wide(inputs))
    with serving(tmp_path) as (_, client):
        check(infer(client, "a", inputs)[0], want)
        (tmp_path / "a/model-00002-of-00002.safetensors").unlink()
        with pytest.raises(InferenceServerException, match="model-00002-of-00002.safetensors: the file does not exist"):
            client.load_model("a")


def test_blocks_of_t5_use_the_table_of_the_first(tmp_path):
    """As T5 does: each stack has a table in its first block, and cross-attention has none."""
    config, block = LAYERS["t5_block"]
    table = block["relative_attention_bias.weight"]
    rest = {name: tensor for name, tensor in block.items() if tensor is not table}
    stacks = {"encoder": ("0.SelfAttention.", table), "decoder": ("0.SelfAttention.", 2 * table)}
    tensors = {}
    for stack, (layer, biases) in stacks.items():
        tensors[f"{stack}.block.0.layer.{layer}relative_attention_bias.weight"] = biases
        for n in range(2):
            tensors |= {f"{stack}.block.{n}.layer.{layer}{name}": tensor for name, tensor in rest.items()}
    cross = "decoder.block.1.layer.1.EncDecAttention."
    tensors |= {cross + name: tensor for name, tensor in rest.items()}
    prefixes = {f"{stack}{n}": f"{stack}.block.{n}.layer.{layer}" for stack, (layer, _) in stacks.items() for n in range(2)}
    for name, prefix in (prefixes | {"cross": cross}).items():
        settings = config | {"model_type": "t5", "rapt": {"prefix": prefix}}
        make_layers.write_layer(tmp_path / name, settings, tensors)
    inputs = random_inputs("t5_block", KEYS, KEYS)
    with serving(tmp_path) as (_, client):
        for name in (*prefixes, "cross"):
            bias = {"e": 1, "d": 2, "c": 0}[name[0]] * table
            own = config | {"rapt": {"is_causal": name.startswith("decoder")}}
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(LAYERS, "t5_block", (own, rest | {"relative_attention_bias.weight": bias}))
                want, _ = define("t5_block", **wide(inputs))
            check(infer(client, name, inputs)[0], want)


def test_llama_without_settings_is_causal_and_rotated(tmp_path):
    config, tensors = LAYERS["llama_block"]
    settings = {name: config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    settings |= {"model_type": "qwen3", "rapt": {"prefix": config["rapt"]["prefix"]}}
    make_layers.write_layer(tmp_path / "a", settings, tensors)
    inputs = random_inputs("llama_block", KEYS, KEYS)
    want, _ = define("llama_block", **wide(inputs))
    with serving(tmp_path) as (_, client):
        check(infer(client, "a", inputs)[0], want)


def test_pipes_are_no_files(tmp_path):
    make_layers.write_layer(tmp_path / "a", *constant_layer(1))
    with serving(tmp_path) as (_, client):
        (tmp_path / "a/model.safetensors").unlink()
        os.mkfifo(tmp_path / "a/model.safetensors")
        with pytest.raises(InferenceServerException, match="model.safetensors: .* not a regular file"):
            client.load_model("a")


def test_weights_that_do_not_fit_are_refused_with_needed_and_allowed_bytes(tmp_path):
    make_layers.write_layer(tmp_path / "large", *constant_layer(1, size=512))
    log = start_fails(tmp_path, "--memory_budget_bytes=8388608")
    assert "model 'large': the weights need" in log and "of the memory budget of 8388608" in log


# --- Memory ---------------------------------------------------------------------------------------


def estimate(server, **request):
    body = json.dumps(request).encode()
    page = urllib.request.Request(f"http://{server.http_address}/rapt/v1/estimate-memory", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(page) as answer:
        return json.load(answer)["estimates"]


def test_estimates_are_what_the_server_charges(tmp_path):
    embed, budget = 96, 4 << 20
    (config, tensors) = make_layers.layers(embed=embed)["llama_block"]
    make_layers.write_layer(tmp_path / "a", config, tensors)
    with serving(tmp_path, f"--memory_budget_bytes={budget}") as (server, client):
        few, many = estimate(server, model="a", batch=2, lengths=[5, 1500], dtype="FP16")
        weights = int(few["layer"]["weightBytes"])
        assert weights == server.read_gauge("rapt_model_weights_bytes") > 0
        assert int(few["tensorBytes"]) == 2 * 5 * embed * 2 * 2  # query and Y
        assert few["plan"].startswith("cpu/")
        # Of a call that is too large, the server says what it needs.
        with pytest.raises(InferenceServerException) as error:
            infer(client, "a", {"query": np.zeros((2, 1500, embed), np.float16)})
        assert "RESOURCE_EXHAUSTED" in error.value.status()
        assert f" needs {many['layer']['chargedBytes']} bytes" in error.value.message()
        assert int(many["layer"]["chargedBytes"]) >= int(many["fusedBytes"]) + 2 * 1500 * embed * 2
        (usual,) = estimate(server, model="a", batch=1, lengths=[5])
        assert int(usual["tensorBytes"]) == 5 * embed * 4 * 2  # the type of the weights


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"model": "b", "batch": 1, "lengths": [5]}, "model is 'b'; the server has no layer of this name"),
        ({"model": "torch_block", "batch": 1, "lengths": [5], "headSize": 8}, "head_size is set, and so is model"),
        ({"model": "torch_block", "batch": 1, "lengths": [5], "alibi": True}, "alibi is set, and so is model"),
        ({"model": "torch_block", "lengths": [5]}, "batch is 0"),
        ({"model": "torch_block", "batch": 1}, "lengths has 0 entries"),
        ({"model": "torch_block", "batch": 1, "lengths": [5], "dtype": "INT64"}, "dtype is INT64"),
        ({"model": "torch_block", "batch": 1 << 40, "lengths": [5, 1 << 40]}, "batch is 1099511627776 and lengths has 5; "),
        ({"model": "torch_block", "batch": 1 << 20, "lengths": [1 << 20]}, "batch is 1048576 and lengths has 1048576; "),
    ],
)
def test_estimates_name_the_field(server, request_, message):
    with pytest.raises(urllib.error.HTTPError) as error:
        estimate(server, **request_)
    assert message in error.value.read().decode()


def test_an_estimate_has_the_type_of_the_weights(tmp_path):
    config, tensors = LAYERS["torch_block"]
    make_layers.write_layer(tmp_path / "wide", config, {name: tensor.astype(np.float64) for name, tensor in tensors.items()})
    with serving(tmp_path) as (server, _):
        with pytest.raises(urllib.error.HTTPError) as error:
            estimate(server, model="wide", batch=1, lengths=[5], dtype="FP32")
        assert "dtype is FP32; it must be FP64, because the layer has weights of FP64" in error.value.read().decode()
        (wide,) = estimate(server, model="wide", batch=1, lengths=[5])
        assert int(wide["tensorBytes"]) == 5 * 32 * 8 * 2
