"""CUDA shared memory with tritonclient, on a server with a fake GPU.

The handles of the fake GPU are names of POSIX shared memory objects, which represent the GPU's memory and which the
server accesses by copies only. tritonclient.utils.cuda_shared_memory itself needs a GPU.
"""

import base64
import contextlib
import os

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from attention_client import attend, check_shared_memory, shared_inputs
from rapt_server import RaptServer
from tritonclient.utils import InferenceServerException

RNG = np.random.default_rng(8)
HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t


@pytest.fixture(scope="module")
def server():
    with RaptServer(
        "--allow_shared_memory",
        "--cudnn_memory_bytes=67108864",
        "--cudnn_min_flops=10000000000",
        program="RAPT_SERVER_WITH_FAKE_GPU",
    ) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected
        connected.unregister_cuda_shared_memory()


def handle_of(name):
    """Like tritonclient.utils.cuda_shared_memory.get_raw_handle()."""
    return base64.b64encode(f"/gpu-{os.getpid()}-{name}".encode().ljust(HANDLE_BYTES, b"\0"))


@contextlib.contextmanager
def memory(client, name, byte_size):
    """GPU memory, registered under its name."""
    region = shm.create_shared_memory_region(name, f"gpu-{os.getpid()}-{name}", byte_size, create_only=True)
    try:
        client.register_cuda_shared_memory(name, handle_of(name), 0, byte_size)
        yield region
    finally:
        client.unregister_cuda_shared_memory(name)
        shm.destroy_shared_memory_region(region)


def tensors(dtype):
    return {
        "Q": RNG.standard_normal((2, 4, 65, 32), np.float32).astype(dtype),
        "K": RNG.standard_normal((2, 2, 33, 32), np.float32).astype(dtype),
        "V": RNG.standard_normal((2, 2, 33, 32), np.float32).astype(dtype),
        "attn_mask": RNG.random((65, 33)) < 0.7,
        "nonpad_kv_seqlen": np.array([33, 20]),
    }


def refused(code, call, *arguments, **named):
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    assert caught.value.status() == f"StatusCode.{code.name}"
    return caught.value.message()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tensors_in_gpu_memory_give_the_same_bits(client, dtype):
    arrays = tensors(dtype)
    total = sum(array.nbytes for array in arrays.values())
    with memory(client, "in", total) as source, memory(client, "out", 1 << 20) as sink:
        check_shared_memory(client, arrays, source, sink)


def test_regions_are_listed_and_unregistered(client):
    assert "cuda_shared_memory" in client.get_server_metadata().extensions
    with memory(client, "a", 4096), memory(client, "b", 8192):
        regions = client.get_cuda_shared_memory_status().regions
        assert {name: (region.device_id, region.byte_size) for name, region in regions.items()} == {
            "a": (0, 4096),
            "b": (0, 8192),
        }
        assert not client.get_system_shared_memory_status().regions
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory("a")
        assert list(client.get_cuda_shared_memory_status().regions) == ["b"]
        refused(grpc.StatusCode.NOT_FOUND, client.get_cuda_shared_memory_status, "a")
        client.unregister_cuda_shared_memory()
        assert not client.get_cuda_shared_memory_status().regions


def test_invalid_registrations_are_rejected(client):
    with memory(client, "mine", 4096):
        register = client.register_cuda_shared_memory
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        assert "'other'" in refused(invalid, register, "other", handle_of("nowhere"), 0, 4096)
        refused(invalid, register, "other", handle_of("mine"), 1, 4096)
        refused(invalid, register, "other", handle_of("mine"), 0, 4097)
        refused(grpc.StatusCode.ALREADY_EXISTS, register, "mine", handle_of("mine"), 0, 4096)


def test_a_tensor_must_lie_within_its_region(client):
    arrays = tensors(np.float32)
    with memory(client, "small", 4096):
        message = refused(
            grpc.StatusCode.INVALID_ARGUMENT, client.infer, "attention", shared_inputs(arrays, "small")
        )
        assert "input Q: region 'small'" in message and "4096" in message
    refused(grpc.StatusCode.NOT_FOUND, client.infer, "attention", shared_inputs(arrays, "small"))


def test_over_http_tensors_in_gpu_memory_give_the_same_bits(server, client):
    arrays = tensors(np.float32)
    with memory(client, "in", sum(array.nbytes for array in arrays.values())) as source, memory(client, "out", 1 << 20) as sink:
        want = attend(client, arrays, ["Y"])["Y"]
        shm.set_shared_memory_region(source, list(arrays.values()))
        with tritonclient.http.InferenceServerClient(server.http_address) as http:
            y = tritonclient.http.InferRequestedOutput("Y")
            y.set_shared_memory("out", want.nbytes, 4096)
            inputs = shared_inputs(arrays, "in", tritonclient.http)
            answer = http.infer("attention", inputs, outputs=[y]).get_response()
        assert answer["outputs"][0]["shape"] == list(want.shape) and "data" not in answer["outputs"][0]
        np.testing.assert_array_equal(shm.get_contents_as_numpy(sink, np.float32, want.shape, 4096), want)


def test_over_http_regions_are_registered_listed_and_removed(server, client):
    region = shm.create_shared_memory_region("http", f"gpu-{os.getpid()}-http", 4096, create_only=True)
    try:
        with tritonclient.http.InferenceServerClient(server.http_address) as http:
            http.register_cuda_shared_memory("http", handle_of("http"), 0, 4096)
            want = {"name": "http", "device_id": 0, "byte_size": 4096}
            assert http.get_cuda_shared_memory_status() == [want] == http.get_cuda_shared_memory_status("http")
            assert list(client.get_cuda_shared_memory_status().regions) == ["http"]
            for handle, device, size, code in ((handle_of("nowhere"), 0, 4096, "400"), (handle_of("http"), 1, 4096, "400")):
                with pytest.raises(InferenceServerException) as caught:
                    http.register_cuda_shared_memory("other", handle, device, size)
                assert caught.value.status() == code
            http.unregister_cuda_shared_memory("http")
            assert http.get_cuda_shared_memory_status() == []
            with pytest.raises(InferenceServerException) as caught:
                http.get_cuda_shared_memory_status("http")
            assert caught.value.status() == "404"
    finally:
        shm.destroy_shared_memory_region(region)
