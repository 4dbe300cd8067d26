"""The package passes mypy --strict, and callers see its types. torch_cases.py checks rapt.torch and rapt.capture, which need
PyTorch."""

import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "client/python/rapt"

CALLER = """
import numpy as np
import rapt

x = np.zeros((1, 1, 4, 8), np.float32)
reveal_type(rapt.attention(x, x, x, causal=True, window=(3, None)))
reveal_type(rapt.attend(x, x, x, lse=True).y)
rapt.attention(x, x, x, casual=True)
rapt.attend(x, x, x, scores="probabilities")
rapt.attention([1.0], x, x)
client = rapt.Client("http://127.0.0.1:8000")
reveal_type(client.attend(x, x, x, causal=True).y)
reveal_type(client.info().compute_threads)
with client.create_cache(rapt.LayerShape(1, 8), "float32") as cache:
    reveal_type(cache.attend(0, np.zeros((1, 1, 8), np.float32)).y)
client.create_cache(rapt.LayerShape(1, 8), "int8")


async def call(asynchronous: rapt.AsyncClient) -> None:
    reveal_type((await asynchronous.attend(x, x, x)).y)
    cache = await asynchronous.create_cache(rapt.LayerShape(1, 8))
    reveal_type(await cache.info())
    await asynchronous.attend(x, x, x, casual=True)
    reveal_type((await asynchronous.linear_attention(x, x, x, query_heads=1, kv_heads=1)).output)
    await asynchronous.linear_attention(x, x, x, query_heads=1)
"""


def mypy(*arguments):
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--cache-dir=/dev/null", *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout


def test_the_package_passes():
    assert (PACKAGE / "py.typed").exists()
    assert mypy("--exclude=/torch/|/capture.py", PACKAGE).startswith("Success: no issues found")


def test_callers_see_types(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(PACKAGE.parent))
    caller = tmp_path / "caller.py"
    caller.write_text(CALLER)
    lines = [line for line in mypy(caller).splitlines()[:-1] if "error:" in line or "Revealed" in line]
    assert len(lines) == 14, lines
    assert 'Revealed type is "numpy.ndarray[' in lines[0] and 'Revealed type is "numpy.ndarray[' in lines[1]
    assert 'Unexpected keyword argument "casual" for "attention"' in lines[2]
    assert 'Argument "scores" to "attend" has incompatible type' in lines[3]
    assert 'of "attention" cannot be "list[float]"' in lines[4]
    assert "numpy.ndarray[" in lines[5] and 'int"' in lines[6]
    assert "numpy.ndarray[" in lines[7] and "| None" in lines[7]
    assert 'Argument 2 to "create_cache" of "Client" has incompatible type' in lines[8]
    assert "numpy.ndarray[" in lines[9] and '"rapt._reports.CacheInfo"' in lines[10]
    assert 'Unexpected keyword argument "casual"' in lines[11]
    assert "numpy.ndarray[" in lines[12] and 'Missing named argument "kv_heads"' in lines[13]
