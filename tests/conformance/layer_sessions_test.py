"""Sequences of layers through Triton's own clients: prefill and decode of a causal layer whose keys and values stay with the
server, against one call for all tokens and the definition in float64."""

import hashlib
import itertools
import queue
import subprocess
import threading

import make_layers
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from attention_client import to_input
from layers_test import LAYERS, define
from rapt_server import RaptServer
from tritonclient.utils import InferenceServerException

RNG = np.random.default_rng(27)
EMBED = 32
TOLERANCES = {np.float32: 1e-5, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2, np.float64: 1e-12}
NEEDS_START = "inference request for sequence {} to model '{}' must specify the START flag on the first request"
IDS = itertools.count(1)
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 8.0, "original_max_position_embeddings": 64}


def causal(config):
    return config | {"rapt": config.get("rapt", {}) | {"is_causal": True}}


def repository_of(folder):
    """Returns the names of the layers that can keep their keys and values."""
    llama, tensors = LAYERS["llama_block"]
    sinks = RNG.standard_normal(llama["num_attention_heads"]).astype(np.float32)
    layers = {
        "llama": (llama, tensors),
        "sinks": (llama | {"partial_rotary_factor": 0.5}, tensors | {llama["rapt"]["prefix"] + "sinks": sinks}),
        "window": (llama | {"sliding_window": 7, "rope_scaling": YARN}, tensors),
        "gpt2": LAYERS["gpt2_block"],
        "t5": (causal(LAYERS["t5_block"][0]), LAYERS["t5_block"][1]),
        "positions": LAYERS["positions"],
        "luong": (causal(LAYERS["luong_dot"][0]), {}),
    }
    others = {name: LAYERS[name] for name in ("bert_block", "bahdanau", "luong_general")}
    bias = RNG.standard_normal((1, 1, EMBED)).astype(np.float32)
    config, tensors = LAYERS["torch_block"]
    others["torch_extra"] = (causal(config), tensors | {"bias_k": bias, "bias_v": bias})
    for name, layer in (layers | others).items():
        make_layers.write_layer(folder / name, *layer)
    return list(layers)


NAMES = ("llama", "sinks", "window", "gpt2", "t5", "positions", "luong")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    assert repository_of(folder) == list(NAMES)
    flags = (f"--model_repository={folder}", "--kv_cache_bytes=67108864", "--kv_default_lease=90s")
    with RaptServer(*flags) as running:
        yield running
        assert running.live_caches() == 0, "a test leaves a sequence"


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def infer(client, name, x, outputs=("Y",), **options):
    protocol = triton_http if isinstance(client, triton_http.InferenceServerClient) else triton
    inputs = [to_input("query", x, protocol)]
    result = client.infer(name, inputs, outputs=[protocol.InferRequestedOutput(o) for o in outputs], **options)
    return result.as_numpy("Y")


def run_steps(client, name, x, lengths, **parameters):
    """Sends the tokens of x in calls of these lengths, the last of which ends the sequence; returns their answers as one."""
    id, begin, answers = next(IDS), 0, []
    for n, length in enumerate(lengths):
        flags = {"sequence_start": n == 0, "sequence_end": n == len(lengths) - 1}
        more = {"parameters": parameters} if parameters and n == 0 else {}
        answers.append(infer(client, name, x[:, begin : begin + length], sequence_id=id, **flags, **more))
        begin += length
    assert begin == x.shape[1]
    return np.concatenate(answers, axis=1)


def tokens(count, dtype=np.float32):
    return RNG.standard_normal((1, count, EMBED)).astype(dtype)


def check(got, want, dtype=np.float32):
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    limit = TOLERANCES[dtype] * np.abs(want.astype(np.float64)).max()
    assert error <= limit, f"off by {error}, at most {limit}"


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_are_one_call(client, name, dtype):
    x = tokens(80, dtype)
    whole = infer(client, name, x)
    for lengths in ([70, *[1] * 10], [1] * 80, [3, 61, 1, 15]):
        got = run_steps(client, name, x, lengths)
        assert got.dtype == dtype
        check(got, whole, dtype)


@pytest.mark.parametrize(
    ("name", "definition"),
    [("llama", "llama_block"), ("gpt2", "gpt2_block"), ("t5", "t5_block"), ("positions", "positions"), ("luong", "luong_dot")],
)
def test_steps_are_the_definition(client, name, definition, monkeypatch):
    config, tensors = LAYERS[definition]
    monkeypatch.setitem(LAYERS, definition, (causal(config), tensors))
    x = tokens(20)
    want, _ = define(definition, *[x.astype(np.float64)] * 3)
    check(run_steps(client, name, x, [12, *[1] * 8]), want)


def test_long_sequences(client):
    x = tokens(2100)
    for name in ("llama", "t5"):
        check(run_steps(client, name, x, [1500, 590, *[1] * 10]), infer(client, name, x))


def test_http_and_grpc_agree_to_the_bit(server, client):
    x = tokens(9)
    with triton_http.InferenceServerClient(server.http_address) as http:
        for name in NAMES:
            lengths = [6, 1, 1, 1]
            np.testing.assert_array_equal(run_steps(http, name, x, lengths), run_steps(client, name, x, lengths))


def test_stores_8_bits(client):
    x = tokens(70)
    whole, got = infer(client, "llama", x), run_steps(client, "llama", x, [64, *[1] * 6], storage="int8")
    error = np.abs(got - whole).max()
    assert 1e-5 < error < 0.02 * np.abs(whole).max()


def test_a_call_may_be_causal_where_the_layer_is_not(client):
    x, id = tokens(8), next(IDS)
    options = {"sequence_id": id, "parameters": {"is_causal": True}}
    first = infer(client, "bert_block", x[:, :5], sequence_start=True, **options)
    last = infer(client, "bert_block", x[:, 5:], sequence_end=True, **options)
    check(np.concatenate([first, last], 1), infer(client, "bert_block", x, parameters={"is_causal": True}))


# --- Sequences ------------------------------------------------------------------------------------


def test_each_model_has_ids_of_its_own(server, client):
    x, id = tokens(3), next(IDS)
    for name in ("llama", "gpt2"):
        infer(client, name, x[:, :2], sequence_id=id, sequence_start=True)
    assert server.live_caches() == 2
    for name in ("gpt2", "llama"):
        last = infer(client, name, x[:, 2:], sequence_id=id, sequence_end=True)
        check(last, infer(client, name, x)[:, 2:])
    assert server.live_caches() == 0
    with pytest.raises(InferenceServerException) as error:
        infer(client, "llama", x, sequence_id=id)
    assert NEEDS_START.format(id, "llama") in error.value.message()


def test_position_makes_a_call_repeatable(client):
    x, id = tokens(7), "again"
    infer(client, "llama", x[:, :4], sequence_id=id, sequence_start=True)
    step = infer(client, "llama", x[:, 4:5], sequence_id=id, parameters={"position": 4})
    infer(client, "llama", x[:, 5:6], sequence_id=id)
    again = infer(client, "llama", x[:, 4:5], sequence_id=id, parameters={"position": 4})
    np.testing.assert_array_equal(again, step)
    refuse(client, "ABORTED", "the layer has other tokens from 4 to 5", x[:, 6:7], sequence_id=id, parameters={"position": 4})
    refuse(client, "OUT_OF_RANGE", "parameter position is 9", x[:, 6:7], sequence_id=id, parameters={"position": 9})
    check(infer(client, "llama", x[:, 6:], sequence_id=id, sequence_end=True), infer(client, "llama", x)[:, 6:])


def test_a_window_frees_what_it_hides(server, client):
    x, used = tokens(4096), {}
    for name in ("llama", "window"):
        before, id = server.read_gauge("rapt_kv_used_bytes"), f"{name} to the end"
        for begin in range(0, 4096, 512):
            step = infer(client, name, x[:, begin : begin + 512], sequence_id=id, sequence_start=begin == 0)
        used[name] = server.read_gauge("rapt_kv_used_bytes") - before
        check(step, infer(client, name, x)[:, -512:])
        again = infer(client, name, x[:, -512:], sequence_id=id, parameters={"position": 4096 - 512})
        np.testing.assert_array_equal(again, step)
    assert used["window"] < used["llama"] / 4
    options = {"sequence_id": "window to the end", "parameters": {"position": 512}}
    refuse(client, "FAILED_PRECONDITION", "evicted", x[:, 512:1024], "window", **options)
    for name in ("llama", "window"):
        client.infer(name, [], sequence_id=f"{name} to the end", sequence_end=True)


def test_an_end_may_come_alone(server, client):
    infer(client, "gpt2", tokens(2), sequence_id=77, sequence_start=True)
    answer = client.infer("gpt2", [], sequence_id=77, sequence_end=True)
    assert list(answer.get_response().outputs) == []
    assert server.live_caches() == 0


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"storage": "int8"}, "parameter storage is int8; it is allowed with sequence_start only"),
        ({"position": 2}, "parameter position is 2; it is allowed with inputs only"),
        ({"position": -7}, "parameter position is -7; it is allowed with inputs only"),
        ({"is_causal": False}, "is_causal is false"),
        ({"dropout_probability": 7.0}, "dropout_probability is 7"),
        ({"dropout_probability": 0.5}, "dropout_probability is given"),
    ],
)
def test_an_end_alone_has_no_other_parameters(client, parameters, text):
    id = next(IDS)
    infer(client, "gpt2", tokens(2), sequence_id=id, sequence_start=True)
    with pytest.raises(InferenceServerException) as error:
        client.infer("gpt2", [], sequence_id=id, sequence_end=True, parameters=parameters)
    assert "INVALID_ARGUMENT" in error.value.status()
    assert text in error.value.message()
    client.infer("gpt2", [], sequence_id=id, sequence_end=True, parameters={"is_causal": True})


def test_streams(server):
    x, answers = tokens(6), queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for n in range(6):
            flags = {"sequence_start": n == 0, "sequence_end": n == 5}
            client.async_stream_infer("t5", [to_input("query", x[:, n : n + 1])], sequence_id=9, **flags)
        got = []
        for _ in range(6):
            result, error = answers.get(timeout=60)
            assert error is None, error
            got.append(result.as_numpy("Y"))
        client.stop_stream()
        check(np.concatenate(got, 1), infer(client, "t5", x))


def test_sequences_are_counted_and_described(server, client):
    before = server.read_gauge('rapt_model_requests_total{model="gpt2"}')
    run_steps(client, "gpt2", tokens(3), [1, 1, 1])
    assert server.read_gauge('rapt_model_requests_total{model="gpt2"}') == before + 3
    config = client.get_model_config("gpt2", as_json=True)["config"]
    assert config["sequence_batching"]["max_sequence_idle_microseconds"] == "90000000"
    for name in ("bert_block", "bahdanau", "torch_extra"):
        assert "sequence_batching" not in client.get_model_config(name, as_json=True)["config"]


# --- Errors ---------------------------------------------------------------------------------------


def refuse(client, code, text, x, name="llama", **options):
    with pytest.raises(InferenceServerException) as error:
        infer(client, name, x, **options)
    assert code in error.value.status(), error.value
    assert text in error.value.message()


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("bert_block", "is_causal is false", {}),
        ("torch_extra", "the layer has bias_k", {}),
        ("bahdanau", "the layer has additive scores", {}),
        ("luong_general", "the layer has key_embed_size 32", {}),
        ("llama", "output weights is requested", {"outputs": ["Y", "weights"]}),
        ("llama", "dropout_probability is given", {"parameters": {"dropout_probability": 0.5}}),
        ("llama", "parameter storage is 'int4'", {"parameters": {"storage": "int4"}}),
        ("llama", "unknown request parameter layers", {"parameters": {"layers": 2}}),
    ],
)
def test_what_can_not_stay_is_refused_by_name(server, client, name, text, options):
    x = tokens(2)[..., : 16 if name in ("bahdanau", "luong_general") else EMBED]
    refuse(client, "INVALID_ARGUMENT", text, x, name, sequence_id=5, sequence_start=True, **options)
    assert server.live_caches() == 0


@pytest.mark.parametrize("tensor", ["key", "value", "attn_mask", "nonpad_kv_seqlen", "input_ids"])
def test_inputs_that_can_not_stay_are_refused_by_name(client, tensor):
    arrays = {
        "key": tokens(2),
        "value": tokens(2),
        "attn_mask": np.ones((2, 2), bool),
        "nonpad_kv_seqlen": np.array([2]),
        "input_ids": np.array([[1, 2]]),
    }
    inputs = [to_input("query", tokens(2)), to_input(tensor, arrays[tensor])]
    options = {"sequence_id": 5, "sequence_start": True, "parameters": {"is_causal": True}}
    with pytest.raises(InferenceServerException, match=f"{tensor} is given") as error:
        client.infer("bert_block", inputs, **options)
    assert "INVALID_ARGUMENT" in error.value.status()


def test_wrong_steps_leave_the_sequence(client):
    x, id = tokens(4), next(IDS)
    refuse(client, "INVALID_ARGUMENT", "must specify a non-zero or non-empty correlation ID", x, sequence_start=True, parameters={"position": 0})
    infer(client, "llama", x[:, :3], sequence_id=id, sequence_start=True)
    text = "query has shape [2, 1, 32]; with a cache it must be [1, Sq, 32]"
    refuse(client, "INVALID_ARGUMENT", text, np.repeat(x[:, 3:], 2, 0), sequence_id=id)
    refuse(client, "INVALID_ARGUMENT", "input query is FP16; the caches hold FP32", x[:, 3:].astype(np.float16), sequence_id=id)
    refuse(client, "INVALID_ARGUMENT", "parameter storage is int8", x[:, 3:], sequence_id=id, parameters={"storage": "int8"})
    with pytest.raises(InferenceServerException, match="query is missing"):
        client.infer("llama", [], sequence_id=id)
    check(infer(client, "llama", x[:, 3:], sequence_id=id, sequence_end=True), infer(client, "llama", x)[:, 3:])


def test_pages_run_out(tmp_path):
    repository_of(tmp_path)
    flags = (f"--model_repository={tmp_path}", "--kv_cache_bytes=4194304")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        x = tokens(4096)
        whole = infer(client, "gpt2", x)
        infer(client, "gpt2", x[:, :64], sequence_id=1, sequence_start=True)
        infer(client, "gpt2", x, sequence_id=2, sequence_start=True)
        refuse(client, "RESOURCE_EXHAUSTED", "", x, "gpt2", sequence_id=3, sequence_start=True)
        assert server.live_caches() == 2
        check(infer(client, "gpt2", x[:, 64:128], sequence_id=1), whole[:, 64:128])
        client.infer("gpt2", [], sequence_id=2, sequence_end=True)
        check(infer(client, "gpt2", x[:, 128:], sequence_id=1, sequence_end=True), whole[:, 128:])
        assert server.read_gauge("rapt_kv_used_bytes") == 0


def test_sequences_end_with_their_lease(tmp_path):
    repository_of(tmp_path)
    flags = (f"--model_repository={tmp_path}", "--kv_cache_bytes=67108864", "--kv_default_lease=1s")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        infer(client, "llama", tokens(2), sequence_id=4, sequence_start=True)
        server.await_no_caches()
        refuse(client, "INVALID_ARGUMENT", NEEDS_START.format(4, "llama"), tokens(1), sequence_id=4)


def test_unloading_and_replacing_end_the_sequences_of_a_layer(tmp_path):
    repository_of(tmp_path)
    flags = (f"--model_repository={tmp_path}", "--kv_cache_bytes=67108864")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        x = tokens(4)
        for name, id in (("llama", 1), ("llama", "two"), ("gpt2", 1)):
            infer(client, name, x[:, :3], sequence_id=id, sequence_start=True)
        client.load_model("llama")
        assert server.live_caches() == 1
        refuse(client, "INVALID_ARGUMENT", NEEDS_START.format(1, "llama"), x[:, 3:], sequence_id=1)
        check(infer(client, "gpt2", x[:, 3:], "Y", sequence_id=1), infer(client, "gpt2", x)[:, 3:])
        infer(client, "llama", x, sequence_id=1, sequence_start=True)
        client.unload_model("llama")
        assert server.live_caches() == 1
        refuse(client, "NOT_FOUND", "unknown model 'llama'", x[:, 3:], sequence_id=1)
        client.load_model("llama")
        refuse(client, "INVALID_ARGUMENT", NEEDS_START.format(1, "llama"), x[:, 3:], sequence_id=1)
        client.infer("gpt2", [], sequence_id=1, sequence_end=True)
        assert server.live_caches() == 0


def test_no_sequence_outlives_its_layer(tmp_path):
    """Whichever of the two is first, the start of a sequence or the end of its layer."""
    repository_of(tmp_path)
    flags = (f"--model_repository={tmp_path}", "--kv_cache_bytes=67108864")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        x, stops, wrong = tokens(1), threading.Event(), []

        def start(thread):
            with triton.InferenceServerClient(server.grpc_address) as own:
                for n in itertools.count():
                    if stops.is_set():
                        return
                    try:
                        infer(own, "luong", x, sequence_id=f"{thread}-{n}", sequence_start=True)
                    except InferenceServerException as error:
                        if "unknown model 'luong'" not in error.message():
                            wrong.append(error)

        threads = [threading.Thread(target=start, args=(n,)) for n in range(10)]
        for thread in threads:
            thread.start()
        for n in range(300):
            client.load_model("luong")
            if n % 4 == 0:
                client.unload_model("luong")
        stops.set()
        for thread in threads:
            thread.join()
        client.unload_model("luong")
        assert wrong == []
        assert server.live_caches() == 0


def test_callers_have_sequences_of_their_own(tmp_path):
    """One id, two holders of tokens."""
    repository_of(tmp_path / "models")
    authority = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run(["openssl", "req", "-x509", *authority, "-subj", "/CN=server", *files], check=True, capture_output=True)
    digests = [f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in ("alice", "bob")]
    (tmp_path / "tokens").write_text("".join(digests))
    flags = (f"--tls_cert={tmp_path}/certificate", f"--tls_key={tmp_path}/key", f"--token_file={tmp_path}/tokens")
    with (
        RaptServer(f"--model_repository={tmp_path}/models", "--kv_cache_bytes=67108864", *flags) as server,
        triton.InferenceServerClient(server.grpc_address, ssl=True, root_certificates=f"{tmp_path}/certificate") as client,
    ):
        alice, bob = ({"headers": {"authorization": f"Bearer {name}"}} for name in ("alice", "bob"))
        x, y = tokens(4), tokens(4)
        infer(client, "llama", x[:, :3], sequence_id=1, sequence_start=True, **alice)
        refuse(client, "INVALID_ARGUMENT", NEEDS_START.format(1, "llama"), y[:, :1], sequence_id=1, **bob)
        infer(client, "llama", y[:, :3], sequence_id=1, sequence_start=True, **bob)
        assert server.live_caches() == 2
        for caller, z in ((alice, x), (bob, y)):
            last = infer(client, "llama", z[:, 3:], sequence_id=1, sequence_end=True, **caller)
            check(last, infer(client, "llama", z, **caller)[:, 3:])
        for caller in (alice, bob):
            infer(client, "llama", x, sequence_id=2, sequence_start=True, **caller)
        client.unload_model("llama", **alice)
        assert server.live_caches() == 0


def test_a_server_without_caches_has_no_sequences(tmp_path):
    repository_of(tmp_path)
    with RaptServer(f"--model_repository={tmp_path}") as server, triton.InferenceServerClient(server.grpc_address) as client:
        refuse(client, "UNIMPLEMENTED", "sequences need --kv_cache_bytes", tokens(2), sequence_id=5, sequence_start=True)
        assert "sequence_batching" not in client.get_model_config("llama", as_json=True)["config"]
