"""Triton's shared memory utilities, sync and aio, against a server that allows it."""

import asyncio
import contextlib
import os

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from attention_client import attend, check_shared_memory, shared_inputs
from rapt_server import RaptServer
from tritonclient.utils import InferenceServerException

RNG = np.random.default_rng(8)


@pytest.fixture(scope="module")
def server():
    with RaptServer("--allow_shared_memory") as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected
        connected.unregister_system_shared_memory()


@contextlib.contextmanager
def region(name, byte_size):
    """A shared memory region; its object is destroyed at the end."""
    handle = shm.create_shared_memory_region(name, f"rapt-{os.getpid()}-{name}", byte_size, create_only=True)
    try:
        yield handle
    finally:
        shm.destroy_shared_memory_region(handle)


def key_of(name):
    return f"/rapt-{os.getpid()}-{name}"


def tensors(dtype=np.float32):
    return {
        "Q": RNG.standard_normal((1, 4, 65, 32), np.float32).astype(dtype),
        "K": RNG.standard_normal((1, 2, 33, 32), np.float32).astype(dtype),
        "V": RNG.standard_normal((1, 2, 33, 32), np.float32).astype(dtype),
        "attn_mask": RNG.random((65, 33)) < 0.7,
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_tensors_in_shared_memory_give_the_same_bits(client, dtype):
    arrays = tensors(dtype)
    total = sum(array.nbytes for array in arrays.values())
    with region("in", total) as source, region("out", 1 << 20) as sink:
        client.register_system_shared_memory("in", key_of("in"), total)
        client.register_system_shared_memory("out", key_of("out"), 1 << 20)
        check_shared_memory(client, arrays, source, sink)


def test_aio_client(server):
    arrays = tensors()

    async def ask(bytes_in):
        async with triton_aio.InferenceServerClient(server.grpc_address) as client:
            await client.register_system_shared_memory("aio", key_of("aio"), bytes_in)
            status = await client.get_system_shared_memory_status("aio")
            result = await client.infer("attention", shared_inputs(arrays, "aio"))
            await client.unregister_system_shared_memory("aio")
            return status.regions["aio"].byte_size, result.as_numpy("Y")

    bytes_in = sum(a.nbytes for a in arrays.values())
    with region("aio", bytes_in) as source:
        shm.set_shared_memory_region(source, list(arrays.values()))
        registered, got = asyncio.run(ask(bytes_in))
    assert registered == bytes_in
    with triton.InferenceServerClient(server.grpc_address) as client:
        np.testing.assert_array_equal(got, attend(client, arrays, ["Y"])["Y"])


def test_announces_the_extension(client):
    assert "system_shared_memory" in client.get_server_metadata().extensions
    assert "cuda_shared_memory" not in client.get_server_metadata().extensions


def test_unregisters_all_regions_and_rejects_cuda(client):
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    assert not client.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException) as caught:
        client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 1)
    assert caught.value.status() == f"StatusCode.{grpc.StatusCode.UNIMPLEMENTED.name}"


def test_an_unknown_region_is_not_found(client):
    arrays = tensors()
    with pytest.raises(InferenceServerException) as caught:
        client.infer("attention", shared_inputs(arrays, "nowhere"))
    assert caught.value.status() == f"StatusCode.{grpc.StatusCode.NOT_FOUND.name}"
    assert "nowhere" in caught.value.message()


def test_objects_without_the_prefix_are_rejected_without_revealing_keys(client):
    with pytest.raises(InferenceServerException) as caught:
        client.register_system_shared_memory("mine", "/somebody_elses", 4096)
    assert caught.value.status() == f"StatusCode.{grpc.StatusCode.INVALID_ARGUMENT.name}"
    assert "somebody" not in caught.value.message()
