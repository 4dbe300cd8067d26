"""How a server with a fake GPU reports calls that the GPU did not compute alone."""

import os
import re
import signal
import subprocess
import urllib.request

import grpc
import numpy as np
import pytest
from attention_client import to_input
from rapt_server import STOP_SECONDS, RaptServer
from tritonclient.grpc import service_pb2, service_pb2_grpc


@pytest.fixture(scope="module")
def server():
    with RaptServer(
        "--backend=cudnn", "--cudnn_memory_bytes=67108864", program="RAPT_SERVER_WITH_FAKE_GPU"
    ) as running:
        yield running


def infer(server, inputs):
    """Returns the response and the backend in its trailing metadata."""
    tensors = [to_input(name, array) for name, array in inputs.items()]
    request = service_pb2.ModelInferRequest(
        model_name="attention",
        inputs=[tensor._get_tensor() for tensor in tensors],
        raw_input_contents=[tensor._get_content() for tensor in tensors],
    )
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response, call = stub.ModelInfer.with_call(request)
    return response, dict(call.trailing_metadata())["rapt-backend"]


def backend_of(server, value):
    """Returns the backend of a call whose result is `value` everywhere."""
    inputs = dict.fromkeys("QK", np.ones((1, 2, 9, 8), np.float32))
    response, backend = infer(server, inputs | {"V": np.full((1, 2, 9, 8), value, np.float32)})
    assert np.frombuffer(response.raw_output_contents[0], np.float32)[0] == pytest.approx(value, nan_ok=True)
    return backend


def metric(server, name, **labels):
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as page:
        lines = page.read().decode().splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    series = [line for line in lines if line.startswith(f"{name}{{") and all(w in line for w in wanted)]
    assert len(series) == 1, series
    return float(re.search(r" (\S+)$", series[0]).group(1))


def test_a_call_reports_a_cpu_fallback(server):
    fallbacks = {"from": "cudnn", "to": "cpu", "reason": "stand_in"}
    assert backend_of(server, 2.5) == "cudnn"
    assert metric(server, "rapt_device_stand_in_pieces_total", reason="numbers") == 0
    assert backend_of(server, np.nan) == "cudnn+cpu"
    assert metric(server, "rapt_device_stand_in_pieces_total", reason="numbers") == 1
    assert metric(server, "rapt_backend_fallback_total", **fallbacks) == 1
    assert metric(server, "rapt_device_stand_in_pieces_total", reason="device") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_probes_its_gpu(number):
    program = os.environ["RAPT_SERVER_WITH_FAKE_GPU"]
    server = subprocess.Popen(
        [program, "--backend=cudnn", "--cudnn_libraries=stuck"], stderr=subprocess.PIPE, text=True
    )
    # After warnings, of the variables that this test reads.
    trials = (re.fullmatch(r"trial in process (\d+)\n", line) for line in iter(server.stderr.readline, ""))
    child = int(next(trial for trial in trials if trial).group(1))
    server.send_signal(number)
    _, log = server.communicate(timeout=STOP_SECONDS)
    assert server.returncode == 0
    assert "a signal interrupted the GPU probe" in log
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_auto_offloads_by_measured_speed():
    def backend(server, length):
        inputs = dict.fromkeys("QKV", np.ones((1, 1, length, 128), np.float32))
        return infer(server, inputs)[1]

    # The fake GPU computes in no time, so only copies take time.
    idle = ["--cudnn_memory_bytes=67108864", "--cudnn_libraries=idle", "--cudnn_warm_plans=1x1x4096x128 fp32"]
    with RaptServer(*idle, program="RAPT_SERVER_WITH_FAKE_GPU") as server:
        assert "device and cpu measured" in server.read_log()
        assert backend(server, 4) == "cpu"
        assert backend(server, 4096) == "cudnn"
    with RaptServer(*idle, "--cudnn_min_flops=1000000000000", program="RAPT_SERVER_WITH_FAKE_GPU") as server:
        assert "measured" not in server.read_log(), "a configured threshold replaces the measurement"
        assert backend(server, 4096) == "cpu"
