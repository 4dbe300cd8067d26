"""KServe's own Python client, REST and gRPC, against a running server. It has an environment of its own, because its
messages and those of tritonclient have the same names: a process can load only one of the two."""

import asyncio

import grpc
import httpx
import numpy as np
import pytest
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.errors import UnsupportedProtocol
from kserve.protocol.infer_type import RequestedOutput
from rapt_server import RaptServer

DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "int64": "INT64"}
RNG = np.random.default_rng(45)


@pytest.fixture(scope="module")
def server():
    with RaptServer() as running:
        yield running


@pytest.fixture(params=["rest", "grpc"])
def connect(request, server):
    """Returns a function that calls a client's method, with the address and the model's name where REST takes them."""

    async def rest(method, *arguments, model=None):
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            names = {} if model is None else {"model_name": model}
            return await getattr(client, method)(f"http://{server.http_address}", *arguments, **names)

    async def over_grpc(method, *arguments, model=None):
        async with InferenceGRPCClient(server.grpc_address) as client:
            names = {"model_name": model} if method == "is_model_ready" else {}
            return await getattr(client, method)(*arguments, **names)

    call = rest if request.param == "rest" else over_grpc

    def run(*arguments, **options):
        return asyncio.run(call(*arguments, **options))

    run.is_rest = request.param == "rest"
    return run


def to_input(name, array, binary=True):
    tensor = InferInput(name, list(array.shape), DATATYPES[str(array.dtype)])
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def infer(connect, arrays, binary=True, model="attention", outputs=None, parameters=None):
    inputs = [to_input(name, array, binary) for name, array in arrays.items()]
    request = InferRequest(
        model_name=model, infer_inputs=inputs, request_id="7", parameters=parameters, request_outputs=outputs
    )
    response = connect("infer", request, model=model)
    assert (response.id, response.model_name) == ("7", model)
    return {output.name: output.as_numpy() for output in response.outputs}


def qkv(dtype=np.float32, shape=(1, 2, 5, 8)):
    return {name: RNG.standard_normal(shape).astype(dtype) for name in "QKV"}


def attention(Q, K, V, attn_mask=True):
    scores = np.where(attn_mask, Q.astype(float) @ K.astype(float).swapaxes(-1, -2) / np.sqrt(Q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ V.astype(float)


# --- Inference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float64, 1e-12), (np.float16, 2e-3)])
def test_binary_tensors(connect, dtype, tolerance):
    arrays = qkv(dtype)
    y = infer(connect, arrays)["Y"]
    assert y.dtype == dtype
    np.testing.assert_allclose(y, attention(**arrays), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers(connect, dtype):
    arrays = qkv(dtype)
    np.testing.assert_array_equal(infer(connect, arrays, binary=False)["Y"], infer(connect, arrays)["Y"])


@pytest.mark.parametrize("binary", [True, False])
def test_a_mask_and_lengths(connect, binary):
    arrays = qkv() | {"attn_mask": np.tri(5, dtype=bool)}
    np.testing.assert_allclose(infer(connect, arrays, binary)["Y"], attention(**arrays), rtol=0, atol=1e-6)
    lengths = {"nonpad_kv_seqlen": np.array([3])}
    short = {name: array[:, :, :3] if name in "KV" else array for name, array in arrays.items() if name in "QKV"}
    got = infer(connect, {name: arrays[name] for name in "QKV"} | lengths, binary)["Y"]
    np.testing.assert_allclose(got, attention(**short), rtol=0, atol=1e-6)


def test_empty_tensors(connect):
    assert infer(connect, qkv(shape=(0, 1, 3, 4)))["Y"].shape == (0, 1, 3, 4)


def test_parameters(connect):
    arrays = qkv()
    want = attention(**arrays, attn_mask=np.tri(5, dtype=bool))
    for parameters in ({"is_causal": True}, {"is_causal": 1, "binary_data_output": True, "content_type": "np"}):
        np.testing.assert_allclose(infer(connect, arrays, parameters=parameters)["Y"], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("binary", [True, False])
def test_requested_outputs(connect, binary):
    outputs = [RequestedOutput(name, {"binary_data": binary, "content_type": "np"}) for name in ("lse", "Y")]
    got = infer(connect, qkv(), outputs=outputs)
    assert list(got) == ["lse", "Y"]
    assert (got["lse"].shape, got["Y"].shape) == ((1, 2, 5), (1, 2, 5, 8))


def test_another_model(connect):
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    assert infer(connect, {"X": x}, model="positional_encoding")["Y"].shape == x.shape


# --- The other methods ----------------------------------------------------------------------------


def test_health(connect):
    assert connect("is_server_live") is True
    assert connect("is_server_ready") is True
    assert connect("is_model_ready", model="attention") is True
    assert connect("is_model_ready", model="transformer") is False


def test_errors(connect):
    for model, arrays, code, text in (
        ("transformer", qkv(), 404, "unknown model 'transformer'; this server has 'attention', "),
        ("attention", {"Q": qkv()["Q"]}, 400, "is missing"),
    ):
        error = httpx.HTTPStatusError if connect.is_rest else grpc.RpcError
        with pytest.raises(error) as caught:
            infer(connect, arrays, model=model)
        if connect.is_rest:
            assert caught.value.response.status_code == code and text in str(caught.value)
        else:
            want = {404: grpc.StatusCode.NOT_FOUND, 400: grpc.StatusCode.INVALID_ARGUMENT}[code]
            assert caught.value.code() == want and text in caught.value.details()


def test_the_older_protocol_is_not_served(server):
    """Its explanations are the only other method of the client."""

    async def ask(protocol, method, *arguments):
        async with InferenceRESTClient(RESTConfig(protocol=protocol)) as client:
            return await getattr(client, method)(f"http://{server.http_address}", *arguments)

    with pytest.raises(httpx.HTTPStatusError, match="404"):
        asyncio.run(ask("v1", "is_model_ready", "attention"))
    with pytest.raises(UnsupportedProtocol):
        asyncio.run(ask("v2", "explain", "attention", {}))
