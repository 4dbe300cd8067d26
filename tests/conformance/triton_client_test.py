"""Triton's own Python client, sync and aio, against a running server."""

import asyncio
import queue

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from attention_client import assert_close, attend, to_input
from rapt_server import RaptServer, wait_until
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

# The hand-computed example: Q = K = V = X, one head, D = 4, so that the scores are halves of counts.
X = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], np.float32).reshape(1, 1, 3, 4)
WEIGHTS = np.array(
    [[0.5065, 0.1863, 0.3072], [0.1863, 0.5065, 0.3072], [0.2741, 0.2741, 0.4519]]
).reshape(1, 1, 3, 3)
Y = np.array(
    [[0.8137, 0.4935, 0.5065, 0.1863], [0.4935, 0.8137, 0.1863, 0.5065], [0.7259, 0.7259, 0.2741, 0.2741]]
).reshape(1, 1, 3, 4)
FOUR_DECIMALS = 0.5e-4

INPUT_NAMES = {
    "Q",
    "K",
    "V",
    "attn_mask",
    "past_key",
    "past_value",
    "nonpad_kv_seqlen",
    "attention_bias",
    "head_sink",
}
OUTPUT_NAMES = {"Y", "present_key", "present_value", "qk_matmul_output", "lse"}


def qkv(x=X):
    return {"Q": x, "K": x, "V": x}


def typed_request(x=X, datatype="FP32"):
    request = service_pb2.ModelInferRequest(model_name="attention")
    for name in "QKV":
        tensor = request.inputs.add(name=name, datatype=datatype, shape=x.shape)
        tensor.contents.fp32_contents.extend(x.ravel().tolist())
    return request


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def refusal(code, call, *args, **kwargs):
    """Returns the error message of the call, which must fail with `code`."""
    with pytest.raises((InferenceServerException, grpc.RpcError)) as caught:
        call(*args, **kwargs)
    error = caught.value
    if isinstance(error, InferenceServerException):
        assert error.status() == f"StatusCode.{code.name}", error
        return error.message()
    assert error.code() == code, error
    return error.details()


# --- Metadata -------------------------------------------------------------------------------------


def test_is_live_and_ready(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("attention")
    assert client.is_model_ready("attention", "1")


def test_server_metadata_lists_the_extensions(client):
    metadata = client.get_server_metadata()
    assert metadata.name
    assert metadata.version
    assert set(metadata.extensions) == {"statistics", "parameters", "model_configuration", "binary_tensor_data"}


def test_model_metadata_names_every_tensor(client):
    metadata = client.get_model_metadata("attention")
    assert metadata.name == "attention"
    assert list(metadata.versions) == ["1"]
    assert {tensor.name for tensor in metadata.inputs} == INPUT_NAMES
    assert {tensor.name for tensor in metadata.outputs} == OUTPUT_NAMES


def test_model_config_agrees_with_the_metadata(client):
    config = client.get_model_config("attention").config
    assert config.name == "attention"
    assert config.max_batch_size == 0
    assert {tensor.name for tensor in config.input} == INPUT_NAMES
    assert {tensor.name for tensor in config.output} == OUTPUT_NAMES


# --- Inference ------------------------------------------------------------------------------------


def test_computes_the_hand_computed_example(client):
    got = attend(client, qkv(), ["Y", "qk_matmul_output"], {"qk_matmul_output_mode": 3})
    np.testing.assert_allclose(got["Y"], Y, rtol=0, atol=FOUR_DECIMALS)
    np.testing.assert_allclose(got["qk_matmul_output"], WEIGHTS, rtol=0, atol=FOUR_DECIMALS)


def test_returns_y_by_default(client):
    result = client.infer("attention", [to_input(n, x) for n, x in qkv().items()], request_id="7f")
    response = result.get_response()
    assert [output.name for output in response.outputs] == ["Y"]
    assert (response.model_name, response.model_version, response.id) == ("attention", "1", "7f")


def test_typed_contents_equal_raw_contents(client, stub):
    raw = attend(client, qkv(), ["Y"])["Y"]
    response = stub.ModelInfer(typed_request())
    assert list(response.outputs[0].shape) == [1, 1, 3, 4]
    assert response.raw_output_contents[0] == raw.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_y_has_the_type_of_q_and_lse_an_accumulator_type(client, dtype):
    got = attend(client, qkv(X.astype(dtype)), ["Y", "lse"])
    scores = X[0, 0].astype(np.float64) @ X[0, 0].astype(np.float64).T / 2
    want_lse = np.log(np.exp(scores).sum(-1)).reshape(1, 1, 3)
    assert got["Y"].dtype == dtype
    assert got["lse"].dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert_close("lse", got["lse"], want_lse)


def test_past_and_new_keys_are_returned_as_present(client):
    inputs = {**qkv(), "past_key": 2 * X, "past_value": 3 * X}
    got = attend(client, inputs, ["Y", "present_key", "present_value"])
    np.testing.assert_array_equal(got["present_key"], np.concatenate([2 * X, X], axis=2))
    np.testing.assert_array_equal(got["present_value"], np.concatenate([3 * X, X], axis=2))


@pytest.mark.parametrize("is_causal", [True, 1])
def test_is_causal_may_be_a_bool_or_an_integer(client, is_causal):
    got = attend(client, qkv(), ["Y"], {"is_causal": is_causal})
    np.testing.assert_array_equal(got["Y"][0, 0, 0], X[0, 0, 0])  # the first word sees only itself


def test_numbers_may_come_as_decimal_strings(client):
    as_number = attend(client, qkv(), ["Y"], {"scale": 0.25, "softcap": 2.0, "left_window_size": 1})
    as_text = attend(client, qkv(), ["Y"], {"scale": "0.25", "softcap": "2", "left_window_size": "1"})
    np.testing.assert_array_equal(as_number["Y"], as_text["Y"])


def test_reserved_parameters_are_accepted(client):
    inputs = [to_input(name, x) for name, x in qkv().items()]
    result = client.infer(
        "attention", inputs, sequence_id=5, sequence_start=True, priority=1, timeout=60_000_000
    )
    np.testing.assert_allclose(result.as_numpy("Y"), Y, rtol=0, atol=FOUR_DECIMALS)


def test_empty_tensors_give_an_empty_output(client):
    nothing = np.zeros((0, 1, 3, 4), np.float32)
    assert attend(client, qkv(nothing), ["Y"])["Y"].shape == (0, 1, 3, 4)


def test_answers_many_calls_at_once(client):
    answers = queue.Queue()
    inputs = [to_input(name, x) for name, x in qkv().items()]
    calls = 64
    for _ in range(calls):
        client.async_infer(
            "attention", inputs, callback=lambda result, error: answers.put((result, error))
        )
    for _ in range(calls):
        result, error = answers.get(timeout=60)
        assert error is None
        np.testing.assert_allclose(result.as_numpy("Y"), Y, rtol=0, atol=FOUR_DECIMALS)


def test_aio_client(server):
    async def ask():
        async with triton_aio.InferenceServerClient(server.grpc_address) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("attention")
            assert (await client.get_model_metadata("attention")).name == "attention"
            inputs = [to_input(name, x) for name, x in qkv().items()]
            results = await asyncio.gather(*(client.infer("attention", inputs) for _ in range(16)))
            with pytest.raises(InferenceServerException) as caught:
                await client.infer("transformer", inputs)
            return [result.as_numpy("Y") for result in results], caught.value.status()

    answers, status = asyncio.run(ask())
    for answer in answers:
        np.testing.assert_allclose(answer, Y, rtol=0, atol=FOUR_DECIMALS)
    assert status == "StatusCode.NOT_FOUND"


# --- Streams --------------------------------------------------------------------------------------


@pytest.fixture
def stream(client):
    """Sends requests on a stream; returns the responses in order as (result, error)."""
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))

    def send(*calls):
        for inputs, options in calls:
            tensors = [to_input(name, x) for name, x in inputs.items()]
            client.async_stream_infer("attention", tensors, **options)
        return [answers.get(timeout=60) for _ in calls]

    yield send
    client.stop_stream()


def test_a_stream_answers_in_order(client, stream):
    scales = [x / 10 for x in range(1, 31)]
    answers = stream(*((qkv(), {"request_id": str(s), "parameters": {"scale": s}}) for s in scales))
    assert [result.get_response().id for result, _ in answers] == [str(s) for s in scales]
    for scale, (result, error) in zip(scales, answers):
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("Y"), attend(client, qkv(), ["Y"], {"scale": scale})["Y"])


def test_an_error_keeps_its_position_in_the_stream(stream):
    wrong = ({**qkv(), "K": WIDE}, {"request_id": "wrong"})
    right = (qkv(), {"request_id": "right"})
    first, second, third, last = stream(right, wrong, right, wrong)
    # A client that reads until the last response of a request, as with Triton's decoupled models, ends.
    for result in (first[0], third[0]):
        assert result.get_response().id == "right"
        assert result.get_response().parameters["triton_final_response"].bool_param
    for result, error in (second, last):
        assert error is not None
        assert "INVALID_ARGUMENT" in error.message() and "K has head size 6" in error.message()
    for result, error in (first, third):
        assert error is None
        np.testing.assert_allclose(result.as_numpy("Y"), Y, rtol=0, atol=FOUR_DECIMALS)


def test_a_stream_accepts_messages_larger_than_its_window(client, stream):
    large = np.random.default_rng(8).standard_normal((1, 8, 512, 64), np.float32)  # 3 MiB of inputs
    (small, _), (result, error) = stream((qkv(), {}), (qkv(large), {}))
    assert error is None
    np.testing.assert_array_equal(result.as_numpy("Y"), attend(client, qkv(large), ["Y"])["Y"])


def test_aio_streams(server):
    async def ask():
        async def requests():
            for n in range(5):
                inputs = [to_input(name, x) for name, x in qkv().items()]
                yield {"model_name": "attention", "inputs": inputs, "request_id": str(n)}

        async with triton_aio.InferenceServerClient(server.grpc_address) as client:
            return [answer async for answer in client.stream_infer(requests())]

    answers = asyncio.run(ask())
    assert [result.get_response().id for result, _ in answers] == list("01234")
    assert all(error is None for _, error in answers)


# --- Errors ---------------------------------------------------------------------------------------


def test_an_unknown_model_or_version_is_not_found(client):
    inputs = [to_input(name, x) for name, x in qkv().items()]
    assert "transformer" in refusal(grpc.StatusCode.NOT_FOUND, client.infer, "transformer", inputs)
    assert "7" in refusal(grpc.StatusCode.NOT_FOUND, client.infer, "attention", inputs, model_version="7")
    refusal(grpc.StatusCode.NOT_FOUND, client.get_model_metadata, "transformer")
    refusal(grpc.StatusCode.NOT_FOUND, client.get_model_config, "transformer")


WIDE = np.zeros((1, 1, 3, 6), np.float32)
REFUSED_INPUTS = {
    "different head sizes": ({**qkv(), "K": WIDE}, {}, ["K", "6", "4"]),
    "different types": ({**qkv(), "V": X.astype(np.float64)}, {}, ["V", "FP64", "FP32"]),
    "no values": ({"Q": X, "K": X}, {}, ["V"]),
    "unknown input": ({**qkv(), "W": X}, {}, ["W"]),
    "past key alone": ({**qkv(), "past_key": X}, {}, ["past_key", "past_value"]),
    "mask too wide": ({**qkv(), "attn_mask": np.ones((3, 5), np.bool_)}, {}, ["attn_mask", "5", "3"]),
    "lengths too long": ({**qkv(), "nonpad_kv_seqlen": np.array([4])}, {}, ["nonpad_kv_seqlen", "4", "3"]),
    "unknown parameter": (qkv(), {"is_casual": True}, ["is_casual"]),
    "a word for a number": (qkv(), {"scale": "large"}, ["scale", "large"]),
    "negative softcap": (qkv(), {"softcap": -1.0}, ["softcap", "-1"]),
    "no such output mode": (qkv(), {"qk_matmul_output_mode": 4}, ["qk_matmul_output_mode", "4"]),
}


@pytest.mark.parametrize("inputs,parameters,named", REFUSED_INPUTS.values(), ids=REFUSED_INPUTS)
def test_errors_name_the_values_received_and_allowed(client, inputs, parameters, named):
    message = refusal(grpc.StatusCode.INVALID_ARGUMENT, attend, client, inputs, ["Y"], parameters)
    for word in named:
        assert word in message, f"{word!r} is missing in {message!r}"


def test_an_unknown_output_is_refused(client):
    message = refusal(grpc.StatusCode.INVALID_ARGUMENT, attend, client, qkv(), ["Z"])
    assert "Z" in message


def test_raw_contents_must_match_the_shape(stub):
    request = service_pb2.ModelInferRequest(model_name="attention")
    for name in "QKV":
        request.inputs.add(name=name, datatype="FP32", shape=X.shape)
        request.raw_input_contents.append(X.tobytes())
    request.raw_input_contents[1] = X.tobytes()[:-1]
    message = refusal(grpc.StatusCode.INVALID_ARGUMENT, stub.ModelInfer, request)
    assert "K" in message and "47" in message and "48" in message


def test_raw_and_typed_contents_do_not_mix(stub):
    request = typed_request()
    request.raw_input_contents.append(X.tobytes())
    refusal(grpc.StatusCode.INVALID_ARGUMENT, stub.ModelInfer, request)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_types_need_raw_contents(stub, datatype):
    message = refusal(
        grpc.StatusCode.INVALID_ARGUMENT, stub.ModelInfer, typed_request(datatype=datatype)
    )
    assert datatype in message


def test_sizes_that_overflow_are_refused(stub):
    request = typed_request()
    for tensor in request.inputs:
        tensor.shape[:] = [2**62, 2**62, 3, 4]
    refusal(grpc.StatusCode.INVALID_ARGUMENT, stub.ModelInfer, request)


def test_compressed_requests_are_refused(client):
    inputs = [to_input(name, x) for name, x in qkv().items()]
    refusal(
        grpc.StatusCode.UNIMPLEMENTED, client.infer, "attention", inputs, compression_algorithm="gzip"
    )


NOT_OFFERED = {
    "load": lambda client: client.load_model("attention"),
    "unload": lambda client: client.unload_model("attention"),
    "status of shared memory": lambda client: client.get_system_shared_memory_status(),
    "register shared memory": lambda client: client.register_system_shared_memory("r", "/rapt", 1),
    "unregister shared memory": lambda client: client.unregister_system_shared_memory(),
    "register CUDA memory": lambda client: client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 1),
}


@pytest.mark.parametrize("call", NOT_OFFERED.values(), ids=NOT_OFFERED)
def test_unsupported_methods_are_unimplemented(client, call):
    refusal(grpc.StatusCode.UNIMPLEMENTED, call, client)


# --- Statistics and settings ----------------------------------------------------------------------


def test_statistics_count_successes_and_failures(client):
    def statistics():
        (model,) = client.get_inference_statistics("attention").model_stats
        assert (model.name, model.version) == ("attention", "1")
        return model

    before = statistics()
    for _ in range(3):
        attend(client, qkv(), ["Y"])
    refusal(grpc.StatusCode.INVALID_ARGUMENT, attend, client, {**qkv(), "K": WIDE}, ["Y"])

    def calls(model):
        return model.inference_count + model.inference_stats.fail.count

    # A call is counted once its response has been sent, possibly after the client has read it.
    wait_until(lambda: calls(statistics()) == calls(before) + 4, "the four calls are not counted")
    after = statistics()
    assert after.inference_count - before.inference_count == 3
    assert after.execution_count == after.inference_count
    assert after.last_inference >= max(before.last_inference, 1_700_000_000_000)
    now, then = after.inference_stats, before.inference_stats
    for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(now, part).count == after.inference_count, part
        assert getattr(now, part).ns - getattr(then, part).ns >= 0, part
    assert now.success.ns > now.compute_infer.ns > 0
    assert now.fail.count - then.fail.count == 1


MODELS = [
    "attention",
    "attention_backward",
    "rotary_embedding",
    "positional_encoding",
    "linear_attention",
    "lsh_attention",
]


def test_statistics_name_every_model(client):
    assert [model.name for model in client.get_inference_statistics().model_stats] == MODELS
    error = refusal(grpc.StatusCode.NOT_FOUND, client.get_inference_statistics, "transformer")
    assert all(name in str(error) for name in MODELS)


def test_an_unknown_model_is_no_failure_of_another(client):
    def failures():
        return [model.inference_stats.fail.count for model in client.get_inference_statistics().model_stats]

    before = failures()
    inputs = [to_input(name, x) for name, x in qkv().items()]
    refusal(grpc.StatusCode.NOT_FOUND, client.infer, "transformer", inputs)
    refusal(grpc.StatusCode.NOT_FOUND, client.infer, "attention", inputs, model_version="7")
    refusal(grpc.StatusCode.INVALID_ARGUMENT, client.infer, "rotary_embedding", inputs)
    wait_until(lambda: failures() != before, "no failure is counted")  # the others were counted before it
    assert [now - then for now, then in zip(failures(), before)] == [int(name == "rotary_embedding") for name in MODELS]


def test_a_call_that_is_refused_unread_is_no_failure_of_a_model():
    flags = ("--max_message_bytes=1000", "--kv_cache_bytes=16M")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        large = [to_input(name, np.zeros((1, 1, 30, 4), np.float32)) for name in "QKV"]
        refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, client.infer, "rotary_embedding", large)
        refusal(grpc.StatusCode.INVALID_ARGUMENT, client.infer, "lsh_attention", [to_input("Q", X), to_input("K", X)])
        step = [to_input(name, X) for name in "QKV"]
        refusal(grpc.StatusCode.INVALID_ARGUMENT, client.infer, "attention_session", step, sequence_id=7)

        def failures():
            stats = client.get_inference_statistics().model_stats
            return {model.name for model in stats if model.inference_stats.fail.count > 0}

        # The others were counted before.
        wait_until(lambda: "attention_session" in failures(), "the turn of the sequence is not counted")
        assert failures() == {"lsh_attention", "attention_session"}


def test_a_wrong_request_of_a_stream_is_a_failure_of_its_model(client, stream):
    def failures():
        return client.get_inference_statistics("attention").model_stats[0].inference_stats.fail.count

    before = failures()
    stream(({**qkv(), "K": WIDE}, {}), (qkv(), {}))
    # It is counted once its response was sent, maybe after it was read.
    wait_until(lambda: failures() != before, "the failure is not counted")
    assert failures() == before + 1


def test_statistics_count_each_model(client):
    def counts():
        stats = client.get_inference_statistics().model_stats
        return {model.name: (model.inference_stats.success.count, model.inference_stats.fail.count) for model in stats}

    before = counts()
    x = np.ones((2, 3, 4), np.float32)
    client.infer("positional_encoding", [to_input("X", x)])
    refusal(grpc.StatusCode.INVALID_ARGUMENT, client.infer, "rotary_embedding", [to_input("X", x)])

    def total(counts):
        return sum(map(sum, counts.values()))

    wait_until(lambda: total(counts()) == total(before) + 2, "the two calls are not counted")
    after = counts()
    success, fail = ({name: after[name][n] - before[name][n] for name in MODELS} for n in (0, 1))
    assert success == dict.fromkeys(MODELS, 0) | {"positional_encoding": 1}
    assert fail == dict.fromkeys(MODELS, 0) | {"rotary_embedding": 1}


def test_the_repository_has_every_model(client):
    models = client.get_model_repository_index().models
    assert [(m.name, m.version, m.state) for m in models] == [(name, "1", "READY") for name in MODELS]


def test_every_model_describes_itself(client):
    for name in MODELS:
        metadata, config = client.get_model_metadata(name), client.get_model_config(name).config
        assert (metadata.name, config.name) == (name, name)
        assert [i.name for i in metadata.inputs] == [i.name for i in config.input]


def test_positional_encoding(client):
    x = np.random.default_rng(1).standard_normal((2, 5, 7)).astype(np.float32)
    angles = np.arange(5)[:, None] * 100.0 ** (-(np.arange(7) // 2 * 2) / 7)
    want = x + np.where(np.arange(7) % 2 == 0, np.sin(angles), np.cos(angles))
    y = client.infer("positional_encoding", [to_input("X", x)], parameters={"base": 100}).as_numpy("Y")
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    table = np.arange(42, dtype=np.float32).reshape(6, 7)
    y = client.infer("positional_encoding", [to_input("X", x), to_input("table", table)]).as_numpy("Y")
    np.testing.assert_array_equal(y, x + table[:5])


def test_a_position_outside_the_cache(client):
    x, cache = np.ones((1, 1, 2, 4), np.float32), np.ones((3, 2), np.float32)
    inputs = [to_input(name, array) for name, array in (("X", x), ("cos_cache", cache), ("sin_cache", cache))]
    error = refusal(grpc.StatusCode.INVALID_ARGUMENT, client.infer, "rotary_embedding",
                    [*inputs, to_input("position_ids", np.array([[0, 3]]))])  # fmt: skip
    assert "position_ids[0, 1] is 3; it must be from 0 to 2" in str(error)


def test_there_are_no_settings_to_change(client):
    assert not client.get_trace_settings().settings
    assert not client.get_trace_settings("attention").settings
    assert not client.get_log_settings().settings
    refused = grpc.StatusCode.INVALID_ARGUMENT
    assert "trace_rate" in refusal(refused, client.update_trace_settings, settings={"trace_rate": "1"})
    assert "log_info" in refusal(refused, client.update_log_settings, {"log_info": True})
    refusal(grpc.StatusCode.NOT_FOUND, client.get_trace_settings, "transformer")
