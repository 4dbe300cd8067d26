"""perf_analyzer and ghz, unmodified, against the built server. Their measurements are ignored."""

import base64
import glob
import json
import os
import subprocess

import numpy as np
import pytest
from rapt_server import RaptServer

ENVIRONMENT = os.environ["RAPT_PERF_ANALYZER_ENV"]
PERF_ANALYZER = ENVIRONMENT + "/bin/perf_analyzer"
# perf_analyzer is linked with the CUDA runtime, although CUDA is not used here.
(CUDA_RUNTIME,) = glob.glob(ENVIRONMENT + "/lib/python3*/site-packages/nvidia/cuda_runtime/lib")
WITH_CUDA_RUNTIME = {**os.environ, "LD_LIBRARY_PATH": CUDA_RUNTIME}

RNG = np.random.default_rng(8)

# With shared memory, perf_analyzer needs every input, including optional ones.
INPUTS = {
    "Q": RNG.standard_normal((1, 2, 16, 32), np.float32),
    "K": RNG.standard_normal((1, 2, 16, 32), np.float32),
    "V": RNG.standard_normal((1, 2, 16, 32), np.float32),
    "attn_mask": np.ones((1, 1, 16, 32), np.bool_),
    "past_key": RNG.standard_normal((1, 2, 16, 32), np.float32),
    "past_value": RNG.standard_normal((1, 2, 16, 32), np.float32),
    "nonpad_kv_seqlen": np.array([16], np.int64),
    "attention_bias": RNG.standard_normal((1, 1, 16, 32), np.float32),
    "head_sink": RNG.standard_normal(2, np.float32),
}
REQUIRED = ("Q", "K", "V")


@pytest.fixture(scope="module")
def server():
    # perf_analyzer names its shared memory after the model's tensors.
    with RaptServer("--allow_shared_memory", "--shared_memory_prefix=") as running:
        yield running


def tensor(array):
    return {"content": {"b64": base64.b64encode(array.tobytes()).decode()}, "shape": list(array.shape)}


def run(command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("interface", ["grpc", "http"])
@pytest.mark.parametrize(
    "names,shared_memory",
    [(REQUIRED, "none"), (INPUTS, "none"), (INPUTS, "system")],
    ids=["required inputs", "all inputs", "shared memory"],
)
def test_perf_analyzer(server, tmp_path, names, shared_memory, interface):
    address = server.grpc_address if interface == "grpc" else server.http_address
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{name: tensor(INPUTS[name]) for name in names}]}))
    report = tmp_path / "report.csv"
    shapes = [f"--shape={name}:{','.join(map(str, INPUTS[name].shape))}" for name in names]
    printed = run(
        [
            PERF_ANALYZER,
            "-m", "attention", "-i", interface, "-u", address,
            f"--input-data={data}", *shapes,
            f"--shared-memory={shared_memory}", "--output-shared-memory-size=65536",
            "--measurement-mode=count_windows", "--measurement-request-count=50",
            "--measurement-interval=200", "--max-trials=3", "--stability-percentage=999",
            "-f", str(report),
        ],
        env=WITH_CUDA_RUNTIME,
    )  # fmt: skip
    # perf_analyzer compares the server's statistics with its own counts.
    assert "Server:" in printed and "compute infer" in printed, printed
    header, row = report.read_text().strip().splitlines()
    measured = dict(zip(header.split(","), row.split(",")))
    assert float(measured["Inferences/Second"]) > 0


def test_perf_analyzer_streams(server, tmp_path):
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{name: tensor(INPUTS[name]) for name in REQUIRED}]}))
    shapes = [f"--shape={name}:{','.join(map(str, INPUTS[name].shape))}" for name in REQUIRED]
    printed = run(
        [
            PERF_ANALYZER,
            "-m", "attention", "-i", "grpc", "-u", server.grpc_address, "--streaming", "--async",
            f"--input-data={data}", *shapes,
            "--measurement-mode=count_windows", "--measurement-request-count=50",
            "--measurement-interval=200", "--max-trials=3", "--stability-percentage=999",
        ],
        env=WITH_CUDA_RUNTIME,
    )  # fmt: skip
    assert "Request count:" in printed, printed


def test_ghz(server, tmp_path):
    # ghz expands payloads as templates, so they must be fixed and small.
    zeros = {"datatype": "FP32", "shape": [1, 1, 2, 2], "contents": {"fp32_contents": [0, 0, 0, 4]}}
    request = {"model_name": "attention", "inputs": [{"name": name, **zeros} for name in "QKV"]}
    report = json.loads(
        run(
            [
                os.environ["RAPT_TOOLS"] + "/ghz",
                "--insecure", "--call=inference.GRPCInferenceService.ModelInfer",
                f"--data={json.dumps(request)}", "--total=200", "--concurrency=8", "--format=json",
                server.grpc_address,
            ]
        )
    )  # fmt: skip
    assert report["count"] == 200
    assert report["statusCodeDistribution"] == {"OK": 200}
