"""The examples of client/examples, in process and with attention at a server: what they learn and what they write."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import rapt
from rapt_server import RaptServer

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "client/examples"


@pytest.fixture(scope="module", params=("in process", "at a server"))
def where(request):
    """The arguments that say where attention is computed."""
    if request.param == "in process":
        yield ()
    else:
        with RaptServer() as server:
            yield "--server", f"http://{server.http_address}"


def run(name, output, where):
    command = [sys.executable, "-B", EXAMPLES / f"{name}.py", output, *where]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout


def test_a_layer_learns_what_it_means(tmp_path, where):
    text = run("sentence", tmp_path, where)
    assert float(re.search(r"right: ([\d.]+)%", text)[1]) >= 98
    assert "it was too tired: it is the dog" in text and "it was too wide: it is the river" in text
    with np.load(tmp_path / "weights.npz") as weights:
        assert sorted(weights) == ["tired", "wide"]
        for of_heads in weights.values():
            assert of_heads.shape == (4, 12, 12)
            np.testing.assert_allclose(of_heads.sum(-1), 1, atol=1e-5)
    lines = re.findall(r"head \d looks at .*: (.*) for dog, (.*) for river", text)
    tired, wide = np.array(lines, float).reshape(2, 4, 2).sum(1)
    assert tired[0] > tired[1] and wide[0] < wide[1]  # what the heads add decides
    page = (tmp_path / "sentence.html").read_text()
    assert page.count("<img ") == 8 and page.count("rgba(255,191,0,") == 8 * 12 and "script" not in page and 'src="http' not in page
    assert (tmp_path / "layer/config.json").exists() and (tmp_path / "layer/model.safetensors").exists()


def test_a_server_computes_the_trained_layer(tmp_path):
    run("sentence", tmp_path, ())
    x = np.random.default_rng(1).standard_normal((1, 7, 32), np.float32)
    with RaptServer(f"--model_repository={tmp_path}") as server, rapt.Client(f"http://{server.http_address}") as client:
        outputs = client.infer("layer", {"query": x}, ["Y", "weights"])
        (estimate,) = client.estimate_layer_memory("layer", [7]).estimates
        with pytest.raises(ValueError, match="model is ''; it must be the name of a layer"):
            client.estimate_layer_memory("", [7])
    assert estimate.tensor_bytes == 2 * x.nbytes and estimate.layer.weight_bytes >= 4 * 32 * 32 * 4
    assert estimate.layer.charged_bytes > estimate.fused_bytes > 0
    header, _, data = (tmp_path / "layer/model.safetensors").read_bytes().partition(b"}}")
    assert header.index(b"in_proj_weight") < header.index(b"out_proj.weight")
    inner, outer = np.split(np.frombuffer(data, np.float32).reshape(128, 32), [96])
    q, k, v = (x @ w.T for w in np.split(inner, 3))
    heads = [part.reshape(1, 7, 4, 8).swapaxes(1, 2) for part in (q, k, v)]
    want = rapt.attend(*heads, scores="weights")
    np.testing.assert_allclose(outputs["weights"], want.scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs["Y"], want.y.swapaxes(1, 2).reshape(1, 7, 32) @ outer.T, rtol=1e-4, atol=1e-4)


def test_a_decoder_aligns_with_the_input_it_reverses(tmp_path, where):
    text = run("reverse", tmp_path, where)
    shares = dict(re.findall(r"^(\w+) +([\d.]+)% of digits are right", text, re.MULTILINE))
    assert list(shares) == ["dot", "luong", "additive"] and all(float(share) >= 95 for share in shares.values())
    with np.load(tmp_path / "alignment.npz") as alignment:
        assert sorted(alignment) == sorted(shares)
        for weights in alignment.values():
            # Or at the next input, whose state knows the digit as well.
            assert np.abs(weights.argmax(-1) - np.arange(8)[::-1]).max() <= 1


def test_a_bias_by_distance_extrapolates(tmp_path, where):
    run("extrapolate", tmp_path, where)
    sinusoidal, relative, window = np.load(tmp_path / "accuracy.npy").T
    assert sinusoidal[0] >= 0.98 and relative[0] >= 0.98  # at the length of the training
    assert sinusoidal[3] <= 0.8 and relative[3] >= 0.9  # at three times as much
    assert relative[-1] <= 0.9 and window.min() >= 0.98  # far keys add up, unless a window hides them
    with np.load(tmp_path / "weights.npz") as weights:
        rows = weights["relative"]
    assert (rows.argmax(-1) == np.arange(72, 96) - 5).mean() >= 0.9
