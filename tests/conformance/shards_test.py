"""The Python of docs/kv-cache.md: a context over two servers, merged with NumPy, and the hash that places names."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from rapt_server import RaptServer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kv-cache.md").read_text()
ADDRESSES = ("127.0.0.1:8001", "127.0.0.1:8003")


def program(beginning):
    (text,) = (text for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if text.startswith(beginning))
    return text


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Generates the code by the command of the page."""
    folder = tmp_path_factory.mktemp("stubs")
    command = re.search(r"^    protoc .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)[0]
    environment = {**os.environ, "OUT": str(folder)}
    assert command.count("_out=.") == 2
    subprocess.run(command.replace("_out=.", '_out="$OUT"'), shell=True, check=True, cwd=ROOT, env=environment)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def define(q, k, v, position):
    """y and lse of rows from `position` on, in float64."""
    q, k, v = (x.astype("f8") for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("rhd,thd->rht", q, k) / np.sqrt(q.shape[2])
    hidden = np.arange(len(k)) > position + np.arange(len(q))[:, None]
    weights = np.exp(np.where(hidden[:, None, :], -np.inf, scores))
    total = weights.sum(-1)
    return np.einsum("rht,thd->rhd", weights / total[..., None], v), np.log(total)


def close(got, want):
    for mine, theirs in zip(got, want):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


def test_the_recipe_equals_one_context_and_names_a_server_that_is_killed(stubs, capsys):
    flags = ("--kv_cache_bytes=67108864", "--grace_period=0s")
    survivor, victim = RaptServer(*flags), RaptServer(*flags)
    with survivor:
        victim.__enter__()
        text = program("from concurrent.futures")
        for address, server in zip(ADDRESSES, (survivor, victim)):
            assert text.count(address) == 1
            text = text.replace(address, server.grpc_address)
        names = {}
        exec(text, names)
        assert capsys.readouterr().out == "(1, 8, 64) (1, 8)\n"
        q, k, v, shards, step = (names[name] for name in ("q", "k", "v", "shards", "step"))
        close((names["y"], names["lse"]), define(q[999:], k, v, 999))

        # Rows of both shards, and a step of several tokens.
        more = [np.random.default_rng(1).standard_normal((5, *x.shape[1:]), "f4") for x in (q, k, v)]
        q, k, v = (np.concatenate(pair) for pair in zip((q, k, v), more))
        close(step(shards, q[300:], *more[1:]), define(q[300:], k, v, 300))
        assert shards[1].length == 405

        victim.signal(signal.SIGKILL)
        victim._process.wait()
        with pytest.raises(RuntimeError, match=f"the shard at {re.escape(victim.grpc_address)}, from token 600 on"):
            step(shards, q[-1:], k[-1:], v[-1:])
        assert shards[1].length == 405


def test_the_recipe_merges_rows_that_see_nothing(stubs):
    names = {}
    text = program("from concurrent.futures")
    exec(text[: text.index("\nrandom = ")], names)
    y = np.array([[[[1.0, 2.0]], [[0.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 0.0]]]])
    lse = np.array([[[3.0], [-np.inf]], [[-np.inf], [-np.inf]]])
    merged, total = names["merge"](y, lse)
    np.testing.assert_array_equal(merged, [[[1, 2]], [[0, 0]]])
    np.testing.assert_array_equal(total, [[3], [-np.inf]])


def test_the_hash_is_that_of_the_client_library():
    names = {}
    exec(program("def weight("), names)
    golden = (ROOT / "tests/client/cpp/placement_test.cc").read_text()
    pairs = re.findall(r'PlacementWeight\("([\d.:]*)", "([\w-]*)"\), (\d+)u', golden)
    assert len(pairs) == 3
    for server, name, weight in pairs:
        assert names["weight"](server, name) == int(weight)
