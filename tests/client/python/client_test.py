"""rapt.Client and rapt.AsyncClient against a running server, which computes what rapt.attend computes in process."""

import asyncio
import contextlib
import subprocess
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import rapt
from arrays_test import InNamespace, Producer, spread
from attention_client import assert_close
from attention_test import LSE_SLACK, ROTATES, TYPES, call_of, definition
from gradients_test import CASES
from rapt import _messages
from rapt._reports import CacheInfo
from rapt_server import RaptServer
from scripted_server import LossyGrpcProxy, LossyProxy

QUICK = rapt.Retry(initial_backoff=0, max_backoff=0)
POLL_SECONDS = 30


@pytest.fixture(scope="module")
def server():
    with RaptServer("--kv_cache_bytes=268435456", "--max_message_bytes=67108864") as running:
        yield running


def url_of(server, transport):
    return f"{transport}://{server.http_address if transport == 'http' else server.grpc_address}"


@pytest.fixture(scope="module", params=("http", "grpc"))
def url(server, request):
    return url_of(server, request.param)


@pytest.fixture(scope="module")
def client(url):
    with rapt.Client(url) as connected:
        yield connected


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


Q, K, V = normal(2, 4, 6, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 5)
QKV = {"Q": Q, "K": K, "V": V}


def poll(condition):
    deadline = time.monotonic() + POLL_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition does not become true"
        time.sleep(0.01)


# --- Attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_variant_equals_the_definition(client, name, dtype):
    x, parameters, arguments = call_of(name, dtype)
    result = client.attend(**arguments)
    assert result.y.dtype == dtype and result.plan.startswith("cpu/")
    if dtype in (np.float64, np.float32) or not any(word in name for word in ROTATES):  # rotated rows are rounded
        assert_close("y", result.y, np.asarray(definition(x, parameters)[0]), slack=1e-5 if dtype == np.float32 else 0)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_all_outputs_are_those_in_process(client, dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    past = {"past_key": normal(2, 2, 3, 8, dtype=dtype), "past_value": normal(2, 2, 3, 5, dtype=dtype)}
    arguments = {"scores": "weights", "lse": True, "present": True, "causal": True, **past}
    got, want = client.attend(q, k, v, **arguments), rapt.attend(q, k, v, **arguments)
    for name in ("y", "scores", "lse", "present_key", "present_value"):
        x = getattr(got, name)
        assert x.dtype == getattr(want, name).dtype and x.flags.c_contiguous and x.flags.writeable
        assert_close(name, x, getattr(want, name))


@pytest.mark.parametrize(
    "arguments",
    (
        {"key_lengths": [3, 9]},
        {"mask": np.random.default_rng(1).random((6, 9)) < 0.5},
        {"window": (2, None), "alignment": "bottom_right"},
        {"window": (None, 1), "softcap": 3},
        {"dropout": (0.3, 2**63 + 5)},
        {"scale": -0.25, "prefix_keys": 2, "window": (0, 0)},
        {"scores": "biased", "causal": True},
    ),
    ids=lambda arguments: " ".join(arguments),
)
def test_options_mean_what_they_mean_in_process(client, arguments):
    got, want = client.attend(Q, K, V, **arguments), rapt.attend(Q, K, V, **arguments)
    np.testing.assert_allclose(got.y, want.y, rtol=1e-5, atol=1e-6)
    if "scores" in arguments:
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5, atol=1e-6)


def test_layouts_strides_and_broadcast_views(client):
    want = rapt.attention(Q, K, V)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K, V)]
    np.testing.assert_array_equal(client.attend(*swapped, layout="BSHD").y, want.swapaxes(1, 2))
    np.testing.assert_array_equal(client.attend(*(x.swapaxes(1, 2) for x in swapped)).y, want)
    np.testing.assert_array_equal(client.attend(spread(Q, (1, 2)), K[:, :, ::-1][:, :, ::-1], V).y, want)
    mask = np.broadcast_to(np.float32(1), (6, 9))
    np.testing.assert_allclose(client.attend(Q, K, V, mask=mask).y, want, atol=1e-6)


def test_attention_alone(client):
    np.testing.assert_array_equal(client.attention(Q, K, V, causal=True), rapt.attention(Q, K, V, causal=True))


@pytest.mark.parametrize("heads", ({}, {"query_heads": 4, "kv_heads": 2}), ids=("one head", "heads"))
def test_heads_in_the_last_axis(client, heads):
    q, k, dy = normal(2, 6, 16), normal(2, 9, 8 if heads else 16), normal(2, 6, 16)
    options = {"causal": True, "scores": "weights", "lse": True, **heads}
    got, want = client.attend(q, k, k, **options), rapt.attend(q, k, k, **options)
    for name in ("y", "scores", "lse"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    of_process = rapt.attend_backward(q, k, k, dy, **heads)
    for name, gradient in client.attend_backward(q, k, k, dy, **heads).items():
        assert_close(name, gradient, of_process[name])


def test_rows_alone(client):
    q, k, dy = normal(6, 8), normal(9, 8), normal(6, 8)
    mask = normal(6, 9) > 0
    got, want = client.attend(q, k, k, mask=mask, lse=True), rapt.attend(q, k, k, mask=mask, lse=True)
    np.testing.assert_array_equal(got.y, want.y)
    np.testing.assert_array_equal(got.lse, want.lse)
    of_process = rapt.attend_backward(q, k, k, dy)
    for name, gradient in client.attend_backward(q, k, k, dy).items():
        assert_close(name, gradient, of_process[name])
    assert client.diagnose(q, k, k).pairs == 54


def test_any_producer_of_dlpack(client):
    want = rapt.attention(Q, K, V)
    got = client.attend(InNamespace(Q), Producer(K), V, lse=True)
    assert isinstance(got.y, InNamespace) and isinstance(got.lse, InNamespace)
    np.testing.assert_array_equal(got.y.array, want)


class Counted(Producer):
    exports = 0

    def __dlpack__(self, **options):
        self.exports += 1
        return super().__dlpack__(**options)


@pytest.mark.parametrize(
    "call",
    (
        lambda client, x: client.attend(x, Q, Q),
        lambda client, x: client.attend_backward(x, Q, Q, Q),
        lambda client, x: client.lsh_attention(x, Q, chunk_length=6),
        lambda client, x: client.infer("attention", {"Q": x, "K": Q, "V": Q}),
    ),
)
def test_an_array_is_exported_once_by_a_call(client, call):
    x = Counted(Q)
    call(client, x)
    assert x.exports == 1


def test_sizes_of_0(client):
    assert client.attend(Q[:, :, :0], K, V).y.shape == (2, 4, 0, 5)
    np.testing.assert_array_equal(client.attend(Q, K[:, :, :0], V[:, :, :0]).y, np.zeros((2, 4, 6, 5)))


def test_large_tensors(client):
    x = normal(1, 16, 1, 2**18 // 16 * 4)[..., :1024].copy()
    x = np.tile(x, (64, 1, 1, 1))
    np.testing.assert_allclose(client.attend(x, x, x).y, x, rtol=1e-6)


def test_results_can_be_merged(client):
    parts = [client.attend(Q, K[:, :, part], V[:, :, part], lse=True) for part in (slice(0, 4), slice(4, 9))]
    np.testing.assert_allclose(rapt.merge(parts).y, rapt.attention(Q, K, V), rtol=1e-5, atol=1e-6)


def test_arrays_are_not_changed(client):
    arrays = [x.copy() for x in (Q, K, V)]
    for x in arrays:
        x.flags.writeable = False
    client.attend(*arrays, causal=True)
    for x, copy in zip(arrays, (Q, K, V)):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda c: c.attend(Q, K[..., :4], V), ValueError, r"k has shape \[2, 2, 9, 4\]"),
        (lambda c: c.attend(Q, K, V, casual=True), TypeError, "there is no option casual"),
        (lambda c: c.attend(1.0, K, V), TypeError, "q is a float"),
        (lambda c: c.attend(Q, K.astype(np.float16), V), ValueError, "k has type float16; it must be float32"),
        (lambda c: c.attend(Q, K, V, softcap=-1.0), ValueError, "softcap is -1"),
        (lambda c: c.attend(Q[0], K, V), ValueError, "k has shape .*; it must have 3 axes, as q has"),
        (lambda c: c.attend(Q[None], K, V), ValueError, "q has 5 axes; it must have 2 to 4"),
        (lambda c: c.attention(Q, K, V, atn_mask=None), TypeError, "there is no option atn_mask; did you mean mask"),
        (lambda c: c.attend_backward(Q, K, V, Q), ValueError, r"dy has shape \[2, 4, 6, 8\]"),
        (lambda c: c.attend_backward(Q, K, V, Q, gradients=["dx"]), ValueError, "gradients has 'dx'"),
        (lambda c: c.linear_attention(Q[0], Q[0], Q[0], query_heads=1), TypeError, "kv_heads is missing"),
        (lambda c: c.linear_attention(Q[0], Q[0], Q[0], query_heads=3, kv_heads=1, update_rule="linear"), ValueError, "query_heads is 3"),
        (lambda c: c.linear_attention(Q, Q, Q, query_heads=1, kv_heads=1), ValueError, "query has shape"),
        (lambda c: c.linear_attention(Q[0], Q[0], Q[0], **LINEAR, gate=1), TypeError, "there is no option gate"),
        (lambda c: c.linear_attention(Q[0], Q[0], Q[0], **LINEAR, causal="yes"), TypeError, "causal is 'yes'; it must be True or"),
        (lambda c: c.linear_attention(Q[0], Q[0], Q[0], **LINEAR, gates=None), TypeError, "there is no option gates"),
        (lambda c: c.lsh_attention(Q, Q, chunk_length=3, buckets="no"), TypeError, "buckets is 'no'; it must be True or False"),
        (lambda c: c.lsh_attention(Q, Q, chunk_length=3), ValueError, "rotations is missing; it or seed must be given"),
        (lambda c: c.infer("none", {"Q": Q}), LookupError, "unknown model 'none'"),
        (lambda c: c.infer("a/b c", {"Q": Q}), LookupError, "a/b c"),
        (lambda c: c.infer("attention", {}), ValueError, "inputs is empty"),
        (lambda c: c.infer("attention", {"Q": Q}), ValueError, "K is missing"),
        (lambda c: c.infer("attention", {"Q": Q}, parameters={"sequence_id": 5}), ValueError, "create_cache"),
        (lambda c: c.infer("attention", QKV, parameters={"scale": np.nan}), ValueError, r"parameters\['scale'\] is nan; it must be finite"),
        (lambda c: c.infer("attention", QKV, parameters={"scale": [2]}), TypeError, r"parameters\['scale'\] is \[2\]; it must be a bool"),
        (lambda c: c.infer("attention", QKV, parameters={"scale": 2**64}), ValueError, r"parameters\['scale'\] is 18446744073709551616; it"),
        (lambda c: c.infer("attention", QKV, "Y"), TypeError, "outputs is 'Y'; it must be a sequence of names"),
        (lambda c: c.infer("attention", QKV, ["Y", 1]), TypeError, r"outputs is \['Y', 1\]; it must be a sequence of names"),
        (lambda c: c.estimate_memory([64], query_heads=-1), ValueError, "query_heads"),
        (lambda c: c.estimate_memory([64], query_heads=1, dtype="int8"), ValueError, "dtype is 'int8'"),
        (lambda c: c.estimate_memory([64], query_heads=np.float32(2)), TypeError, r"query_heads is np.float32\(2.0\); it must be an integer"),
        (lambda c: c.estimate_memory([64], query_heads=np.nan), TypeError, "query_heads is nan; it must be an integer"),
        (lambda c: c.estimate_memory([64, 1.5], query_heads=1), TypeError, "lengths is 1.5; it must be an integer"),
        (lambda c: c.estimate_memory([64], query_heads=1, per_head="yes"), TypeError, "per_head is 'yes'; it must be"),
        (lambda c: c.create_cache(rapt.LayerShape(2.5, 8)), TypeError, "kv_heads is 2.5; it must be an integer"),
        (lambda c: c.create_cache(rapt.LayerShape(2, 8, layers=2**32 + 1)), ValueError, "layers"),
        (lambda c: c.create_cache(rapt.LayerShape(2, 8), first_position="x"), TypeError, "first_position is 'x'; it must be an integer"),
    ),
)
def test_errors_name_the_argument(client, call, error, message):
    with pytest.raises(error, match=message):
        call(client)


def test_beyond_a_limit_of_the_server(client):
    x = np.zeros((1, 64, 4096, 64), np.float32)
    with pytest.raises(rapt.errors.ResourceExhausted, match="at most 67108864") as caught:
        client.attend(x, x, x)
    assert isinstance(caught.value, MemoryError) and caught.value.status in (413, 429)  # which gRPC does not tell apart


def test_an_answer_beyond_the_limit_of_the_client(url):
    x = np.zeros((1, 1, 64, 8), np.float32)
    with rapt.Client(url, max_message_bytes=10000, retries=rapt.Retry(resource_exhausted=True)) as client:
        with pytest.raises(MemoryError, match="^the answer has more than max_message_bytes, 10000$"):
            client.attend(x, x, x, scores="weights")


def is_in_the_answer(x):
    """Whether the array is a part of what was received, not a copy."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x.base is not None


def test_results_of_one_array_are_in_the_memory_that_was_received(client):
    x = normal(1, 64, 64, 16)
    assert client.attend(x, x, x).y.ctypes.data % 64 == 0
    # Only the first is aligned. 16 bytes are between it and the scores, which are thus aligned enough not to be copied.
    y, scores = (lambda result: (result.y, result.scores))(client.attend(x, x, x, scores="weights"))
    assert is_in_the_answer(scores) and not is_in_the_answer(y)  # which would keep the memory of the large one


@pytest.mark.parametrize("heads", (1, 10, 100))  # the JSON before the numbers has one byte more each time
def test_outputs_of_models_are_in_the_memory_that_was_received(client, heads):
    x = normal(1, heads, 64, 16)
    y = client.infer("attention", {"Q": x, "K": x, "V": x}, ["Y"])["Y"]
    assert is_in_the_answer(y) and y.ctypes.data % 64 == 0


# --- Gradients, linear attention, hashing, models -----------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_variant_are_those_in_process(client, name):
    _, _, arguments = call_of(name)
    q, k, v = arguments.pop("q"), arguments.pop("k"), arguments.pop("v", None)
    y = rapt.attention(q, k, v, **arguments)
    names = ["dq", "dk", *(["dv"] if v is not None else [])]
    names += [f"d_{name}" for name in arguments if f"d_{name}" in _messages.ATTEND_BACKWARD_RESPONSE]
    names = [n for n in names if n != "d_mask" or arguments["mask"].dtype.kind == "f"]
    got, want = (
        side.attend_backward(q, k, v, np.cos(y), gradients=names, **arguments) for side in (client, rapt)
    )
    assert list(got) == names
    for gradient in names:
        assert_close(gradient, got[gradient], want[gradient])


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_gradients_with_the_forward_pass_and_by_lse(client, dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    forward = client.attend(q, k, v, causal=True, lse=True)
    known = {"y": forward.y, "lse": forward.lse, "dlse": np.ones_like(forward.lse), "causal": True}
    got, want = (side.attend_backward(q, k, v, forward.y, **known) for side in (client, rapt))
    assert set(got) == {"dq", "dk", "dv"}
    for name, x in got.items():
        assert x.dtype == dtype
        assert_close(name, x, want[name])
    swapped = [x.swapaxes(1, 2) for x in (q, k, v, forward.y)]
    dq = client.attend_backward(*swapped, layout="BSHD", causal=True)["dq"]
    assert_close("dq", dq.swapaxes(1, 2), rapt.attend_backward(q, k, v, forward.y, causal=True)["dq"])


def linear_inputs(tokens, dtype=np.float32):
    return [normal(2, tokens, width, dtype=dtype) for width in (4 * 8, 2 * 8, 2 * 6)]


LINEAR = {"query_heads": 4, "kv_heads": 2}


@pytest.mark.parametrize(
    "options",
    (
        {"decay": -np.abs(normal(2, 20, 2)), "beta": np.abs(np.tanh(normal(2, 20, 1)))},
        {"update_rule": "linear", "feature_map": "elu1", "normalize": True, "causal": False, "scale": 2},
        {"update_rule": "linear", "feature_map": "favor", "num_features": 16, "seed": 2**64 - 1, "error_rows": 3},
        {"update_rule": "linear", "feature_map": "favor", "projection": normal(5, 8)},
        {"update_rule": "linear", "key_lengths": [20, 7], "chunk_size": 8, "state_type": "float64"},
        {"update_rule": "linear", "past_state": normal(2, 2, 8, 6).astype(np.float64)},
    ),
    ids=lambda options: " ".join(options),
)
def test_linear_attention_is_that_in_process(client, options):
    wants = {"present_state": True, "present_normalizer": options.get("normalize", False)}
    got, want = (side.linear_attention(*linear_inputs(20), **LINEAR, **wants, **options) for side in (client, rapt))
    assert_close("output", got.output, want.output)
    assert got.present_state.dtype == want.present_state.dtype
    assert_close("present_state", got.present_state, want.present_state)
    assert (got.present_normalizer is None) == (want.present_normalizer is None) and got.plan
    if want.relative_error is None:
        assert got.relative_error is None
    else:
        assert got.relative_error == pytest.approx(want.relative_error, rel=1e-4)


def test_linear_attention_continues_from_its_state(client):
    inputs = linear_inputs(12)
    options = {**LINEAR, "update_rule": "linear", "present_state": True}
    whole = client.linear_attention(*inputs, **options)
    first = client.linear_attention(*(x[:, :5] for x in inputs), **options)
    rest = client.linear_attention(*(x[:, 5:] for x in inputs), past_state=first.present_state, **options)
    assert_close("output", np.concatenate([first.output, rest.output], 1), whole.output)
    assert_close("state", rest.present_state, whole.present_state)


@pytest.mark.parametrize(
    "options",
    (
        {"seed": 2**64 - 1, "num_hashes": 2, "causal": True, "buckets": True},
        {"rotations": normal(1, 8, 1, 2), "num_buckets": 4, "chunks_before": 0, "chunks_after": 1, "scale": 0.5},
        {"k": normal(2, 3, 24, 8), "seed": 3, "key_lengths": [24, 10], "buckets": True},
    ),
    ids=lambda options: " ".join(options),
)
def test_attention_by_hashing_is_that_in_process(client, options):
    q, v = normal(2, 3, 24, 8), normal(2, 3, 24, 5)
    got, want = (side.lsh_attention(q, v, chunk_length=6, **options) for side in (client, rapt))
    assert_close("y", got.y, want.y)
    assert got.plan == want.plan
    if options.get("buckets"):
        np.testing.assert_array_equal(got.buckets, want.buckets)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_models_by_their_names(client, dtype):
    x = normal(1, 2, 5, 8).astype(dtype)
    rotated = client.infer("rotary_embedding", {"X": x}, parameters={"rope_theta": 10000.0})
    assert list(rotated) == ["Y"] and rotated["Y"].dtype == dtype
    np.testing.assert_array_equal(rotated["Y"][:, :, 0], x[:, :, 0])  # position 0
    table = normal(7, 8).astype(dtype)
    added = client.infer("positional_encoding", {"X": x[0], "table": table}, ["Y"])["Y"]
    np.testing.assert_allclose(added.astype(float), x[0].astype(float) + table[:5].astype(float), rtol=1e-2, atol=1e-2)
    for call in (
        lambda side: side.rotary_embedding(x, rope_theta=10000, interleaved=True),
        lambda side: side.positional_encoding(x[0], table=table),
    ):
        np.testing.assert_array_equal(call(client), call(rapt))
    outputs = client.infer("attention", {"Q": x, "K": x, "V": x}, ["lse", "Y"], parameters={"is_causal": True})
    np.testing.assert_array_equal(outputs["Y"], client.attend(x, x, x, causal=True).y)
    assert outputs["lse"].shape == (1, 2, 5)


def test_parameters_may_be_numbers_of_numpy(client):
    parameters = {"is_causal": np.bool_(True), "scale": np.float32(2), "left_window_size": np.int64(3)}
    got = client.infer("attention", QKV, parameters=parameters)["Y"]
    np.testing.assert_array_equal(got, client.attend(Q, K, V, causal=True, scale=2, window=(3, None)).y)


def test_results_of_all_functions_are_of_the_kind_of_the_first_array(client):
    q, k, v = InNamespace(Q), Producer(K), V
    dq = client.attend_backward(q, k, v, rapt.attention(Q, K, V))["dq"]
    assert isinstance(dq, InNamespace)
    x = InNamespace(normal(2, 3, 24, 8))
    assert isinstance(client.lsh_attention(x, x.array, chunk_length=24).y, InNamespace)
    assert isinstance(client.infer("rotary_embedding", {"X": x}, parameters={"rope_theta": 1e4})["Y"], InNamespace)


def test_all_functions_by_asyncio(url):
    async def run():
        async with rapt.AsyncClient(url) as client:
            y = (await client.attend(Q, K, V)).y
            return await asyncio.gather(
                client.attend_backward(Q, K, V, y),
                client.linear_attention(*linear_inputs(4), **LINEAR, update_rule="linear"),
                client.lsh_attention(Q, Q, chunk_length=6),
                client.infer("attention", QKV),
            )

    gradients, linear, hashed, outputs = asyncio.run(run())
    assert gradients["dv"].shape == V.shape and linear.output.shape == (2, 4, 24) and hashed.y.shape == Q.shape
    np.testing.assert_array_equal(outputs["Y"], rapt.attention(Q, K, V))


# --- Reports ------------------------------------------------------------------------------------------


def test_a_diagnosis(client):
    q = Q.copy()
    q[0, 0, 0, 0] = np.nan
    report = client.diagnose(q, K, V, key_lengths=[0, 9])
    assert report.pairs == 2 * 4 * 6 * 9 and report.masked_by_position == 4 * 6 * 9
    assert report.inputs[0].nan_count == 1 and report.inputs[0].shape == [2, 4, 6, 8]
    assert report.empty_rows.count == 24 and report.empty_rows.first[1].query == 1
    assert report.weights.min >= 0 and any("NaN" in text for text in report.warnings)
    assert [choice.backend for choice in report.backends if choice.chosen] == ["cpu"]
    text = repr(report)
    assert text.startswith(f"<Diagnosis: {report.problem}, cpu/") and len(text) < 2000
    assert "216 of 432 pairs hidden" in text and report.warnings[0] in text


def test_a_diagnosis_of_more_than_json_carries(client):
    x = np.zeros((1, 16, 1024, 256), np.float32)
    assert client.diagnose(x[:, :, :1], x, x).inputs[1].elements == x.size


def test_an_estimate_of_memory(client):
    estimates = client.estimate_memory([64, 4096], query_heads=2, kv_heads=1, head_size=32, block_q=64, block_k=64)
    first, second = estimates.estimates
    assert first.tensor_bytes == 64 * 4 * 32 * (2 + 1 + 1 + 2) and first.standard_bytes == 4 * 2 * 64 * 64
    assert second.fused_bytes < second.standard_bytes and second.inputs[0].name == "block_mask" and second.plan


def test_an_estimate_takes_numbers_of_numpy(client):
    blocks = {"query_heads": 2, "block_q": 64, "block_k": 64}
    numbers = {name: np.int64(value) for name, value in blocks.items()}
    assert client.estimate_memory(np.array([64]), **numbers, per_head=np.True_) == client.estimate_memory([64], **blocks, per_head=True)


def test_what_a_server_says_of_itself(client):
    info = client.info()
    assert info.version == rapt.__version__ and info.max_message_bytes == 67108864 and info.compute_threads >= 1
    assert any(backend.name == "cpu" and backend.available for backend in info.backends)
    assert info.admission.max_open_calls > 0
    assert info.caches is not None and info.caches.max_bytes == 268435456 and info.caches.default_lease_ms == 600_000


@pytest.mark.parametrize("transport", ("http", "grpc"))
def test_readiness(transport):
    with RaptServer("--drain_pause=2s") as running, rapt.Client(url_of(running, transport)) as client:
        assert client.ready() is True
        running.stop()
        poll(lambda: not client.ready())


# --- Deadlines and cancellation -----------------------------------------------------------------------

LONG = normal(1, 32, 8192, 16)


def test_a_deadline_stops_the_server(server, client):
    with pytest.raises(TimeoutError):
        client.attend(LONG, LONG, LONG, timeout=0.25)
    poll(lambda: server.read_gauge("rapt_open_calls") == 0)


def test_cancelling_stops_the_server(server, url):
    async def run():
        async with rapt.AsyncClient(url) as client:
            calls = [asyncio.create_task(client.attend(LONG, LONG, LONG)) for _ in range(3)]
            await asyncio.to_thread(poll, lambda: server.read_gauge("rapt_open_calls") == 3)
            calls[0].cancel()
            await asyncio.to_thread(poll, lambda: server.read_gauge("rapt_open_calls") == 2)
            for call in calls[1:]:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await asyncio.to_thread(poll, lambda: server.read_gauge("rapt_open_calls") == 0)
            assert await client.ready()

    asyncio.run(run())


def test_calls_of_many_tasks_and_threads(url, client):
    want = rapt.attention(Q, K, V)

    async def run():
        async with rapt.AsyncClient(url, threads=8) as asynchronous:
            return await asyncio.gather(*[asynchronous.attend(Q, K, V) for _ in range(100)])

    for result in asyncio.run(run()):
        np.testing.assert_array_equal(result.y, want)
    wrong = []

    def many():
        for _ in range(50):
            if not np.array_equal(client.attend(Q, K, V).y, want):
                wrong.append(1)

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- Caches -------------------------------------------------------------------------------------------


def step_in_process(q, k, v, **options):
    """attend() of a cache with tokens k and v, by rapt.attend in float64."""
    q, k, v = (x.swapaxes(0, 1)[None].astype(np.float64) for x in (q, k, v))
    result = rapt.attend(q, k, v, causal=True, alignment="bottom_right", lse=True, **options)
    return result.y[0].swapaxes(0, 1), result.lse[0].swapaxes(0, 1)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_random_operations_on_caches(client, dtype):
    """Two layers, of which every step is compared with the same tokens in process."""
    rng = np.random.default_rng(25)
    name = np.dtype(dtype).name
    shapes = [rapt.LayerShape(2, 8), rapt.LayerShape(1, 16, value_head_size=4)]
    sizes = [(2, 8, 8), (1, 16, 4)]

    def tokens(layer, n):
        heads, size, value_size = sizes[layer]
        return [rng.standard_normal((n, heads, s)).astype(dtype) for s in (size, value_size)]

    with contextlib.ExitStack() as stack:
        caches = [(stack.enter_context(client.create_cache(shapes, name)), [tokens(0, 0), tokens(1, 0)])]
        for number in range(120):
            cache, known = caches[rng.integers(len(caches))]
            layer, n = int(rng.integers(2)), int(rng.integers(1, 9))
            action = rng.integers(10)
            if action == 0 and len(caches) < 5:
                length = int(rng.integers(min(cache.lengths) + 1))
                fork = stack.enter_context(cache.fork(length))
                caches.append((fork, [[x[:length] for x in known[one]] for one in range(2)]))
            elif action == 1:
                length = int(rng.integers(min(cache.lengths) + 1))
                cache.truncate(length)
                known[:] = [[x[:length] for x in known[one]] for one in range(2)]
            elif action == 2:
                new = [tokens(one, n) for one in range(2)]
                results = cache.append_layers({one: tuple(new[one]) for one in range(2)})
                known[:] = [[np.concatenate(pair) for pair in zip(known[one], new[one])] for one in range(2)]
                assert [result.length for result in results] == [len(known[one][0]) for one in range(2)]
            else:
                new = tokens(layer, n)
                known[layer] = [np.concatenate(pair) for pair in zip(known[layer], new)]
                q = rng.standard_normal((n, 2 * sizes[layer][0], sizes[layer][1])).astype(dtype)
                result = cache.attend(layer, q, *new, lse=True)
                y, lse = step_in_process(q, *known[layer])
                assert_close(f"y {number}", result.y, y)
                assert_close(f"lse {number}", result.lse, lse, slack=LSE_SLACK[dtype])
                assert result.items[0].length == len(known[layer][0]) and result.y.dtype == dtype
            assert cache.lengths == [len(known[one][0]) for one in range(2)] == cache.info().lengths
            assert cache.info().generation == cache.generation


def test_options_of_a_step(client):
    q, k, v, sink = normal(5, 4, 8), normal(5, 2, 8), normal(5, 2, 8), normal(4)
    with client.create_cache(rapt.LayerShape(2, 8)) as cache:
        cache.append(0, k, v)
        for options in ({"scale": 0.7, "softcap": 2}, {"window": (2, None)}, {"head_sink": sink}):
            result = cache.attend(0, q, lse=True, share_prefix=False, **options)
            y, lse = step_in_process(q, k, v, **options)
            np.testing.assert_allclose(result.y, y, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(result.lse, lse, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(cache.attend(0, q[:2], position=0).y, step_in_process(q[:2], k[:2], v[:2])[0], atol=1e-6)
        assert cache.diagnose(0, q[:2], window=(1, None)).pairs == 4 * 2 * 5
        nothing = cache.attend(0, k=k, v=v)
        assert nothing.y is None and nothing.items[0].length == 10
    with client.create_cache(rapt.LayerShape(2, 8), "float16") as cache:
        half = [x.astype(np.float16) for x in (q, k, v)]
        assert cache.attend(0, *half, output="float32").y.dtype == np.float32
    with client.create_cache(rapt.LayerShape(2, 32), storage="int8") as cache:
        assert cache.info().storage == "int8" and cache.attend(0, *(normal(4, 2, 32) for _ in "qkv")).plan.endswith("INT8")


def test_a_batch_of_caches(client):
    with client.create_cache(rapt.LayerShape(2, 8)) as one, client.create_cache(rapt.LayerShape(2, 8)) as other:
        one.append(0, normal(3, 2, 8), normal(3, 2, 8))
        q, k, v = normal(5, 4, 8), normal(4, 2, 8), normal(4, 2, 8)
        items = [rapt.CacheItem(one, rows=2, new_tokens=1), rapt.CacheItem(other, rows=3, new_tokens=3)]
        result = client.attend_caches(0, items, q, k, v)
        assert one.lengths == [4] and other.lengths == [3] and [item.length for item in result.items] == [4, 3]
        first = [np.concatenate([normal(3, 2, 8), x[:1]]) for x in (k, v)]
        np.testing.assert_allclose(result.y[:2], step_in_process(q[:2], *first)[0], atol=1e-6)
        np.testing.assert_allclose(result.y[2:], step_in_process(q[2:], k[1:], v[1:])[0], atol=1e-6)
        with pytest.raises(ValueError, match=r"items\[0\] is a cache of another client"):
            with rapt.Client("http://127.0.0.1:1") as stranger:
                stranger.attend_caches(0, items, q, k, v)
        with pytest.raises(ValueError, match="rows is 4294967298; it must be from -2147483648 to 2147483647"):
            client.attend_caches(0, [rapt.CacheItem(one, rows=2**32 + 2)], q[:2])


def test_an_update_of_caches(client):
    k, v = normal(4, 2, 8), normal(4, 2, 8)
    one, other = [client.create_cache(rapt.LayerShape(2, 8)) for _ in range(2)]
    one.append(0, k, v)
    forks = client.update_caches(forks=[one, other, one], truncates=[(one, 3)], closes=[other])
    assert [fork.lengths for fork in forks] == [[4], [0], [4]] and one.lengths == [3] and one.generation == 2
    assert [fork.shapes for fork in forks] == [one.shapes] * 3
    np.testing.assert_allclose(forks[2].attend(0, k[:1]).y, step_in_process(k[:1], k, v)[0], atol=1e-6)
    assert one.append(0, k[:1], v[:1]).length == 4
    with pytest.raises(ValueError, match="the cache was closed or released"):
        client.update_caches(forks=[other])
    assert client.update_caches(closes=forks) == []
    assert {cache.id for cache in client.list_caches("drawn-")} == {one.id}
    # The second truncation fails: there is no fork, and the first one stays.
    with pytest.raises(ValueError, match="length is 9; layer 0 has 4 tokens"):
        client.update_caches(forks=[one], truncates=[(one, 9)])
    assert [cache.id for cache in client.list_caches("drawn-")] == [one.id] and one.info().lengths == [4]
    with pytest.raises(ValueError, match=r"truncates\[1\].cache occurs twice"):
        client.update_caches(truncates=[(one, 3), (one, 2)])
    assert one.info().lengths == [4]
    one.close()
    with rapt.Client("http://127.0.0.1:1") as stranger, pytest.raises(ValueError, match="is of another client"):
        stranger.update_caches(closes=[one])


def test_an_update_of_more_caches_than_a_call_takes(client):
    caches = [client.create_cache(rapt.LayerShape(1, 1)) for _ in range(600)]
    forks = client.update_caches(forks=caches, truncates=[(cache, 0) for cache in caches], closes=caches)
    assert {info.id for info in client.list_caches("drawn-")} == {fork.id for fork in forks}
    client.update_caches(closes=forks)


def test_tensors_of_pytorch_and_dlpack_as_tokens(client):
    with client.create_cache(rapt.LayerShape(2, 8)) as cache:
        result = cache.attend(0, InNamespace(normal(3, 2, 8)), Producer(normal(3, 2, 8)), spread(normal(3, 2, 8), (0, 1)))
        assert isinstance(result.y, InNamespace)


@pytest.mark.parametrize("proxy_of", (LossyProxy, LossyGrpcProxy), ids=("http", "grpc"))
@pytest.mark.parametrize("lost", ([1], [1, 2, 3], [0], [2], [3], [4], [7], [9]))
def test_a_lost_answer_changes_nothing(server, lost, proxy_of):
    """The answer is lost after the server has made the cache, appended, attended, forked, truncated, closed or updated."""
    k, v = normal(4, 2, 8), normal(4, 2, 8)
    with proxy_of(server, lost) as proxy, rapt.Client(proxy.url, retries=QUICK) as client:
        cache = client.create_cache(rapt.LayerShape(2, 8))
        appended = cache.append(0, k[:3], v[:3])
        assert appended.length == 3 and appended.applied_before == (1 in lost)
        result = cache.attend(0, k[3:], k[3:], v[3:])
        np.testing.assert_allclose(result.y, step_in_process(k[3:], k, v)[0], atol=1e-6)
        fork = cache.fork()
        cache.truncate(2)
        assert cache.info().lengths == [2] and cache.generation == 2
        assert fork.info().lengths == [4]
        [last] = client.update_caches(forks=[fork], truncates=[(cache, 1)], closes=[fork])
        assert last.info().lengths == [4] and cache.lengths == [1]
        cache.close()
        last.close()
        assert proxy.answers >= len(lost) + 10 and not client.list_caches("drawn-")


def test_a_call_can_be_made_again_after_its_failure(server):
    """The first answers are lost; the same call then gives it."""
    k, v = normal(4, 2, 8), normal(4, 2, 8)
    with LossyProxy(server, [1, 2]) as proxy:
        with rapt.Client(proxy.url, retries=rapt.Retry(attempts=1)) as client, client.create_cache(rapt.LayerShape(2, 8)) as cache:
            with pytest.raises(ConnectionError):
                cache.append(0, k, v)
            assert cache.lengths == [0]
            assert cache.append(0, k, v) == rapt._caches.Appended(4, True) and cache.lengths == [4]


def test_names(client):
    shape = rapt.LayerShape(2, 8)
    with client.create_cache(shape, name="prompt 1") as cache:
        cache.append(0, normal(3, 2, 8), normal(3, 2, 8))
        again = client.create_cache(shape, name="prompt 1")
        assert again.id == cache.id and again.lengths == [3]
        assert again.release() == cache.id
        with pytest.raises(rapt.errors.Conflict, match="prompt 1"):
            client.create_cache(shape, "float16", name="prompt 1")
        assert [info.id for info in client.list_caches("prompt")] == [cache.id]
        borrowed = client.open_cache(client.list_caches("prompt")[0])
        assert borrowed.append(0, normal(1, 2, 8), normal(1, 2, 8)).length == 4
        with borrowed:
            pass  # is not closed
        assert cache.info().lengths == [4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda cache: cache.append(1, normal(1, 2, 8), normal(1, 2, 8)), ValueError, "layer is 1; the cache has 1 layers"),
        (lambda cache: cache.append(0, normal(2, 8), normal(2, 8)), ValueError, r"k has shape \[2, 8\]; it must be"),
        (lambda cache: cache.append(0, normal(1, 3, 8), normal(1, 3, 8)), ValueError, "k"),
        (lambda cache: cache.attend(0, normal(1, 3, 8)), ValueError, "q"),
        (lambda cache: cache.attend(0, normal(1, 2, 8), causal=True), TypeError, "there is no option causal"),
        (lambda cache: cache.attend(0, normal(1, 2, 8), output="int8"), ValueError, "output is 'int8'"),
        (lambda cache: cache.fork(9), ValueError, "9"),
        (lambda cache: cache.fork(np.float32(0)), TypeError, r"length is np.float32\(0.0\); it must be an integer"),
        (lambda cache: cache.truncate(9), ValueError, "9"),
        (lambda cache: cache.truncate(0.5), TypeError, "length is 0.5; it must be an integer"),
        (lambda cache: cache.attend(0), ValueError, "rows"),
    ),
)
def test_wrong_calls_of_a_cache(client, call, error, message):
    with client.create_cache(rapt.LayerShape(2, 8)) as cache:
        with pytest.raises(error, match=message):
            call(cache)
        assert cache.lengths == cache.info().lengths == [0]


def test_a_closed_cache(client):
    cache = client.create_cache(rapt.LayerShape(2, 8))
    other = client.open_cache(cache.info())
    cache.close()
    for call in (cache.info, cache.close, cache.fork, lambda: cache.append(0, normal(1, 2, 8), normal(1, 2, 8))):
        with pytest.raises(ValueError, match="the cache was closed or released"):
            call()
    with pytest.raises(LookupError) as caught:
        other.append(0, normal(1, 2, 8), normal(1, 2, 8))
    assert caught.value.reason == "closed" and type(caught.value) is rapt.errors.NotFound
    other.close()


def test_a_list_of_many_caches(client):
    """Of more than a page; their names have characters that a path has not."""
    made = [client.create_cache(rapt.LayerShape(1, 1), name=f"many & ü {number}") for number in range(1003)]
    assert [info.id for info in client.list_caches("many & ü")] == [cache.id for cache in made]
    for cache in made:
        cache.close()


def test_conflicts_have_a_reason(client):
    k, v = normal(2, 2, 8), normal(2, 2, 8) + 1
    with client.create_cache(rapt.LayerShape(2, 8)) as cache:
        stale = client.open_cache(cache.info())
        cache.append(0, k, v)
        with pytest.raises(rapt.errors.Conflict) as caught:
            stale.append(0, v, k)
        assert caught.value.reason == "conflict"
        cache.truncate(0)
        with pytest.raises(rapt.errors.Conflict) as caught:
            stale.append(0, k, v)
        assert caught.value.reason == "generation"


def is_there(client, name):
    return bool(client.list_caches(name))


def test_leases_are_renewed_while_the_handle_lives(client):
    """Also of a handle that is dropped after its lease was renewed."""
    released, dropped, unused = [
        client.create_cache(rapt.LayerShape(2, 8), name=name, lease=5) for name in ("released", "dropped", "unused")
    ]
    del unused
    poll(lambda: not is_there(client, "unused"))  # longer than a lease
    assert is_there(client, "released") and is_there(client, "dropped")
    assert released.renew().lease_ms == 5000
    released.release()
    del dropped
    poll(lambda: not is_there(client, "released") and not is_there(client, "dropped"))


def test_an_expired_cache_says_so(client):
    cache = client.create_cache(rapt.LayerShape(2, 8), name="expired", lease=0.1)
    # Without a call, before which the lease could end.
    info = CacheInfo(cache.id, shapes=cache.shapes, lengths=cache.lengths, generation=cache.generation, lease_ms=100)
    other = client.open_cache(info)
    cache.release()
    poll(lambda: not is_there(client, "expired"))
    with pytest.raises(LookupError) as caught:
        other.attend(0, normal(1, 2, 8), normal(1, 2, 8), normal(1, 2, 8))
    assert caught.value.reason == "expired"


@pytest.mark.parametrize("transport", ("http", "grpc"))
def test_a_server_without_caches(transport):
    with RaptServer() as running, rapt.Client(url_of(running, transport)) as client:
        with pytest.raises(NotImplementedError, match="--kv_cache_bytes"):
            client.create_cache(rapt.LayerShape(2, 8))
        assert client.info().caches is None


def test_caches_of_asyncio(url):
    async def run():
        async with rapt.AsyncClient(url) as client:
            async with await client.create_cache(rapt.LayerShape(2, 8), name="async") as cache:
                await cache.append(0, normal(3, 2, 8), normal(3, 2, 8))
                fork = await cache.fork(2)
                assert (await fork.info()).lengths == [2] and fork.handle.lengths == [2]
                result = await cache.attend(0, normal(1, 2, 8), normal(1, 2, 8), normal(1, 2, 8))
                assert result.items[0].length == 4
                item = rapt.CacheItem(cache.handle, rows=1)
                assert (await client.attend_caches(0, [item], normal(1, 2, 8))).y.shape == (1, 2, 8)
                [last] = await client.update_caches(forks=[fork], truncates=[(cache, 1)], closes=[fork])
                assert last.handle.lengths == [2] and cache.handle.lengths == [1]
                await last.close()
            return await client.list_caches("async")

    assert asyncio.run(run()) == []


# --- TLS and tokens -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")
    openssl("req", "-x509", *curve, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    (folder / "names").write_text("subjectAltName=DNS:rapt.example,IP:127.0.0.1")
    for name in ("server", "alice"):
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1",
                "-out", f"{name}.crt", "-extfile", "names")  # fmt: skip
    digest = subprocess.run(["sha256sum"], input=b"t0k3n", capture_output=True, check=True).stdout.split()[0].decode()
    (folder / "tokens").write_text(f"alice {digest}\n")
    return folder


@pytest.mark.parametrize("transport", ("http", "grpc"))
def test_tls_with_a_certificate_and_a_token(files, transport):
    flags = [f"--tls_cert={files}/server.crt", f"--tls_key={files}/server.key", f"--tls_client_ca={files}/ca.crt"]
    mine = {"ca": files / "ca.crt", "cert": files / "alice.crt", "key": files / "alice.key"}
    with RaptServer(*flags, f"--token_file={files}/tokens", "--kv_cache_bytes=67108864") as running:
        url = url_of(running, transport).replace("://", "s://")
        with rapt.Client(url, token="t0k3n", **mine) as client:
            np.testing.assert_array_equal(client.attend(Q, K, V).y, rapt.attention(Q, K, V))
            x = normal(1, 64, 512, 64)
            np.testing.assert_array_equal(client.attend(x[:, :, :1], x, x).y, rapt.attention(x[:, :, :1], x, x))
            with client.create_cache(rapt.LayerShape(2, 8)) as cache:
                assert cache.append(0, normal(3, 2, 8), normal(3, 2, 8)).length == 3
        with rapt.Client(url, token="t0k3n", server_name="rapt.example", **mine) as client:
            assert client.info().version == rapt.__version__
        with rapt.Client(url, token="wrong", **mine) as client, pytest.raises(PermissionError) as caught:
            client.attend(Q, K, V)
        assert caught.value.status == 401
        with rapt.Client(url, token="t0k3n", ca=mine["ca"], retries=QUICK, timeout=5) as client:
            with pytest.raises(ConnectionError):
                client.info()
        with rapt.Client(url, token="t0k3n", server_name="other", **mine) as client:
            with pytest.raises(ConnectionError, match="Hostname mismatch|Hostname Verification Check failed"):
                client.info()
