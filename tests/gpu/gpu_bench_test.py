"""`./dev bench gpu` on a model of a GPU (modelled_device.cc), so that it is tested without a device.

gpu_probe and gpu_bench.py are the real ones; rapt-server computes on the CPU here.
"""

import math
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import gpu_bench  # noqa: E402


@pytest.fixture
def programs(tmp_path):
    for variable, name in (("RAPT_GPU_PROBE", "gpu_probe"), ("RAPT_SERVER", "rapt-server"), ("RAPT_LOAD", "rapt-load")):
        (tmp_path / name).symlink_to(os.environ[variable])
    return tmp_path


def bench(programs, *arguments, libraries="here"):
    command = [sys.executable, "-B", ROOT / "bench/gpu_bench.py", "--quick", "--backend=cpu", f"--bin={programs}"]
    environment = {**os.environ, "RAPT_CUDNN_LIBRARIES": libraries}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=240)


def rows(text, heading):
    """Returns the cells of the table below a heading, without its two header lines."""
    section = text.split(f"### {heading}", 1)[1].split("###", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_prints_all_measurements_as_tables(programs):
    ran = bench(programs)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    text = ran.stdout
    assert text.startswith("a model of a GPU (modelled), driver for CUDA 13,")

    # The model's rates: 50 GB/s pinned, 10 GB/s pageable, 500 TFLOP/s.
    assert [row[1:] for row in rows(text, "Copies")] == [["50", "50", "10", "10"]] * 4
    kernels = {row[0]: row for row in rows(text, "Kernels")}
    assert kernels["8x32/8x2048x128 causal BF16"][-1] == "496 TFLOP/s"
    assert kernels["8x32/8x1:4096x128 BF16"][-1].endswith("TB/s")
    assert "1x16x4096x64 causal BF16: not this head size" in text, "what the device declines is a note"
    assert "No comparison with PyTorch" in text

    ((case, copy_in, kernel, copy_out, one, together, share, reached, _),) = rows(text, "Requests in process")
    assert case == "1x32/8x2048x128 causal BF16"
    assert (copy_in, copy_out) == ("0.503", "0.336")
    assert float(kernel) == pytest.approx(0.0737, rel=1e-2)
    assert float(together) > 0.503 * 0.9 and reached in ("reached", "BELOW")

    ((case, requests, one_by_one, by_one_run, _),) = rows(text, "Requests that wait")
    assert (case, requests) == ("1x32/8x1:64x128 BF16", "15")
    # 0.28 MB each in 15 launches; in one, with a tile of zeros.
    assert float(one_by_one) > 15 * (0.0056 + 0.005) * 0.9
    assert float(by_one_run) > (15 * 0.0056 + 0.005) * 0.9

    crossover = rows(text, "CPU or GPU")
    assert len(crossover) == 6 and {row[-1] for row in crossover} <= {"CPU", "GPU"}
    assert "--cudnn_min_flops" in text or "The CPU is faster in all cases" in text
    assert "By its startup measurements `auto` chooses the faster one in" in text

    served = rows(text, "The service")
    assert [row[1:3] for row in served] == [
        [way, concurrency] for way in ("TCP", "Unix socket", "shared memory") for concurrency in ("1", "4")
    ]
    assert all(float(row[5]) > 0 for row in served)


def test_a_server_that_does_not_start_is_reported(programs):
    ran = bench(programs, "--filter=^1x32/8x64x", "--backend=cudnn")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Not measured: rapt-server does not start: rapt-server: backend 'cudnn' can't run here" in ran.stdout
    assert rows(ran.stdout, "CPU or GPU")


def test_without_a_gpu_it_reports_an_error(programs):
    ran = bench(programs, libraries="nowhere")
    assert ran.returncode == 1
    assert ran.stderr == "dev bench gpu: cannot load libcudart.so.13\n"
    assert ran.stdout == ""


def test_invalid_requests_to_the_probe_get_an_error():
    with gpu_bench.Probe(os.environ["RAPT_GPU_PROBE"], "here", 1) as probe:
        for words in ("", "copy in pinned -1", "kernel bf16 1 2 3", "compile int8 1 1 1 8 8 8 0", "attend cpu", "dance"):
            with pytest.raises(gpu_bench.Declined, match="invalid command"):
                probe.ask(words)
        with pytest.raises(gpu_bench.Declined, match="not compiled"):
            probe.ask("kernel bf16 1 1 1 8 8 128 0")
        with pytest.raises(gpu_bench.Declined, match="Hq|heads"):
            probe.ask("compile bf16 1 3 2 8 8 128 0")


def test_the_verdict_states_the_loss_of_auto():
    points = [(1e6, 1, 2), (1e8, 4, 1), (1e9, 3, 1)]
    assert "in 3 of 3 cases, and takes 0% longer" in gpu_bench.verdict(points, [1, 1, 1])
    assert "in 2 of 3 cases, and takes 26% longer" in gpu_bench.verdict(points, [2, 1, 1])


@pytest.mark.parametrize(
    "points, best",
    [
        ([(1e6, 1, 2), (1e8, 1, 2), (1e10, 2, 1)], 1e9),
        ([(1e6, 1, 2), (1e10, 1, 2)], math.inf),
        ([(1e6, 2, 1), (1e10, 2, 1)], 0),
        ([(1e8, 1, 10), (1e9, 2, 1), (1e10, 1, 1.5), (1e12, 9, 1)], math.sqrt(1e17)),  # one is wrong, by little
    ],
)
def test_the_threshold_minimizes_the_loss(points, best):
    assert gpu_bench.best_min_flops(points[::-1]) == pytest.approx(best)


def test_operations_that_causality_hides_are_not_counted():
    square = gpu_bench.Case("bf16", 2, 4, 2, 3, 3, 8, causal=True)
    assert square.flops() == 4 * 2 * 4 * 6 * 8
    assert gpu_bench.Case("bf16", 1, 1, 1, 4, 2, 1, causal=True).flops() == 4 * 7
    assert square.bytes_in() == 2 * (4 * 3 + 2 * 2 * 3) * 8 * 2
    assert square.shape == "2x4/2x3x8 causal"
