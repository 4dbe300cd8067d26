"""The `rapt` binary as users run it: input and output files, pictures, messages, exit codes."""

import dataclasses
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import shlex
import socket
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import xml.etree.ElementTree

import ml_dtypes
import numpy as np
import pytest
from rapt_server import RaptServer

sys.path.append(str(pathlib.Path(__file__).resolve().parents[3] / "client/examples"))

import make_layers  # noqa: E402

RAPT = os.environ["RAPT"]
COMMANDS = ("demo", "attend", "compare", "plot", "diagnose", "gradcheck", "run",
            "pattern", "layer", "memory", "compare-memory", "cache", "info", "health")  # fmt: skip
DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
OK, CALL_FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A model repository with a layer of each naming."""
    folder = tmp_path_factory.mktemp("models")
    for name, (config, tensors) in make_layers.layers().items():
        make_layers.write_layer(folder / name, config, tensors)
    return folder


@pytest.fixture(scope="session")
def server(models):
    # No grace period: caches that tests leave behind would keep the server for all of it.
    flags = ("--kv_cache_bytes=67108864", "--grace_period=0s", f"--model_repository={models}")
    with RaptServer(*flags) as running:
        yield running


@pytest.fixture
def rapt(tmp_path, server):
    """rapt(*arguments, code=OK): runs it in the test's directory, with the test's server, and checks the exit code,
    unless it is None."""

    def run(*arguments, code=OK, **environment):
        ran = subprocess.run(
            [RAPT, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "RAPT_ADDRESS": server.grpc_address, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            # Sizes that the command line allows end with "out of memory", not with the machine's.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
        )
        assert code is None or ran.returncode == code, ran
        return ran

    return run


@pytest.fixture
def save(tmp_path):
    """save(name=array, ...): writes each array to name.npy."""

    def save_all(**arrays):
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)

    return save_all


@pytest.fixture
def load(tmp_path):
    return lambda name: np.load(tmp_path / name)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def oracle(q, k, v, visible=None, bias=0.0, scale=None, softcap=0.0):
    """Y and weights of [B, H, S, D] in float64; `visible` and `bias` broadcast to the scores."""
    q, k, v = (np.asarray(x, "f8") for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# --- attend ---------------------------------------------------------------------------------------

EVERYWHERE = pytest.mark.parametrize("where", [["--local"], []], ids=["local", "remote"])


@EVERYWHERE
def test_q_alone_is_self_attention_of_the_hand_computed_example(rapt, save, load, where):
    save(x=np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], "f4"))
    rapt("attend", "--q", "x.npy", "-o", "y.npy", "--weights", "w.npy", "--lse", "lse.npy", *where)
    weights = [[0.5065, 0.1863, 0.3072], [0.1863, 0.5065, 0.3072], [0.2741, 0.2741, 0.4519]]
    np.testing.assert_allclose(load("w.npy"), weights, atol=6e-5)
    assert load("y.npy").shape == (3, 4)
    assert load("lse.npy").shape == (3,)
    close(load("y.npy"), load("w.npy") @ load("x.npy"))


@dataclasses.dataclass
class Case:
    flags: list
    oracle: dict
    mask: object = None


def triangle(sq, sk):
    return np.tril(np.ones((sq, sk), bool))


def window(sq, sk, left, right):
    offset = np.arange(sk)[None, :] - np.arange(sq)[:, None]
    return (offset >= -left) & (offset <= right)


BOOL_MASK = np.random.default_rng(5).random((2, 1, 7, 9)) > 0.4
BOOL_MASK[..., 0] = True
FLOAT_MASK = draw(6, 9)

CASES = {
    "plain": Case([], {}),
    "causal": Case(["--causal"], {"visible": triangle(7, 9)}),
    "window": Case(["--window", "2,1"], {"visible": window(7, 9, 2, 1)}),
    "scale_softcap": Case(["--scale", "0.7", "--softcap=1.5"], {"scale": 0.7, "softcap": 1.5}),
    "bool_mask": Case(["--mask", "mask.npy"], {"visible": BOOL_MASK}, BOOL_MASK),
    "int64_mask": Case(["--mask", "mask.npy"], {"visible": BOOL_MASK}, BOOL_MASK.astype("i8")),
    "uint8_mask": Case(["--mask", "mask.npy"], {"visible": BOOL_MASK}, BOOL_MASK.astype("u1")),
    "float_mask": Case(["--mask", "mask.npy"], {"bias": FLOAT_MASK}, FLOAT_MASK),
}


@EVERYWHERE
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attend_is_exact(rapt, save, load, where, case):
    q, k, v = draw(1, 2, 4, 7, 16), draw(2, 2, 2, 9, 16), draw(3, 2, 2, 9, 5)
    save(q=q, k=k, v=v, **({} if case.mask is None else {"mask": case.mask}))
    rapt("attend", "--q=q.npy", "--k=k.npy", "--v=v.npy", "-o", "y.npy", "--weights", "w.npy",
         *case.flags, *where)  # fmt: skip
    y, weights = oracle(q, k, v, **case.oracle)
    close(load("y.npy"), y)
    close(load("w.npy"), weights)


@EVERYWHERE
def test_attend_takes_every_layout(rapt, save, load, where):
    q, k, v = draw(1, 2, 4, 7, 16), draw(2, 2, 2, 9, 16), draw(3, 2, 2, 9, 8)
    want = oracle(q, k, v)[0].transpose(0, 2, 1, 3)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    files = ["--q=q.npy", "--k=k.npy", "--v=v.npy", "-o=y.npy"]
    save(q=q, k=k, v=v)  # transposed views: numpy writes some of these in Fortran order
    rapt("attend", *files, "--layout", "bshd", *where)
    close(load("y.npy"), want)
    save(q=q.reshape(2, 7, 64), k=k.reshape(2, 9, 32), v=v.reshape(2, 9, 16))
    rapt("attend", *files, "--heads", 4, "--kv-heads", 2, *where)
    close(load("y.npy"), want.reshape(2, 7, 32))
    save(q=q[0].reshape(7, 64), k=k[0].reshape(9, 32), v=v[0].reshape(9, 16))
    rapt("attend", *files, "--heads", 4, "--kv-heads", 2, "--weights", "w.npy", *where)
    close(load("y.npy"), want[0].reshape(7, 32))
    assert load("w.npy").shape == (4, 7, 9)


@EVERYWHERE
def test_alignments_of_one_query(rapt, save, load, where):
    save(q=draw(1, 1, 2, 1, 8), k=draw(2, 1, 2, 5, 8), lengths=np.array([3]))

    def seen(*flags):
        files = ["--q=q.npy", "--k=k.npy", "--v=k.npy", "-o=y.npy", "--weights=w.npy"]
        rapt("attend", *files, "--causal", *flags, *where)
        return (load("w.npy")[0, 0, 0] > 0).tolist()

    assert seen() == [True] + 4 * [False]
    assert seen("--bottom-right") == 5 * [True]
    assert seen("--onnx-alignment") == [True] + 4 * [False]
    assert seen("--key-lengths=lengths.npy") == [True] + 4 * [False]
    assert seen("--key-lengths=lengths.npy", "--bottom-right") == 3 * [True] + 2 * [False]
    assert seen("--key-lengths=lengths.npy", "--onnx-alignment") == 3 * [True] + 2 * [False]
    both = ["--q=q.npy", "-o=y.npy", "--bottom-right", "--onnx-alignment", *where]
    assert "queries have one alignment" in rapt("attend", *both, code=USAGE).stderr


@EVERYWHERE
def test_attend_with_sparse_visibility(rapt, save, load, where):
    q, k, v = draw(1, 1, 4, 5, 8), draw(2, 1, 4, 9, 8), draw(3, 1, 4, 9, 8)
    rows, columns = np.arange(5)[:, None], np.arange(9)[None, :]
    files = ["--q=q.npy", "--k=k.npy", "--v=v.npy", "-o=y.npy", *where]

    blocks = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1]], bool)
    save(q=q, k=k, v=v, blocks=blocks[None, None].astype("i8"))
    rapt("attend", *files, "--block-mask=blocks.npy", "--block-q=2", "--block-k=4")
    close(load("y.npy"), oracle(q, k, v, visible=blocks[rows // 2, columns // 4])[0])
    refused = rapt("attend", *files, "--block-mask=blocks.npy", "--block-q=2", code=CALL_FAILED)
    assert "block_k is not" in refused.stderr

    selected = np.array([[0, 8], [3, -1], [-1, 5], [2, 1], [7, 6]])
    save(selected=selected[None, None])
    rapt("attend", *files, "--selected-indices=selected.npy")
    visible = (selected[:, None, :] == columns[..., None]).any(-1)
    close(load("y.npy"), oracle(q, k, v, visible=visible)[0])
    selected[3, 1] = 2
    save(selected=selected[None, None])
    refused = rapt("attend", *files, "--selected-indices=selected.npy", code=CALL_FAILED)
    assert "selected_indices[0, 0, 3, 1] is 2, which the row already has" in refused.stderr

    every = np.zeros((1, 9), bool)
    every[0, [3, 7]] = True
    save(every=every)
    rapt("attend", *files, "--window=1,0", "--prefix-keys=1", "--global-mask=every.npy")
    window = (columns >= rows - 1) & (columns <= rows)
    visible = window | (columns < 1) | every | every[0][rows]
    close(load("y.npy"), oracle(q, k, v, visible=visible)[0])


def test_patterns(rapt, save, load, tmp_path):
    x = draw(1, 1, 2, 12, 8)
    save(q=x, k=x, v=x)
    said = rapt("pattern", "longformer", "--length=12", "--window=1", "--global=0,5", "-o=mask.npy").stdout
    distance = abs(np.arange(12)[:, None] - np.arange(12)[None, :])
    visible = distance <= 1
    visible[[0, 5], :] = visible[:, [0, 5]] = True
    assert (load("mask.npy") == visible).all() and "[12, 12]" in said
    rapt("attend", "--q=q.npy", "--k=k.npy", "--v=v.npy", "--mask=mask.npy", "-o=y.npy", "--local")
    close(load("y.npy"), oracle(x, x, x, visible=visible)[0])
    rapt("plot", "mask.npy", "-o", "mask.svg")
    assert (tmp_path / "mask.svg").read_text().count("<") > 10
    rapt("pattern", "strided", "--length=8", "--stride=3", "-o=mask.npy")
    assert load("mask.npy")[7].tolist() == [0, 1, 0, 0, 1, 1, 1, 1]
    rapt("pattern", "bigbird", "--length=1000", "--block=50", "--heads=2", "--seed=1", "-o=blocks.npy")
    assert load("blocks.npy").shape == (1, 2, 20, 20)
    rapt("pattern", "neighbourhood", "--shape=3,4", "--kernel=2", "-o=mask.npy")
    assert load("mask.npy").sum(1).tolist() == [4] * 12
    assert "longformer needs --window" in rapt("pattern", "longformer", "--length=8", "-o=x.npy", code=USAGE).stderr
    assert "unknown pattern 'x'" in rapt("pattern", "x", "-o=x.npy", code=USAGE).stderr
    assert "no pattern given" in rapt("pattern", "-o=x.npy", code=USAGE).stderr
    other = rapt("pattern", "longformer", "--length=8", "--window=1", "--seed=1", "-o=x.npy", code=USAGE).stderr
    assert "--seed is a flag of bigbird" in other
    other = rapt("pattern", "neighbourhood", "--shape=4", "--kernel=1", "--length=8", "-o=x.npy", code=USAGE).stderr
    assert "--length is a flag of longformer or strided or bigbird" in other
    large = rapt("pattern", "bigbird", "--length=64", "--heads=2147483648", "-o=x.npy", code=USAGE).stderr
    assert "heads is 2147483648; it must be from 1 to 2147483647" in large


LINEAR = pytest.mark.parametrize(
    "where", [["--local"], [], ["--stream"], ["--stream", "--chunk=3"]], ids=["local", "remote", "stream", "chunks"]
)


SELF = ("--query=x.npy", "--key=x.npy", "--value=x.npy")
ONE_HEAD = ("run", "linear_attention", "--q-num-heads=1", "--kv-num-heads=1")


# Flags of `rapt attend` that `rapt run` has in another form.
@EVERYWHERE
@pytest.mark.parametrize(
    "attend, run",
    [
        ("--mask=mask.npy --causal", "--attn-mask=integers.npy --is-causal --alignment=top_left"),
        ("--key-lengths=lengths.npy --causal --onnx-alignment", "--nonpad-kv-seqlen=lengths.npy --is-causal"),
        ("--window=2,1 --prefix-keys=1", "--left-window-size=2 --right-window-size=1 --prefix-keys=1 --alignment=top_left"),
        ("--rope-theta=500 --rotary-queries-only", "--rope-theta=500 --rotary-keys=false"),
    ],
)
def test_attend_and_run_mean_the_same(rapt, save, load, where, attend, run):
    mask = np.random.default_rng(4).random((3, 5)) < 0.7
    save(q=draw(1, 2, 4, 3, 8), k=draw(2, 2, 2, 5, 8), v=draw(3, 2, 2, 5, 6), mask=mask, integers=mask.astype("i4"),
         lengths=np.array([5, 4]))  # fmt: skip
    qkv = ["--q=q.npy", "--k=k.npy", "--v=v.npy"]
    rapt("attend", *qkv, *attend.split(), "-o=want.npy", *where)
    rapt("run", "attention", *qkv, *run.split(), "-o=y.npy", *where)
    np.testing.assert_array_equal(load("y.npy"), load("want.npy"))


@EVERYWHERE
def test_run_refuses_an_output_that_the_call_lacks(rapt, save, where):
    save(q=draw(1, 2, 4, 3, 8))
    refused = rapt("run", "attention", "--q=q.npy", "--k=q.npy", "--v-head-size=6", "-o=y.npy", "--present-value=v.npy",
                   *where, code=CALL_FAILED)  # fmt: skip
    assert "output present_value is requested; there is none with v_head_size" in refused.stderr


@EVERYWHERE
def test_run_takes_members_of_archives_and_fewer_axes(rapt, tmp_path, load, where):
    x, table = draw(1, 24, 6), draw(2, 24, 6)
    np.savez(tmp_path / "in.npz", x=x, table=table, q=x, v=x)  # members of the flags' names
    rapt("run", "positional_encoding", "--x=in.npz", "--table=in.npz", "-o=y.npz", *where)
    close(load("y.npz")["y"], x + table)
    ran = rapt("run", "lsh_attention", "--q=in.npz", "--v=in.npz", "--chunk-length=6", "--seed=7", "-o=out.npz",
               "--buckets=out.npz", "--json", *where)  # fmt: skip
    report = json.loads(ran.stdout)
    assert [(output["name"], output["shape"]) for output in report["outputs"]] == [("y", [24, 6]), ("buckets", [1, 24])]
    assert load("out.npz")["y"].shape == (24, 6) and load("out.npz")["buckets"].shape == (1, 24)


STREAMS = pytest.mark.parametrize("stream", [["--stream"], ["--stream", "--chunk=3"]], ids=["stream", "chunks"])


@STREAMS
@pytest.mark.parametrize(
    "flags",
    [
        "--update-rule=linear --scale=0.5",
        "--update-rule=gated --decay=decay.npy --chunk-size=4",
        "--update-rule=delta --beta=beta.npy --past-state=state.npy",
        "--decay=decay.npy --beta=beta.npy --nonpad-kv-seqlen=lengths.npy",
        "--update-rule=linear --feature-map=relu --normalize --past-state=state.npy --past-normalizer=sums.npy "
        "--present-normalizer=FILE",
    ],
)
def test_linear_in_a_stream(rapt, save, load, flags, stream):
    save(q=draw(1, 2, 10, 20), k=0.3 * draw(2, 2, 10, 10), v=draw(3, 2, 10, 12), decay=-np.abs(draw(5, 2, 10, 2)),
         beta=np.abs(draw(6, 2, 10, 2)), state=draw(4, 2, 2, 5, 6), sums=np.abs(draw(7, 2, 2, 5)), lengths=np.array([10, 7]))  # fmt: skip
    call = ["run", "linear_attention", "--q-num-heads=4", "--kv-num-heads=2", "--query=q.npy", "--key=k.npy", "--value=v.npy"]
    for file, where in (("want.npz", ["--local"]), ("got.npz", [*stream, "--json"])):
        options = flags.replace("FILE", file).split()
        ran = rapt(*call, *options, f"-o={file}", f"--present-state={file}", *where)
    assert json.loads(ran.stdout)["path"] == "stream"
    want, got = load("want.npz"), load("got.npz")
    assert set(got) == set(want)
    for name in want:
        close(got[name], want[name], 1e-5)


@EVERYWHERE
def test_linear_says_how_well_it_estimates(rapt, save, where):
    save(x=draw(1, 20, 8))
    call = [*ONE_HEAD, "--update-rule=linear", "--feature-map=favor", *SELF, "-o=y.npy", "--error-rows=20"]
    assert "of the exact rows" in rapt(*call, *where).stdout


@LINEAR
def test_linear_reads_members_of_archives(rapt, tmp_path, load, where):
    np.savez(tmp_path / "in.npz", x=draw(1, 2, 10, 8), directions=draw(2, 16, 4), lengths=[10, 4])
    call = ["run", "linear_attention", "--update-rule=linear", "--feature-map=favor", "--q-num-heads=2",
            "--kv-num-heads=2", "--query=in.npz:x", "--key=in.npz:x", "--value=in.npz:x",
            "--projection=in.npz:directions", "--nonpad-kv-seqlen=in.npz:lengths"]  # fmt: skip
    rapt(*call, "-o=want.npy", "--local")
    rapt(*call, "-o=y.npy", *where)
    close(load("y.npy"), load("want.npy"))
    assert not load("y.npy")[1, 4:].any()


@LINEAR
def test_linear_refuses_what_does_not_fit(rapt, save, where):
    save(x=draw(1, 4, 6), i=np.arange(3), long=np.array([9]))
    call = [*ONE_HEAD, "--update-rule=gated", *SELF, "-o=y.npy"]
    for flags, code, message in [
        (["--normalize=maybe"], USAGE, "--normalize is 'maybe'; it takes true, false, 1 or 0"),
        (["--mask=x.npy"], USAGE, "unknown flag --mask"),
        (["--stream", "--local"], USAGE, "--stream needs a server"),
        (["--chunk=4"], USAGE, "--chunk needs --stream"),
        (["--chunk=0", "--stream"], USAGE, "--chunk is 0; it must be at least 1"),
        (["--stream", "--error-rows=3"], USAGE, "--stream and --error-rows are mutually exclusive"),
        (["--stream", "--is-causal=false"], USAGE, "--stream and --is-causal=false are mutually exclusive"),
        (["--priority=1", "--local"], USAGE, "--local has no server"),
        (["--present-state=y.npy"], USAGE, "--output and --present-state both name y.npy"),
        (["--decay=i.npy"], USAGE, "decay has type int64; it must be float16"),
        (["--nonpad-kv-seqlen=x.npy"], USAGE, "nonpad_kv_seqlen has type float32"),
        ([], CALL_FAILED, "decay is missing; update_rule is gated"),
        (["--stream"], CALL_FAILED, "decay is missing; update_rule is gated"),
        (["--update-rule=linear", "--nonpad-kv-seqlen=long.npy", *where], CALL_FAILED, "nonpad_kv_seqlen[0] is 9; it must be"),
    ]:
        refused = rapt(*call, *flags, code=code).stderr
        assert message in refused, (flags, refused)


def self_attention_of(tensors, x, heads, visible=True):
    """Y and the weights of PyTorch's naming for x [S, E]."""
    q, k, v = (
        (x @ w.T + b).reshape(len(x), heads, -1).swapaxes(0, 1)
        for w, b in zip(np.split(tensors["in_proj_weight"], 3), np.split(tensors["in_proj_bias"], 3))
    )
    scores = np.where(visible, q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]), -np.inf)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    y = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)
    return y @ tensors["out_proj.weight"].T + tensors["out_proj.bias"], weights


@pytest.mark.parametrize("is_local", [False, True], ids=["server", "local"])
def test_attend_with_a_layer(rapt, save, load, models, is_local):
    model = ["--local", f"--model={models / 'torch_block'}"] if is_local else ["--model=torch_block"]
    x = draw(1, 6, 32)
    save(x=x)
    y, weights = self_attention_of(make_layers.layers()["torch_block"][1], x, 4)
    rapt("attend", *model, "--query=x.npy", "-o=y.npy", "--weights=w.npy")
    close(load("y.npy"), y, 1e-5)
    close(load("w.npy"), weights, 1e-5)
    rapt("plot", "w.npy", "-o", "w.svg")
    rapt("attend", *model, "--query=x.npy", "-o=y.npy", "--weights=w.npy", "--average")
    close(load("w.npy"), weights.mean(0), 1e-5)
    visible = np.tri(6, dtype=bool)
    causal, _ = self_attention_of(make_layers.layers()["torch_block"][1], x, 4, visible)
    rapt("attend", *model, "--query=x.npy", "-o=y.npy", "--causal")
    close(load("y.npy"), causal, 1e-5)
    save(mask=visible)
    rapt("attend", *model, "--query=x.npy", "-o=y.npy", "--mask=mask.npy")
    close(load("y.npy"), causal, 1e-5)


def test_attend_with_a_layer_hides_padding_and_attends_across(rapt, save, load):
    save(x=draw(2, 1, 5, 32), ids=np.array([7, 8, 9, 0, 0]), ids_of_batch=np.array([[7, 8, 9, 0, 0]]),
         lengths=np.array([3]))  # fmt: skip
    rapt("attend", "--model=bert_block", "--query=x.npy", "-o=ids.npz", "--input-ids=ids_of_batch.npy")
    rapt("attend", "--model=bert_block", "--query=x.npy", "-o=lengths.npz", "--key-lengths=lengths.npy")
    np.testing.assert_array_equal(load("ids.npz")["y"], load("lengths.npz")["y"])
    save(state=draw(3, 4, 16), encoder=draw(4, 7, 32))
    rapt("attend", "--model=bahdanau", "--query=state.npy", "--key=encoder.npy", "-o=y.npy", "--weights=w.npy")
    assert load("y.npy").shape == (4, 32)
    close(load("w.npy").sum(-1), np.ones((1, 4)), 1e-6)


def test_layer_calls_that_fail(rapt, save, models):
    save(x=draw(1, 6, 32), narrow=draw(1, 6, 31))
    call = ["attend", "--model=torch_block", "-o=y.npy"]
    for flags, code, message in [
        (["--query=narrow.npy"], CALL_FAILED, "query"),
        (["--query=x.npy", "--heads=2"], USAGE, "--model and --heads are mutually exclusive"),
        (["--query=x.npy", "--average"], USAGE, "--average needs --weights"),
        (["--query=x.npy", "--model=none"], CALL_FAILED, "unknown model 'none'"),
        (["--query=x.npy", "--model=none", "--local"], CALL_FAILED, "the folder 'none' does not exist"),
    ]:
        assert message in rapt(*call, *flags, code=code).stderr


def test_layer_describes_parameters(rapt, models):
    text = rapt("layer", models / "bert_block", "--describe").stdout
    assert "naming bert, embed size 32, 4 heads, bidirectional, no rotary embedding, pad token 0" in text
    assert re.search(r"encoder.layer.0.attention.self.query.weight +F32 +\[32, 32\] +1024\n", text)
    assert re.search(r"total +4224\n", text)
    summary = rapt("layer", models / "bert_block").stdout
    assert "4224 parameters" in summary and "self.query" not in summary and text.startswith(summary)
    described = json.loads(rapt("layer", models / "llama_block", "--json").stdout)
    assert described["naming"] == "llama" and described["parameters"] == 3 * 32 * 32 + 16
    assert described["causal"] and described["rotary"] and described["unread_settings"] == []
    assert all(tensor["used"] for tensor in described["tensors"])


def test_layer_names_what_is_wrong(rapt, models, tmp_path):
    config, tensors = make_layers.layers()["torch_block"]
    tensors["out_proj.bias"] = tensors["out_proj.bias"][:3]
    make_layers.write_layer(tmp_path / "broken", config, tensors)
    assert "out_proj.bias" in rapt("layer", "broken", code=USAGE).stderr
    assert "the folder 'absent' does not exist" in rapt("layer", "absent", code=USAGE).stderr
    assert "no folder given" in rapt("layer", code=USAGE).stderr


def test_layer_shows_names_of_files_without_their_control_characters(rapt, tmp_path):
    """A file from elsewhere must not set the terminal's title or colours."""
    config, tensors = make_layers.layers()["llama_block"]
    prefix = config.pop("rapt")["prefix"]
    config |= {"model_type": "qwen3", "set\x1b]0;title\x07": 1}
    other = {name.replace(prefix, "\x1b[31m."): tensor for name, tensor in tensors.items()}
    make_layers.write_layer(tmp_path / "escapes", config, tensors | other)
    text = rapt("layer", "escapes", "--prefix", "\x1b[31m.", "--describe").stdout
    assert r"settings that are not read: set\x1b]0;title\x07" in text and r"\x1b[31m.q_proj.weight  " in text
    text += rapt("layer", "escapes", "--describe").stdout
    assert r"\x1b[31m.: naming llama" in text
    text += rapt("layer", "escapes", code=USAGE).stderr
    assert r"these fit: '\x1b[31m.' (llama)" in text and "\x1b" not in text and "\x07" not in text
    assert json.loads(rapt("layer", "escapes", "--prefix", prefix, "--json").stdout)["unread_settings"] == ["set\x1b]0;title\x07"]


def test_layer_bounds_the_list_of_settings_that_are_not_read(rapt, tmp_path):
    config, tensors = make_layers.layers()["llama_block"]
    names = [f"a{n:03}" for n in range(39)] + ["b" * 100_000]
    make_layers.write_layer(tmp_path / "many", config | {"model_type": "qwen3"} | dict.fromkeys(names, 1), tensors)
    assert f"settings that are not read: {', '.join(names[:32])} and 8 more\n" in rapt("layer", "many").stdout
    assert json.loads(rapt("layer", "many", "--json").stdout)["unread_settings"] == names
    make_layers.write_layer(tmp_path / "long", config | {"model_type": "qwen3", names[-1]: 1}, tensors)
    assert f"settings that are not read: {'b' * 64}\n" in rapt("layer", "long").stdout


def test_layer_lists_those_of_a_whole_model(rapt, tmp_path):
    config, tensors = make_layers.layers()["llama_block"]
    own = config.pop("rapt")
    model = {name.replace("layers.0", f"layers.{n}"): tensor for n in range(3) for name, tensor in tensors.items()}
    gate = {"model.layers.2.self_attn.gate.weight": tensors["model.layers.0.self_attn.q_proj.weight"]}
    config |= {"model_type": "qwen3", "vocab_size": 7, "hidden_act": "silu"}
    make_layers.write_layer(tmp_path / "whole", config, model | gate)
    found = rapt("layer", "whole", "--describe").stdout.splitlines()
    assert found == [
        f"model.layers.{n}.self_attn.: naming llama, embed size 32, 4 heads, 2 of keys and values, causal, rope_theta 10000"
        for n in range(2)
    ] + [
        "model.layers.2.self_attn.: naming llama, model.safetensors: tensor model.layers.2.self_attn.gate.weight is none of the "
        "naming llama; a layer does not compute what it is for"
    ]
    error = rapt("layer", "whole", code=USAGE).stderr
    assert "no naming fits" in error and "'model.layers.0.self_attn.' (llama), 'model.layers.1.self_attn.' (llama)" in error
    text = rapt("layer", "whole", "--prefix", own["prefix"]).stdout
    assert "settings that are not read: hidden_act, vocab_size\n" in text
    assert "4 heads, 2 of keys and values, causal, rope_theta 10000" in text


def test_layer_helps_with_the_models_of_the_document(rapt):
    text = " ".join(rapt("layer", "--help").stdout.split())
    document = (DOCS / "layers.md").read_text()
    models = document.split("### Models\n")[1].split("| config.json |")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|`]+) \|$", models, re.MULTILINE)
    assert [name for name, _ in rows] == ["bert", "gpt2", "llama", "t5"]
    for naming, models in rows:
        assert f"{naming}: {models};" in text
    texts = re.search(r"in text_config of: ([^.]*)\.", text)[1]
    assert f"the models {texts}," in " ".join(document.split())


@EVERYWHERE
@pytest.mark.parametrize("dtype, tolerance", [("f2", 2e-3), ("f8", 1e-12)])
def test_attend_keeps_the_type(rapt, save, load, where, dtype, tolerance):
    x = draw(1, 1, 2, 9, 8).astype(dtype)
    save(x=x)
    rapt("attend", "--q", "x.npy", "-o", "y.npy", *where)
    assert load("y.npy").dtype == dtype
    close(load("y.npy"), oracle(x, x, x)[0], tolerance)


@EVERYWHERE
def test_attend_takes_bfloat16_with_a_flag(rapt, save, load, where):
    x = draw(1, 1, 2, 9, 8).astype(ml_dtypes.bfloat16)
    save(x=x)
    rapt("attend", "--q", "x.npy", "-o", "y.npy", "--dtype", "bf16", *where)
    y = load("y.npy").view(ml_dtypes.bfloat16).astype("f8")
    close(y, oracle(x, x, x)[0], 1.6e-2)


@EVERYWHERE
@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_reads_and_writes_archives(rapt, tmp_path, load, where, pack):
    q, k, v = draw(1, 1, 2, 5, 8), draw(2, 1, 2, 6, 8), draw(3, 1, 2, 6, 8)
    mask = BOOL_MASK[0, 0, :5, :6]
    pack(tmp_path / "in.npz", q=np.asfortranarray(q), k=k, v=v, mask=mask)
    report = json.loads(rapt("attend", "in.npz", "-o", "out.npz", "--weights", "out.npz", "--json",
                           *where).stdout)  # fmt: skip
    y, weights = oracle(q, k, v, visible=mask)
    close(load("out.npz")["y"], y)
    close(load("out.npz")["weights"], weights)
    assert [(o["name"], o["shape"]) for o in report["outputs"]] == [
        ("y", [1, 2, 5, 8]),
        ("weights", [1, 2, 5, 6]),
    ]
    assert report["backend"] == "cpu"
    assert report["plan"].startswith("cpu/")
    rapt("attend", "--q=in.npz:q", "--k=in.npz", "--v=in.npz:v", "-o", "y.npy", *where)
    close(load("y.npy"), oracle(q, k, v)[0])


def test_dropout_is_seeded(rapt, save, load):
    save(x=draw(1, 40, 8))
    weights = []
    for seed in (1, 1, 2):
        rapt("attend", "--q=x.npy", "-o=y.npy", "--weights=w.npy", "--local", "--dropout=0.5",
             f"--seed={seed}")  # fmt: skip
        weights.append(load("w.npy"))
    assert (weights[0] == weights[1]).all()
    assert (weights[0] != weights[2]).any()
    assert 0.3 < (weights[0] == 0).mean() < 0.7


# --- gradients ------------------------------------------------------------------------------------


def gradients(q, k, v, dy):
    """The gradients of Q, K and V, [S, D] each, in float64."""
    q, k, v, dy = (np.asarray(x, "f8") for x in (q, k, v, dy))
    y, p = (x[0, 0] for x in oracle(q[None, None], k[None, None], v[None, None]))
    delta = (dy * y).sum(-1, keepdims=True)
    ds = p * (dy @ v.T - delta) * q.shape[-1] ** -0.5
    return {"dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ dy}


@EVERYWHERE
def test_grad_writes_the_gradients_of_q_k_and_v(rapt, save, load, where):
    q, k, v, dy = draw(1, 5, 8), draw(2, 7, 8), draw(3, 7, 6), draw(4, 5, 6)
    save(q=q, k=k, v=v, dy=dy)
    files = ["--q=q.npy", "--k=k.npy", "--v=v.npy", "--grad=dy.npy", *where]
    shown = rapt("attend", *files, "-o", "g.npz").stdout
    want, got = gradients(q, k, v, dy), load("g.npz")
    assert list(got) == list(want)
    for name, gradient in want.items():
        close(got[name], gradient)
        norm = re.search(rf"^{name} .* in g.npz, norm (.*)$", shown, re.MULTILINE).group(1)
        close(float(norm), np.linalg.norm(gradient), 1e-3)
    report = json.loads(rapt("attend", *files, "-o", "dk.npy", "--gradients=dk", "--json").stdout)
    (output,) = report["outputs"]
    assert output["name"] == "dk" and output["shape"] == [7, 8] and output["file"] == "dk.npy"
    close(output["norm"], np.linalg.norm(want["dk"]))
    close(load("dk.npy"), want["dk"])


GRADCHECKS = {
    "plain": [],
    "grouped_window": ["--heads=4", "--kv-heads=2", "--batch=2", "--seq=9", "--window=3,0"],
    "softcap_alibi": ["--causal", "--softcap=2", "--alibi"],
    "rotary_dropout": ["--rope-theta=100", "--dropout=0.3"],
    "values_in_keys": ["--v-head-size=5"],
}


@EVERYWHERE
@pytest.mark.parametrize("flags", GRADCHECKS.values(), ids=GRADCHECKS.keys())
def test_gradcheck_passes(rapt, where, flags):
    shown = rapt("gradcheck", *flags, *where).stdout.splitlines()
    names = ["dq", "dk", *(["dv"] if "--v-head-size=5" not in flags else []), "all"]
    assert [line.split()[0] for line in shown] == ["gradient", *names]
    assert all(line.endswith("PASS") for line in shown[1:]), shown


ANGLES = np.arange(9)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
VARIANTS = {  # arrays beside Q, K and V, and flags
    "past": ({"past_key": draw(4, 2, 2, 3, 8), "past_value": draw(5, 2, 2, 3, 8)}, ["--causal"]),
    "lengths": ({"key_lengths": np.array([4, 6])}, ["--bottom-right", "--causal"]),
    "mask": ({"mask": draw(6, 5, 6)}, ["--softcap=3"]),
    "bool_mask": ({"mask": draw(6, 5, 6) > -0.5}, []),
    "bias": ({"attention_bias": draw(6, 4, 1, 6)}, []),
    "sink": ({"head_sink": draw(6, 4)}, []),
    "alibi_slopes": ({"alibi_slopes": draw(6, 4)}, []),
    "t5": ({"bias_table": draw(6, 8, 4)}, ["--bidirectional", "--max-distance=5"]),
    "relative_bias": ({"relative_bias": draw(6, 1, 5)}, []),
    "shaw": ({"relative_keys": draw(6, 4, 5, 8), "relative_values": draw(7, 1, 7, 8)}, []),
    "transformer_xl": ({"relative_keys": draw(6, 4, 9, 8), "relative_query": draw(7, 2, 4, 5, 8)}, []),
    "rotary": ({"cos_cache": np.cos(ANGLES), "sin_cache": np.sin(ANGLES)}, ["--interleaved"]),
    "rotary_queries": ({"cos_cache": np.cos(ANGLES), "sin_cache": np.sin(ANGLES)}, ["--rotary-queries-only"]),
    "additive": ({"additive_weight": draw(6, 4, 8)}, ["--score-function=additive"]),
    "sparsemax": ({}, ["--normalizer=sparsemax"]),
    "entmax15": ({}, ["--normalizer=entmax15", "--dropout=0.2"]),
    "entmax": ({}, ["--normalizer=entmax", "--alpha=1.3"]),
    "entmax_by_head": ({"head_alpha": np.array([1.1, 1.4, 1.6, 1.9])}, ["--normalizer=entmax"]),
    "blocks": ({"block_mask": np.eye(3, dtype=bool)[None, None]}, ["--block-q=2", "--block-k=2"]),
    "selected": ({"selected_indices": np.array([[[[0, 3, -1], [5, 1, 2]] + [[4, 0, 1]] * 3]] * 2, np.int32)}, []),
    "global": ({"global_mask": np.eye(2, 6, dtype=bool)}, ["--window=1,0", "--prefix-keys=1"]),
}


@EVERYWHERE
@pytest.mark.parametrize(("arrays", "flags"), VARIANTS.values(), ids=VARIANTS.keys())
def test_gradcheck_of_every_variant_passes(rapt, tmp_path, where, arrays, flags):
    np.savez(tmp_path / "in.npz", q=draw(1, 2, 4, 5, 8), k=draw(2, 2, 2, 6, 8), v=draw(3, 2, 2, 6, 8), **arrays)
    shown = rapt("gradcheck", "in.npz", *flags, *where).stdout.splitlines()
    floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
    without = {"cos_cache", "sin_cache", "head_alpha"}
    names = {"dq", "dk", "dv", *(f"d_{name}" for name in floats if name not in without), "all"}
    assert {line.split()[0] for line in shown[1:]} == names
    assert all(line.endswith("PASS") for line in shown[1:]), shown


@EVERYWHERE
def test_gradcheck_of_every_element_of_files(rapt, save, where):
    save(x=draw(1, 3, 4), dy=draw(2, 3, 4), sink=draw(3, 1), mask=np.array([1, 1, 0]))
    flags = ["--q=x.npy", "--grad=dy.npy", "--head-sink=sink.npy", "--mask=mask.npy", "--all", "--json"]
    shown = json.loads(rapt("gradcheck", *flags, *where).stdout)["gradients"]
    assert [check["name"] for check in shown] == ["dq", "dk", "dv", "d_head_sink"]
    assert all(check["passed"] and 0 <= check["element"] < 12 for check in shown)


def test_gradcheck_fails_where_differences_are_no_slopes(rapt):
    """With scores of hundreds, weights bend within h."""
    ran = rapt("gradcheck", "--local", "--scale=100", "--gradients=dq", code=CALL_FAILED)
    assert re.search(r"^dq .* FAIL$", ran.stdout, re.MULTILINE)
    assert "a gradient is not the slope of the forward pass" in ran.stderr


def test_plot_draws_gradients_by_position(rapt, save, tmp_path):
    arrays = {"dq": draw(1, 2, 3, 5, 4), "dk": draw(2, 2, 3, 8, 4), "other": draw(3, 2, 8, 12)}
    np.savez(tmp_path / "g.npz", **arrays)
    rapt("plot", "g.npz", "g.npz:other", "--gradients", "--batch=1", "-o", "g.html")
    page = (tmp_path / "g.html").read_text()
    at_two = [np.linalg.norm(arrays[name][1, :, 2]) for name in ("dq", "dk")] + [np.linalg.norm(arrays["other"][1, 2])]
    values = ", ".join(f"{name}: {norm:.4g}" for name, norm in zip(("dq", "dk", "g.npz:other"), at_two, strict=True))
    assert values in page
    rapt("plot", "g.npz", "--gradients", "--queries=a,b,c,d,e,f,g,h", "-o", "g.svg")
    words = svg_words(tmp_path / "g.svg")
    assert {"Norm of the gradient by position", "gradients", "positions", "dq", "dk", "h"} <= set(words)
    svg = xml.etree.ElementTree.parse(tmp_path / "g.svg")
    curves = [line.get("points").split() for line in svg.iter(SVG + "polyline")][:2]
    assert [len(curve[1:]) for curve in curves] == [5, 8]


# --- plot -----------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def svg_words(path):
    return [text.text for text in xml.etree.ElementTree.parse(path).iter(SVG + "text")]


def test_plot_draws_labels_values_and_heads(rapt, save, tmp_path):
    save(w=np.array([[[[0.25, 0.75]], [[1, 0]]]], "f4"))
    rapt("plot", "w.npy", "--queries", "Katze", "--keys", "a<b,chat", "-o", "w.svg")
    words = svg_words(tmp_path / "w.svg")
    assert {"Katze", "a<b", "chat", "0.25", "0.75", "1.00", "head 0", "head 1"} <= set(words)
    rapt("plot", "w.npy", "--heads", "1", "-o", "one.svg")
    assert "0.25" not in svg_words(tmp_path / "one.svg")


def test_plot_draws_files_side_by_side(rapt, save, tmp_path):
    save(before=np.eye(3, dtype="f2"), after=np.full((3, 3), 1 / 3))
    report = rapt("plot", "before.npy", "after.npy", "-o", "both.svg", "--json").stdout
    assert json.loads(report) == {"output": "both.svg", "panels": 2, "queries": 3, "keys": 3}
    assert {"before.npy", "after.npy"} <= set(svg_words(tmp_path / "both.svg"))
    np.savez(tmp_path / "w.npz", before=np.eye(3), after=np.ones((2, 3, 3)))
    rapt("plot", "w.npz:before", "w.npz:after", "-o", "both.svg")
    assert {"before", "after, head 0", "after, head 1"} <= set(svg_words(tmp_path / "both.svg"))


def test_plot_names_a_mask(rapt, save, tmp_path):
    save(mask=np.tri(3, dtype=bool))
    rapt("plot", "mask.npy", "-o", "mask.svg")
    words = svg_words(tmp_path / "mask.svg")
    assert "Mask" in words and "Attention weights" not in words


def test_plot_draws_one_query_as_bars(rapt, save, tmp_path):
    save(w=np.array([[0.25, 0.75], [0.5, 0.5]]))
    rapt("plot", "w.npy", "--queries", "the,cat", "--query", "the", "-o", "bars.svg")
    words = svg_words(tmp_path / "bars.svg")
    assert "0.75" in words and "0.50" not in words
    assert any("“the”" in word for word in words)


def test_plot_draws_curves_of_a_positional_encoding(rapt, save, tmp_path):
    save(zeros=np.zeros((50, 8), "f4"))
    rapt("run", "positional_encoding", "--local", "--x=zeros.npy", "-o=encoding.npy")
    for name in ("curves.svg", "curves.png", "curves.html"):
        rapt("plot", "encoding.npy", "--curves", "0,1,6", "--title", "Encoding", "-o", name)
    words = svg_words(tmp_path / "curves.svg")
    assert {"Encoding", "positions", "dimensions", "0", "1", "6", "-0.5"} <= set(words)
    svg = xml.etree.ElementTree.parse(tmp_path / "curves.svg")
    curves = [line.get("points").split() for line in svg.iter(SVG + "polyline")][:3]
    heights = [[float(point.split(",")[1]) for point in curve[1:]] for curve in curves]
    sine, cosine, slow = np.array(heights)
    assert sine.shape == (50,)
    # A height is linear in the value: dimension 0 is sin(s), 1 is cos(s) and 6 is sin(s / 1000).
    want = np.stack([np.sin(np.arange(50)), np.cos(np.arange(50)), np.sin(np.arange(50) / 1000)])
    slope = cosine[0] - sine[0]
    assert slope < 0
    np.testing.assert_allclose((np.stack([sine, cosine, slow]) - sine[0]) / slope, want, atol=1e-3)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "0: 0.8415, 1: 0.5403" in (tmp_path / "curves.html").read_text()
    rapt("plot", "encoding.npy", "--keys", "a,b,c,d,e,f,g,h", "--curves", "h,2", "-o", "named.svg")
    words = set(svg_words(tmp_path / "named.svg"))
    assert {"h", "c", "positions"} <= words and "dimensions" not in words  # the names say what they are
    rapt("plot", "encoding.npy", "--queries", ",".join(f"s{n}" for n in range(50)), "--curves", "2", "-o", "named.svg")
    words = set(svg_words(tmp_path / "named.svg"))
    assert {"s0", "dimensions"} <= words and "positions" not in words


def test_plot_draws_memory_against_the_length(rapt, tmp_path):
    assert json.loads(rapt("plot", "--scaling", "-o", "scaling.svg", "--json").stdout) == {
        "output": "scaling.svg",
        "lengths": [2**n for n in range(7, 16)],
    }
    words = svg_words(tmp_path / "scaling.svg")
    assert {"128", "32768", "4 GiB", "standard", "fused", "LSH", "linear (FAVOR+)"} <= set(words)
    rapt("plot", "--scaling", "--seq=4096,512", "--title=Short", "-o", "short.html")
    page = (tmp_path / "short.html").read_text()
    assert "standard: 64 MiB, fused: " in page and "Short" in page
    rapt("plot", "--scaling", "--seq=1", "-o", "one.png")


def test_plot_writes_pages_and_png(rapt, save, tmp_path):
    save(w=draw(1, 2, 300, 300))
    rapt("plot", "w.npy", "-o", "w.html")
    page = (tmp_path / "w.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "src=" not in page
    rapt("plot", "w.npy", "-o", "w.png")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_reads_labels_from_a_file(rapt, save, tmp_path):
    save(w=np.eye(2))
    (tmp_path / "tokens.txt").write_text("comma,\nünï\n")
    rapt("plot", "w.npy", "--keys", "@tokens.txt", "-o", "w.svg")
    assert {"comma,", "ünï"} <= set(svg_words(tmp_path / "w.svg"))


TOKENS = ["[CLS]", "a<b", "\u4e16\U0001f600", "\x07", ""]


@pytest.fixture
def captured(tmp_path):
    """A model's weights as rapt.capture keeps them, [layers, batch, heads, queries, keys]."""
    weights = np.random.default_rng(3).dirichlet(np.ones(5), size=(3, 1, 2, 5)).astype("f4")
    np.savez(tmp_path / "bank.npz", model=np.array("tiny-bert"), tokens=np.array(TOKENS), weights=weights)
    return weights


def test_plot_draws_layers_by_heads(rapt, captured, tmp_path):
    assert json.loads(rapt("plot", "bank.npz", "-o", "heads.svg", "--json").stdout)["panels"] == 6
    words = svg_words(tmp_path / "heads.svg")
    assert {"layer 0", "layer 1", "layer 2", "head 0", "head 1"} <= set(words) and "[CLS]" not in words
    assert len(list(xml.etree.ElementTree.parse(tmp_path / "heads.svg").iter(SVG + "image"))) == 7  # and the bar
    rapt("plot", "bank.npz", "--layers", "2,0", "--heads=1", "-o", "heads.html")
    page = (tmp_path / "heads.html").read_text()
    assert "layer 1" not in page and "head 0" not in page
    assert f"{captured[2, 0, 1, 4, 2]:.4g}" in page and f"{captured[1, 0, 1, 4, 2]:.4g}" not in page
    assert '"rows":["[CLS]"' in page  # under the pointer


def test_plot_draws_one_head_with_its_tokens(rapt, captured, tmp_path):
    rapt("plot", "bank.npz", "--layers=1", "--heads=1", "-o", "head.svg")
    words = svg_words(tmp_path / "head.svg")
    assert {"layer 1, head 1", "[CLS]", "a<b", "\u4e16\U0001f600", "\\x07"} <= set(words)
    assert {f"{x:.2f}" for x in captured[1, 0, 1].flat} <= set(words)
    rapt("plot", "bank.npz:weights", "--layers=1", "--keys=v,w,x,y,z", "-o", "head.svg")
    assert {"[CLS]", "v", "z", "layer 1, head 0"} <= set(svg_words(tmp_path / "head.svg"))
    rapt("plot", "bank.npz", "--query=a<b", "-o", "bars.svg")
    assert "layer 2, head 1" in svg_words(tmp_path / "bars.svg")


def test_plot_has_numbers_for_tokens_that_it_cannot_read(rapt, tmp_path):
    np.savez(tmp_path / "w.npz", tokens=np.array(["a", "b"], object), weights=np.eye(2))
    rapt("plot", "w.npz", "-o", "w.svg")
    assert {"0", "1"} <= set(svg_words(tmp_path / "w.svg"))


def test_plot_chooses_a_batch_row_of_layers(rapt, save, tmp_path):
    save(w=np.arange(2 * 2 * 3 * 2, dtype="f4").reshape(2, 2, 1, 3, 2) / 100)
    rapt("plot", "w.npy", "--batch=1", "--layers=1", "-o", "w.svg")
    words = svg_words(tmp_path / "w.svg")
    assert {"0.18", "0.23"} <= set(words) and "0.17" not in words


# --- compare --------------------------------------------------------------------------------------


@EVERYWHERE
def test_compare_shows_what_a_causal_mask_changes(rapt, save, where, tmp_path):
    x = draw(1, 5, 8)
    save(x=x)
    shown = rapt("compare", "--q=x.npy", "--causal", "-o=c.svg", "--queries=a,b,c,d,e", "--keys=a,b,c,d,e",
                 *where).stdout  # fmt: skip
    assert re.search("without +with", shown)
    assert re.search("share of keys with weight 0 +0 +0.4", shown)
    assert "head 0, batch row 0, without and with causal" in shown
    words = svg_words(tmp_path / "c.svg")
    assert {"Attention weights of head 0, batch row 0", "without causal", "with causal"} <= set(words)
    report = json.loads(rapt("compare", "--q=x.npy", "--causal", "--json", *where).stdout)
    full = oracle(x[None, None], x[None, None], x[None, None])[1][0, 0]
    causal = oracle(x[None, None], x[None, None], x[None, None], visible=np.tril(np.ones((5, 5), bool)))[1][0, 0]
    b, h, i, j = report["largest_change"]["at"]
    assert (b, h) == (0, 0) and (i, j) == np.unravel_index(abs(causal - full).argmax(), (5, 5))
    close(report["largest_change"]["with"], causal[i, j], 1e-5)
    entropy = -np.where(causal > 0, causal * np.log(np.maximum(causal, 1e-30)), 0).sum(-1)
    close(report["with"]["effective_keys"], np.exp(entropy).mean(), 1e-5)


def test_compare_shows_what_a_sink_takes(rapt, save):
    q, k, v = draw(1, 1, 2, 5, 8), draw(2, 1, 2, 5, 8), draw(3, 1, 2, 5, 8)
    save(q=q, k=k, v=v, sink=np.zeros(2, "f4"))
    report = json.loads(rapt("compare", "--q=q.npy", "--k=k.npy", "--v=v.npy", "--causal", "--head-sink=sink.npy",
                             "--without=head-sink", "--json", "--local").stdout)  # fmt: skip
    assert abs(report["without"]["sum"] - 1) < 1e-6 and report["with"]["sum"] < 0.9
    assert report["with"]["zeros"] == report["without"]["zeros"] == 0.4
    refused = rapt("compare", "--q=q.npy", "--without=softcap", code=USAGE).stderr
    assert "--without names 'softcap', which the call does not have" in refused
    assert "the call has no flag to compare it without" in rapt("compare", "--q=q.npy", code=USAGE).stderr
    refused = rapt("compare", "--q=q.npy", "--without=sink", code=USAGE).stderr
    assert "'sink'" in refused and "head-sink" in refused


@EVERYWHERE
def test_padding_is_hidden_by_token_ids(rapt, save, load, where):
    q, k, v = draw(1, 2, 2, 5, 8), draw(2, 2, 2, 7, 8), draw(3, 2, 2, 7, 8)
    ids = np.array([[5, 6, 7, 8, 9, 10, 1], [5, 6, 1, 1, 1, 1, 1]], "i4")
    save(q=q, k=k, v=v, ids=ids, short=ids[:, :5], floats=ids.astype("f4"), mask=np.ones((5, 7), bool))
    files = ["--q=q.npy", "--k=k.npy", "--v=v.npy", "-o=y.npy", *where]
    rapt("attend", *files, "--pad-ids=ids.npy", "--pad-token=1")
    close(load("y.npy"), oracle(q, k, v, visible=(ids != 1)[:, None, None])[0])
    for wrong, message in [
        (["--pad-ids=short.npy"], "--pad-ids has shape [2, 5]; it must be [7] or [2, 7]"),
        (["--pad-ids=floats.npy"], "--pad-ids has type float32; it must have an integer type"),
        (["--pad-ids=ids.npy", "--mask=mask.npy"], "a mask and --pad-ids are both given"),
        (["--pad-token=1"], "--pad-token needs --pad-ids"),
    ]:
        assert message in rapt("attend", *files, *wrong, code=USAGE).stderr


# --- demo -----------------------------------------------------------------------------------------


def on_terminal(command, columns, **environment):
    """Returns what the command writes to a terminal of that width."""
    child, terminal = pty.fork()
    if child == 0:
        # The shell starts the command once the parent has set the size.
        os.execvpe("sh", ["sh", "-c", f"read go; {shlex.join(command)}"],
                   {**os.environ, "TERM": "xterm-256color", **environment})  # fmt: skip
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    os.write(terminal, b"go\n")
    written = b""
    try:
        while chunk := os.read(terminal, 65536):
            written += chunk
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    assert os.waitpid(child, 0)[1] == 0, written
    return written.decode().replace("\r\n", "\n")


def test_demo_prints_plain_text(rapt):
    shown = rapt("demo").stdout
    assert "\x1b" not in shown
    assert "'cat' attends most to 'sat' (49.0%)" in shown
    assert "'the₁' attends most to 'the₁' (100.0%)" in shown  # causal: only itself is visible
    assert "Computed by cpu at" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_demo_is_in_colour_on_a_terminal(server):
    demo = [RAPT, "demo", "--address", server.grpc_address]
    coloured = on_terminal(demo, 80)
    assert "\x1b[48;2;" in coloured
    side_by_side = re.compile("every word sees every word +causal: no word sees ahead")
    assert side_by_side.search(coloured)
    assert not side_by_side.search(on_terminal(demo, 60))
    assert "\x1b" not in on_terminal(demo, 80, NO_COLOR="1")


def test_demo_as_json(rapt):
    report = json.loads(rapt("demo", "--json").stdout)
    assert report["words"] == ["the₁", "cat", "sat", "on", "the₂", "mat"]
    for kind in ("full", "causal"):
        weights = np.array(report[kind]["weights"])
        close(weights.sum(1), 1, 1e-6)
        assert (weights.argmax(1) == report[kind]["attends_most_to"]).all()
    assert (np.triu(np.array(report["causal"]["weights"]), 1) == 0).all()


# --- diagnose -------------------------------------------------------------------------------------


@EVERYWHERE
def test_diagnose_reports_likely_causes(rapt, save, where):
    x = draw(0, 1, 2, 3, 4)
    x[0, 1, 2, 3] = np.nan
    save(x=x, mask=np.array([[1, 0, 0]] * 3, np.float32))
    flags = ["--q", "x.npy", "--mask", "mask.npy", "--causal", *where]
    report = json.loads(rapt("diagnose", *flags, "--json").stdout)
    assert report["problem"].startswith("B=1 Hq=2 Hkv=2 Sq=3 Sk=3 P=0 D=4 Dv=4 FP32 ")
    inputs = {tensor["name"]: tensor for tensor in report["inputs"]}
    assert list(inputs) == ["q", "k", "v", "mask"]
    assert inputs["q"]["nan_count"] == 1
    assert inputs["q"]["shape"] == [1, 2, 3, 4]
    np.testing.assert_allclose(inputs["q"]["min"], np.nanmin(x), rtol=1e-6)
    assert inputs["mask"]["shape"] == [3, 3]
    assert report["pairs"] == 18
    assert report["masked_by_position"] == 6
    assert report["masked_by_mask"] == 0
    assert any("mask" in warning for warning in report["warnings"])
    assert [choice["chosen"] for choice in report["backends"]].count(True) == 1

    shown = rapt("diagnose", *flags).stdout
    assert "Likely causes:" in shown
    assert re.search(r"^  q FP32 \[1, 2, 3, 4\] .* 1 +\. +\.$", shown, re.MULTILINE)
    assert "18 pairs of query and key; hidden by position: 6 (33.3%), by the mask: 0\n" in shown
    assert "runs this: cpu/" in shown


@EVERYWHERE
def test_diagnose_lists_rows_that_see_no_key(rapt, save, where):
    save(x=draw(0, 1, 1, 3, 4), mask=np.array([[True] * 3, [False] * 3, [True] * 3]))
    flags = ["--q", "x.npy", "--mask", "mask.npy", *where]
    report = json.loads(rapt("diagnose", *flags, "--json").stdout)
    assert report["empty_rows"] == {"count": 1, "first": [{"batch": 0, "head": 0, "query": 1}]}
    assert report["masked_by_mask"] == 3
    shown = rapt("diagnose", *flags).stdout
    assert "  1 query row sees no key; its output is zero\n    batch 0, head 0, query 1\n" in shown


@EVERYWHERE
def test_diagnose_names_the_rows_that_the_rule_of_onnx_moves(rapt, save, where):
    save(x=draw(0, 2, 1, 3, 4), lengths=np.array([3, 2]))
    flags = ["--q=x.npy", "--key-lengths=lengths.npy", "--causal", "--json", *where]
    moved = "the queries of batch rows 1 by key_lengths - Sq, those of row 1 by -1"
    for alignment, verb in ([], "would move"), (["--onnx-alignment"], "the alignment of ONNX moves"):
        warnings = json.loads(rapt("diagnose", *flags, *alignment).stdout)["warnings"]
        assert any(f"{verb} {moved}" in warning for warning in warnings), warnings


@EVERYWHERE
def test_diagnose_of_a_healthy_call(rapt, save, where):
    save(x=draw(0, 1, 1, 3, 4))
    assert "No problem found.\n" in rapt("diagnose", "--q", "x.npy", *where).stdout


# --- memory, info, health -------------------------------------------------------------------------


def test_standard_memory_is_the_score_matrix(rapt):
    flags = ["--batch=32", "--heads=8", "--seq=512,1024"]
    assert re.search(r"^ +512 .* 256 MiB ", rapt("memory", *flags).stdout, re.MULTILINE)
    report = json.loads(rapt("memory", *flags, "--json").stdout)
    assert [row["standard_bytes"] for row in report["lengths"]] == [2**28, 2**30]
    assert report["lengths"][1]["fused_bytes"] < 2**28


def test_memory_uses_the_plans_of_a_server(rapt, server):
    flags = ["--batch=32", "--heads=8", "--seq=512", "--address", server.grpc_address]
    assert f"the plan of {server.grpc_address}: cpu/" in rapt("memory", *flags).stdout
    report = json.loads(rapt("memory", *flags, "--json").stdout)
    assert report["lengths"][0]["standard_bytes"] == 2**28


def test_memory_agrees_with_a_server_on_this_machine(rapt, server):
    """Both use the cores available to the process, not those of the machine."""
    flags = ["--batch=32", "--heads=8", "--seq=512,16384", "--json"]
    here = json.loads(rapt("memory", *flags).stdout)
    assert here == json.loads(rapt("memory", *flags, "--address", server.grpc_address).stdout)


def test_memory_of_a_layer(rapt, server, models):
    flags = ["--seq=1,512", "--batch=2", "--dtype=fp16"]
    here = json.loads(rapt("memory", f"--model={models / 'llama_block'}", *flags, "--json").stdout)
    there = json.loads(rapt("memory", "--model=llama_block", *flags, "--json", "--address", server.grpc_address).stdout)
    assert here | {"model": "llama_block"} == there
    assert there["weight_bytes"] > 4 * 32 * 64 * 2
    row = there["lengths"][1]
    assert row["tensor_bytes"] == 2 * 512 * 32 * 2 * 2
    assert row["charged_bytes"] >= row["fused_bytes"] + row["tensor_bytes"] // 2
    shown = rapt("memory", "--model=llama_block", "--address", server.grpc_address).stdout
    assert re.search(r"^ +length +inputs, Y +workspace +charged$", shown, re.MULTILINE)
    assert "only --batch, --seq and --dtype" in rapt("memory", "--model=a", "--heads=4", code=USAGE).stderr
    assert "the folder 'absent' does not exist" in rapt("memory", "--model=absent", code=USAGE).stderr


def test_memory_shows_attention_in_linear_time(rapt, server):
    report = json.loads(rapt("memory", "--json").stdout)
    assert [row["length"] for row in report["lengths"]] == [2**n for n in range(7, 16)]
    first, last = report["lengths"][0], report["lengths"][-1]
    assert first["linear"]["state_bytes"] == 8 * 266 * 65 * 4
    assert first["linear"] == last["linear"]
    assert last["fused_bytes"] < last["lsh"]["workspace_bytes"] < last["standard_bytes"] / 20
    flags = ["--seq=100,1024", "--features=16", "--hashes=2", "--chunk-length=32", "--json"]
    here = json.loads(rapt("memory", *flags).stdout)
    assert here["lengths"][1]["linear"]["state_bytes"] == 8 * 16 * 65 * 4
    assert here == json.loads(rapt("memory", *flags, "--address", server.grpc_address).stdout)
    shown = rapt("memory", "--seq=1024", "--head-size=100000").stdout
    assert re.search(r"^ +1024 .* -$", shown, re.MULTILINE)
    assert "into heads of 1 to 65536" in shown


def test_memory_shows_what_inputs_save(rapt, server):
    flags = ["--seq=128,1024", "--heads=8", "--block-q=64", "--block-k=64", "--alibi", "--per-head"]
    shown = rapt("memory", *flags).stdout
    assert re.search(r"^ +length .* block_mask +saved +alibi +saved$", shown, re.MULTILINE)
    assert re.search(r"^ +1024 .* 2 KiB +7.998 MiB +0 B +32 MiB$", shown, re.MULTILINE)
    here = json.loads(rapt("memory", *flags, "--json").stdout)
    assert here["lengths"][0]["inputs"] == [
        {"name": "block_mask", "bytes": 8 * 4, "saved_bytes": 8 * (128**2 - 4)},
        {"name": "alibi", "bytes": 0, "saved_bytes": 8 * 128**2 * 4},
    ]
    there = rapt("memory", *flags, "--json", "--address", server.grpc_address).stdout
    assert here == json.loads(there)


def test_memory_shows_what_an_input_costs_more(rapt):
    flags = ["--seq=1024", "--selected-indices=1024", "--bias-table=32"]
    shown = rapt("memory", *flags).stdout
    assert re.search(r" 4 MiB +-3 MiB +1 KiB +32 MiB$", shown, re.MULTILINE)
    (row,) = json.loads(rapt("memory", "--relative-bias=7", *flags[:2], "--json").stdout)["lengths"]
    assert [entry["name"] for entry in row["inputs"]] == ["selected_indices", "relative_bias"]


def test_info_shows_version_and_backends(rapt):
    report = json.loads(rapt("info", "--json").stdout)
    assert report["backend"] == "auto"
    assert [backend["name"] for backend in report["backends"]][-1] == "reference"
    shown = rapt("info").stdout
    assert f"rapt-server {report['version']} at " in shown
    assert "(in use)" in shown


def test_info_shows_the_limits(rapt):
    limits = json.loads(rapt("info", "--json").stdout)["admission"]
    assert limits["max_open_calls"] == 4096
    assert limits["max_queue_delay_ms"] == 10_000
    shown = rapt("info").stdout
    assert "calls     up to 4096 open, 1024 per caller\n" in shown
    assert "queue     up to 1024 requests, for 10s at most\n" in shown
    assert "deadline  1m by default, 1h at most\n" in shown


def test_info_tells_whether_the_server_keeps_caches(rapt):
    assert json.loads(rapt("info", "--json").stdout)["caches"] == {
        "max_bytes": 67108864, "max_bytes_per_caller": 0, "max_caches_per_caller": 65536,
        "default_lease_ms": 600_000, "max_lease_ms": 86_400_000,
    }  # fmt: skip
    shown = rapt("info").stdout
    assert "caches    up to 64 MiB; 64 MiB in 65536 caches per caller\n" in shown
    assert "leases    10m by default, 24h at most\n" in shown
    with RaptServer() as other:
        at = ("--address", other.grpc_address)
        assert "caches" not in json.loads(rapt("info", "--json", *at).stdout)
        assert "caches    none: the server runs without --kv_cache_bytes\n" in rapt("info", *at).stdout


def test_health_of_server_and_service(rapt, server):
    assert rapt("health").stdout == "SERVING\n"
    report = json.loads(rapt("health", "--json").stdout)
    assert report == {"address": server.grpc_address, "status": "SERVING"}
    assert rapt("health", "--service", "nobody", code=CALL_FAILED).stderr.startswith(
        "rapt: NOT_FOUND: "
    )


# --- caches ---------------------------------------------------------------------------------------


@pytest.fixture
def create(rapt):
    """create(*flags): the id of a cache of two layers, whose flags may be replaced."""
    made = []

    def run(*flags):
        made.append(rapt("cache", "create", "--layers=2", "--kv-heads=2", "--head-size=4", *flags).stdout.strip())
        return made[-1]

    yield run
    for cache in made:
        rapt("cache", "close", cache, code=None)


def show(rapt, cache):
    return json.loads(rapt("cache", "show", cache, "--json").stdout)


def tokens_of(seed, count, value_size=4):
    """q, k and v of tokens, [count, heads, size]."""
    return draw(seed, count, 4, 4), draw(seed + 1, count, 2, 4), draw(seed + 2, count, 2, value_size)


def causal(q, k, v, **call):
    """The oracle's Y, [S, Hq, Dv], for the last S of all tokens."""
    heads_first = (x.transpose(1, 0, 2)[None] for x in (q, k, v))
    visible = np.tril(np.ones((len(q), len(k)), bool), len(k) - len(q))
    return oracle(*heads_first, visible=visible, **call)[0][0].transpose(1, 0, 2)


def test_append_tells_how_many_tokens_there_are(rapt, create, save):
    _, k, _ = tokens_of(1, 1)
    save(k=k)
    append = ("cache", "append", create(), "k.npy", "k.npy")
    assert rapt(*append).stdout == "layer 0 has 1 token\n"
    assert rapt(*append).stdout == "layer 0 has 2 tokens\n"


def test_cache_steps_equal_attention_of_all_tokens(rapt, create, save, load):
    q, k, v = tokens_of(1, 6, value_size=3)
    cache = create("--value-head-size=3")
    save(k=k[:4], v=v[:4])
    assert rapt("cache", "append", cache, "k.npy", "v.npy", "--layer=1").stdout == "layer 1 has 4 tokens\n"
    for at in (4, 5):
        step = slice(at, at + 1)
        save(q=q[step], k=k[step], v=v[step])
        shown = rapt("cache", "attend", cache, "q.npy", "--k=k.npy", "--v=v.npy", "--layer=1", "-o=y.npy").stdout
        assert shown.startswith("y        float32 [1, 4, 3] in y.npy\nplan     cpu/")
        close(load("y.npy"), causal(q[step], k[: at + 1], v[: at + 1]))
    assert show(rapt, cache)["lengths"] == [0, 6]
    save(q=q)
    flags = ["--scale=0.7", "--softcap=1.5", "--lse=lse.npy", "--layer=1", "-o=y.npy"]
    report = json.loads(rapt("cache", "attend", cache, "q.npy", *flags, "--json").stdout)
    assert [output["name"] for output in report["outputs"]] == ["y", "lse"]
    close(load("y.npy"), causal(q, k, v, scale=0.7, softcap=1.5))
    assert load("lse.npy").shape == (6, 4)
    save(q=q[1:3])
    rapt("cache", "attend", cache, "q.npy", "--layer=1", "--position=1", "-o=y.npy")
    close(load("y.npy"), causal(q[1:3], k[:3], v[:3]))
    rapt("cache", "attend", cache, "q.npy", "--layer=1", "--at=3", "-o=y.npy")
    close(load("y.npy"), causal(q[1:3], k[:3], v[:3]))
    rapt("cache", "attend", cache, "q.npy", "--layer=1", "--at=3", "--window=0", "-o=y.npy")
    close(load("y.npy"), np.repeat(v[1:3], 2, axis=1))


def test_cache_with_a_sink_of_zero(rapt, create, save, load):
    q, k, v = tokens_of(2, 3)
    save(q=q[2:], k=k, v=v, sink=np.zeros(4, "f4"))
    rapt("cache", "attend", create(), "q.npy", "--k=k.npy", "--v=v.npy", "--head-sink=sink.npy", "-o=y.npy")
    zeros = np.zeros((1, 2, 4), "f4")
    close(load("y.npy"), causal(q[2:], np.concatenate([zeros, k]), np.concatenate([zeros, v])))


@pytest.mark.parametrize(
    "dtype, name, tolerance", [("f2", "fp16", 3e-3), (ml_dtypes.bfloat16, "bf16", 2e-2), ("f8", "fp64", 1e-12)]
)
def test_cache_keeps_the_type(rapt, create, save, load, dtype, name, tolerance):
    q, k, v = (x.astype(dtype) for x in tokens_of(3, 3))
    save(q=q, k=k, v=v)
    cache = create("--dtype", name)
    flags = ["-o=y.npy", *(["--dtype=bf16"] if name == "bf16" else [])]
    rapt("cache", "attend", cache, "q.npy", "--k=k.npy", "--v=v.npy", *flags)
    want = causal(*(x.astype("f8") for x in (q, k, v)))
    close(load("y.npy").view(dtype).astype("f8"), want, tolerance)
    if name != "fp64":
        rapt("cache", "attend", cache, "q.npy", "--float-output", *flags)
        assert load("y.npy").dtype == np.float32
        close(load("y.npy"), want, tolerance)
    assert show(rapt, cache)["dtype"] == name.upper()


def test_cache_stores_8_bits(rapt, create, save, load):
    q, k, v = (x.astype("f2") for x in tokens_of(7, 70))
    save(q=q[:1], k=k, v=v)
    caches = {storage: create("--dtype=fp16", f"--storage={storage}") for storage in ("plain", "int8")}
    errors = {}
    for storage, cache in caches.items():
        rapt("cache", "append", cache, "k.npy", "v.npy")
        rapt("cache", "attend", cache, "q.npy", "--float-output", "-o=y.npy")
        assert show(rapt, cache)["storage"] == storage
        errors[storage] = np.abs(load("y.npy") - causal(*(x.astype("f8") for x in (q[:1], k, v)))).max()
    assert errors["plain"] < errors["int8"] < 0.05
    # Of 4 numbers a row has one block: 6 bytes instead of 8.
    assert show(rapt, caches["int8"])["bytes"] * 8 == show(rapt, caches["plain"])["bytes"] * 6
    assert "dtype       FP16, stored as INT8" in rapt("cache", "show", caches["int8"]).stdout.splitlines()


def test_cache_diagnose_reports_as_diagnose_of_all_tokens(rapt, create, save):
    arrays = {"q": draw(1, 2, 4, 4), "k": draw(2, 5, 2, 4), "v": draw(3, 5, 2, 4)}
    save(**arrays)
    cache = create()
    rapt("cache", "append", cache, "k.npy", "v.npy", "--layer=1")
    report = json.loads(rapt("cache", "diagnose", cache, "q.npy", "--layer=1", "--json").stdout)
    save(**{name: array.transpose(1, 0, 2)[None] for name, array in arrays.items()})
    files = ("--q=q.npy", "--k=k.npy", "--v=v.npy")
    whole = json.loads(rapt("diagnose", *files, "--causal", "--bottom-right", "--json").stdout)
    for step in ("raw_scores", "scaled_scores", "biased_scores", "weights", "output", "pairs", "masked_by_position"):
        assert report[step] == whole[step], step
    assert [tensor["shape"] for tensor in report["inputs"]] == [[2, 4, 4], [5, 2, 4], [5, 2, 4]]
    assert "first_query=3" in report["problem"]


def test_cache_diagnose_finds_a_nan(rapt, create, save):
    q = draw(1, 1, 4, 4)
    q[0, 2, 1] = np.nan
    save(k=draw(2, 3, 2, 4), v=draw(3, 3, 2, 4), q=q)
    cache = create()
    rapt("cache", "append", cache, "k.npy", "v.npy")
    assert "q has 1 NaN among 16 values" in rapt("cache", "diagnose", cache, "q.npy").stdout
    assert rapt("cache", "diagnose", cache, "q.npy", "--at=4", code=CALL_FAILED).stderr.endswith(
        "items[0]: at is 4; the layer has 3 tokens\n"
    )
    assert rapt("cache", "diagnose", cache, code=USAGE).stderr.startswith("rapt: 1 of 2 arguments given")


def test_cache_append_again_changes_nothing(rapt, create, save):
    _, k, v = tokens_of(4, 3)
    save(k=k, v=v, other=v + 1)
    cache = create()
    append = ["cache", "append", cache, "k.npy", "v.npy"]
    assert json.loads(rapt(*append, "--json").stdout) == {
        "id": cache, "layer": 0, "generation": 1, "length": 3, "applied_before": False}  # fmt: skip
    assert rapt(*append, "--at=0").stdout == "layer 0 has 3 tokens; these were there already\n"
    assert rapt(*append).stdout == "layer 0 has 6 tokens\n"
    failed = rapt("cache", "append", cache, "k.npy", "other.npy", "--at=0", code=CALL_FAILED)
    assert failed.stderr.startswith("rapt: ABORTED: ") and "other tokens" in failed.stderr
    assert "OUT_OF_RANGE" in rapt(*append, "--at=9", code=CALL_FAILED).stderr
    assert "generation is 2; the cache has 1" in rapt(*append, "--generation=2", code=CALL_FAILED).stderr
    assert "--layer is 2; the cache has layers 0 to 1" in rapt(*append, "--layer=2", code=CALL_FAILED).stderr
    assert show(rapt, cache)["lengths"] == [6, 0]


def test_cache_fork_truncate_and_close(rapt, create, save, load):
    q, k, v = tokens_of(5, 70)
    save(q=q[:40], k=k, v=v)
    cache = create("--name=life", "--reserve-tokens=64", "--lease=90", "--first-position=5", "--keep-last=500")
    for layer in (0, 1):
        rapt("cache", "append", cache, "k.npy", "v.npy", "--layer", layer)
    fork = rapt("cache", "fork", cache, "--length=40").stdout.strip()
    shown = show(rapt, cache)
    assert shown["name"] == "life" and shown["lease_ms"] == 90_000 and 80_000 < shown["expires_in_ms"] <= 90_000
    assert shown["shapes"] == [{"layers": 2, "kv_heads": 2, "head_size": 4, "value_head_size": 4, "keep_first": 0, "keep_last": 500}]
    assert shown["first_position"] == 5 and shown["reserve_tokens"] == 64
    assert json.loads(rapt("cache", "truncate", cache, "--length=1", "--json").stdout)["lengths"] == [1, 1]
    assert rapt("cache", "truncate", cache, "--length=0").stdout == "generation 3\n"
    assert show(rapt, fork)["lengths"] == [40, 40]
    rapt("cache", "attend", fork, "q.npy", "-o=y.npy")
    close(load("y.npy"), causal(q[:40], k[:40], v[:40]))
    named = json.loads(rapt("cache", "fork", fork, "--name=twig", "--lease=7", "--json").stdout)
    assert named["lease_ms"] == 7000 and named["lengths"] == [40, 40]
    assert json.loads(rapt("cache", "fork", fork, "--name=twig", "--json").stdout)["id"] == named["id"]
    assert rapt("cache", "create", "--kv-heads=1", "--head-size=1", "--name=twig", code=CALL_FAILED).stderr.startswith(
        "rapt: ALREADY_EXISTS: "
    )
    closed = rapt("cache", "close", named["id"], fork, "nobody", code=CALL_FAILED)
    assert closed.stdout == f"closed {named['id']}\nclosed {fork}\n"
    assert closed.stderr == "rapt: NOT_FOUND: 1 of 3 caches are not found; first 'nobody': unknown\n"
    assert rapt("cache", "show", fork, code=CALL_FAILED).stderr.endswith("is not found: closed\n")
    assert json.loads(rapt("cache", "close", cache, "--json").stdout)["closed"][0]["id"] == cache


def test_cache_list_shows_lengths_memory_and_lease(rapt, create, save):
    _, k, v = tokens_of(6, 3)
    save(k=k, v=v)
    first, second = create("--name=list/a"), create("--name=list/b", "--lease=60")
    rapt("cache", "append", second, "k.npy", "v.npy", "--layer=1")
    heading, *rows = rapt("cache", "list", "--prefix=list/").stdout.splitlines()
    assert re.split("  +", heading) == ["id", "name", "bytes", "shared", "lengths", "lease left"]
    columns = [re.split("  +", row) for row in rows]
    assert [row[:2] for row in columns] == [[first, "list/a"], [second, "list/b"]]
    assert columns[0][2:5] == ["0 B", "0 B", "0"] and columns[0][5].startswith("9m5")
    assert re.fullmatch(r"[0-9.]+ KiB", columns[1][2]) and columns[1][3:5] == ["0 B", "0..3"]
    assert columns[1][5].startswith("5")
    listed = json.loads(rapt("cache", "list", "--prefix=list/", "--json").stdout)["caches"]
    assert [cache["lengths"] for cache in listed] == [[0, 0], [0, 3]]
    fork = rapt("cache", "fork", second, "--length=0", "--name=list/c").stdout.strip()
    assert [cache["id"] for cache in json.loads(rapt("cache", "list", "--json").stdout)["caches"]][-1] == fork
    rapt("cache", "close", fork)
    shown = rapt("cache", "show", second).stdout
    for line in (f"id          {second}", "layers      2 of Hkv 2, D 4, Dv 4", "dtype       FP32", "lengths     0..3",
                 "generation  1"):  # fmt: skip
        assert line in shown.splitlines()
    assert re.search(r"^lease       1m, 5\ds left$", shown, re.MULTILINE)


def test_cache_export_and_import(rapt, create, save, load, server, tmp_path):
    q, k, v = tokens_of(7, 90)
    save(q=q, k=k, v=v)
    cache = create("--name=moves", "--first-position=3", "--keep-last=70")
    rapt("cache", "append", cache, "k.npy", "v.npy", "--layer=1")
    with RaptServer("--kv_cache_bytes=4194304", "--grace_period=0s") as other:
        there = {"RAPT_ADDRESS": other.grpc_address}
        exported = rapt("cache", "export", cache, "-o=moves.kvcache", "--chunk-tokens=16")
        assert exported.stdout == "" and exported.stderr == "wrote moves.kvcache\n"
        report = json.loads(rapt("cache", "export", cache, "--output=again", "--generation=1", "--json").stdout)
        assert report["path"] == "again" and report["cache"]["id"] == cache
        ids = [
            rapt("cache", "import", "moves.kvcache", **there).stdout.strip(),
            rapt("cache", "export", cache, f"--to={other.grpc_address}", "--name=copy", "--lease=9").stdout.strip(),
            json.loads(rapt("cache", "import", "again", "--name=third", "--json", **there).stdout)["id"],
        ]
        piped = subprocess.run(
            f"{RAPT} cache export {cache} -o /dev/stdout | {RAPT} cache import /dev/stdin --name=piped "
            f"--address={other.grpc_address}",
            shell=True, env={**os.environ, "RAPT_ADDRESS": server.grpc_address}, capture_output=True, text=True,
        )  # fmt: skip
        assert piped.returncode == OK, piped
        ids.append(piped.stdout.strip())
        listed = json.loads(rapt("cache", "list", "--json", **there).stdout)["caches"]
        assert [shown["name"] for shown in listed] == ["moves", "copy", "third", "piped"]
        assert [shown["id"] for shown in listed] == ids
        assert [shown["lease_ms"] for shown in listed] == [600_000, 9_000, 600_000, 600_000]
        save(q=q[80:])
        rapt("cache", "attend", cache, "q.npy", "--layer=1", "-o=here.npy")
        for id in ids:
            rapt("cache", "attend", id, "q.npy", "--layer=1", "-o=there.npy", **there)
            np.testing.assert_array_equal(load("there.npy"), load("here.npy"))
            shown = json.loads(rapt("cache", "show", id, "--json", **there).stdout)
            assert shown["lengths"] == [0, 90] and shown["first_position"] == 3 and shown["generation"] == 1
        taken = rapt("cache", "import", "moves.kvcache", code=CALL_FAILED, **there)
        assert taken.stderr.startswith("rapt: ALREADY_EXISTS: ")
    (tmp_path / "cut").write_bytes((tmp_path / "moves.kvcache").read_bytes()[:-1])
    assert rapt("cache", "import", "cut", "--name=cut", code=USAGE).stderr == "rapt: cut: the file is cut or damaged\n"
    assert not list(tmp_path.glob("*.part"))


def test_a_server_without_caches_says_so(rapt, tmp_path):
    with RaptServer() as server:
        failed = rapt("cache", "list", code=CALL_FAILED, RAPT_ADDRESS=server.grpc_address)
    assert failed.stderr.startswith("rapt: UNIMPLEMENTED: ")


# --- errors ---------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, save):
    """Valid and invalid files for the table below."""
    x = draw(1, 3, 4)
    save(x=x, q=draw(1, 1, 2, 3, 8), k=draw(2, 1, 2, 3, 4), v=draw(3, 1, 2, 3, 8))
    save(ints=np.zeros((3, 4), "i4"), big=x.astype(">f4"), complex=x.astype("c8"))
    save(mask=np.array([[0, 1, 2]]), vector=x[0], empty=np.zeros((0, 3)), w=np.eye(3))
    save(words=np.array(["a"]), layers=np.full((2, 1, 1, 3, 3), 1 / 3))
    save(bf16=x.astype(ml_dtypes.bfloat16), huge=np.zeros(1))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-5])
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "huge.npy").write_bytes(whole.replace(b"(3, 4)", b"(9000000000000000000, 4)", 1))
    np.savez(tmp_path / "in.npz", a=x, b=x)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "in.npz").read_bytes()[:200])


ERRORS = [
    ("", USAGE, "no command given"),
    ("atend", USAGE, "did you mean attend?"),
    ("frobnicate", USAGE, "unknown command 'frobnicate'"),
    ("attend --q x.npy", USAGE, "--output is required"),
    ("attend -o y.npy --local", USAGE, "no query given"),
    ("attend --q x.npy -o y.npy --cuasal", USAGE, "did you mean --causal?"),
    ("attend --q x.npy -o y.npy --heads two", USAGE, "--heads is 'two'; it takes a whole number"),
    ("attend --q x.npy -o y.npy --window 1", USAGE, "LEFT,RIGHT"),
    ("attend --q x.npy -o y.npy --layout bhsd", USAGE, "shape [3, 4]"),
    ("attend --q x.npy -o y.npy --layout sbhd", USAGE, "bhsd"),
    ("attend --q x.npy -o y.npy --dtype fp8", USAGE, "it takes bf16"),
    ("attend --q x.npy -o y.npy --kv-heads 2", USAGE, "--kv-heads needs --heads"),
    ("attend --q x.npy -o y.npy --average", USAGE, "--average needs --model"),
    ("run", USAGE, "no operator given; the operators are attention, attention_backward, rotary_embedding"),
    ("run softmax --x x.npy", USAGE, "unknown operator 'softmax'; the operators are attention, "),
    ("run positional_encoding -o y.npy", USAGE, "--x is required"),
    ("run lsh_attention --q x.npy --v x.npy -o y.npy", USAGE, "--chunk-length is required"),
    ("run linear_attention --query x.npy --key x.npy --value x.npy --kv-num-heads 1 -o y.npy", USAGE, "--q-num-heads is required"),
    ("run linear_attention --is-causal", USAGE, "--is-causal: 1 required BOOL missing"),
    ("run positional_encoding --x none.npy -o y.npy", USAGE, "can't open none.npy"),
    ("attend --q x.npy -o y.npy --weights w.npy --scores s.npy", USAGE, "--weights and --scores are mutually exclusive"),
    ("attend --q x.npy -o y.npy --weights ./y.npy", USAGE, "--output and --weights both name y.npy"),
    ("attend --q x.npy -o y.npy --interleaved --local", USAGE, "--interleaved needs --cos-cache and --sin-cache, or"),
    ("attend --q x.npy -o y.npy --max-distance 9 --local", USAGE, "--max-distance needs --bias-table"),
    ("attend --q x.npy -o y.npy --block-q 2 --local", USAGE, "--block-q needs --block-mask"),
    ("attend --q x.npy -o y.npy --heads 0 --local", USAGE, "--heads is 0; it must be at least 1"),
    ("attend --q x.npy -o y.npy --timeout 0", USAGE, "--timeout is 0"),
    ("attend --q x.npy --k x.npy -o y.npy --local", USAGE, "k is given without v"),
    ("attend --q none.npy -o y.npy --local", USAGE, "none.npy: No such file"),
    ("attend --q . -o y.npy --local", USAGE, "Is a directory"),
    ("attend --q text.npy -o y.npy --local", USAGE, "text.npy: not a usable .npy file"),
    ("attend --q cut.npy -o y.npy --local", USAGE, "cut.npy: not a usable .npy file"),
    ("attend --q huge.npy -o y.npy --local", USAGE, "huge.npy: not a usable .npy file"),
    ("attend --q big.npy -o y.npy --local", USAGE, "big-endian"),
    ("attend --q complex.npy -o y.npy --local", USAGE, "'<c8'"),
    ("attend --q ints.npy -o y.npy --local", USAGE, "int32"),
    ("attend --q bf16.npy -o y.npy --local", USAGE, "set --dtype bf16"),
    ("attend --q in.npz -o y.npy --local", USAGE, "in.npz holds a, b; name one"),
    ("attend --q in.npz:c -o y.npy --local", USAGE, "no member 'c'; it holds a, b"),
    ("attend in.npz -o y.npy --local", USAGE, "no member q"),
    ("attend cut.npz -o y.npy --local", USAGE, "cut.npz: damaged .npz archive"),
    ("attend text.npy -o y.npy --local", USAGE, "text.npy: damaged .npz archive"),
    ("attend --q x.npy --mask mask.npy -o y.npy --local", USAGE, "element [0, 2] is 2"),
    ("attend --q x.npy -o none/y.npy --local", USAGE, "can't write none/y.npy"),
    ("attend --q vector.npy -o y.npy --local", CALL_FAILED, "INVALID_ARGUMENT"),
    ("attend --q q.npy --k k.npy --v v.npy -o y.npy --local", CALL_FAILED, "head size"),
    ("attend --q q.npy --k k.npy --v v.npy -o y.npy", CALL_FAILED, "INVALID_ARGUMENT"),
    ("attend --q x.npy -o y.npy --softcap -1", CALL_FAILED, "softcap"),
    ("attend --q x.npy --grad x.npy -o y.npy", USAGE, "there are 3 gradients; only an .npz can"),
    ("attend --q x.npy --grad x.npy -o y.npz --lse l.npy", USAGE, "--lse and --grad are mutually exclusive"),
    ("attend --q x.npy --grad x.npy -o y.npz --stream", USAGE, "--stream and --grad are mutually exclusive"),
    ("attend --q x.npy --gradients dq -o y.npz", USAGE, "--gradients needs --grad"),
    ("attend --q x.npy --forward-lse x.npy -o y.npz", USAGE, "--forward-lse needs --grad"),
    ("attend --q x.npy --grad x.npy --gradients dq,dz -o y.npz", USAGE, "gradients has 'dz'; it takes any of dq, dk,"),
    ("attend --q x.npy --grad w.npy -o y.npz --local", CALL_FAILED, "dy is FP64 [1, 3, 3]; it must be FP32 [1, 3, 4]"),
    ("attend --q x.npy --grad x.npy --forward-output x.npy -o y.npz --local", CALL_FAILED, "lse is not"),
    ("gradcheck --seq 0", USAGE, "--seq is 0; it must be at least 1"),
    ("gradcheck --local --gradients d_head_sink", CALL_FAILED, "head_sink is not given"),
    ("gradcheck --gradients x", USAGE, "gradients has 'x'"),
    ("gradcheck --address 127.0.0.1:1", UNREACHABLE, "can't reach"),
    ("plot w.npy --gradients --curves 1 -o w.svg", USAGE, "--gradients draws norms over all heads"),
    ("plot vector.npy --gradients -o w.svg", USAGE, "vector.npy has shape [4]; a gradient"),
    ("plot in.npz --gradients -o w.svg", USAGE, "in.npz has no member dq, dk or dv"),
    ("plot w.npy --gradients --batch 1 -o w.svg", USAGE, "--batch is 1; w.npy has batch rows 0 to 0"),
    ("attend --q x.npy -o y.npy --address 127.0.0.1:1", UNREACHABLE, "127.0.0.1:1"),
    ("demo --address 127.0.0.1:1", UNREACHABLE, "can't reach a server at 127.0.0.1:1"),
    ("info --address nonsense", UNREACHABLE, "can't reach a server at nonsense"),
    ("health --address 127.0.0.1:1", UNREACHABLE, "can't reach"),
    ("cache", USAGE, "no command given; rapt cache --help lists the commands"),
    ("cache frok", USAGE, "unknown command 'frok'; did you mean fork?"),
    ("cache show", USAGE, "0 of 1 arguments given; usage: rapt cache show ID"),
    ("cache show a b", USAGE, "unexpected argument 'b'"),
    ("cache show nobody", CALL_FAILED, "NOT_FOUND: cache: 'nobody' is not found: unknown"),
    ("cache close nobody", CALL_FAILED, "NOT_FOUND"),
    ("cache create --kv-heads 2", USAGE, "--head-size is required"),
    ("cache create --kv-heads 2 --head-size 4 --layers 0", USAGE, "--layers is 0; it must be from 1 to 1024"),
    ("cache create --kv-heads 2 --head-size 4 --lease=-1", USAGE, "--lease is -1; it takes seconds"),
    ("cache create --kv-heads 2 --head-size 4 --dtype fp8", USAGE, "fp32 or fp16 or bf16 or fp64"),
    ("cache create --kv-heads 2 --head-size 0", CALL_FAILED, "INVALID_ARGUMENT"),
    ("cache create --kv-heads 2 --head-size 4 --reserve-tokens 99999999", CALL_FAILED, "RESOURCE_EXHAUSTED: "),
    ("cache fork nobody --lease nan", USAGE, "--lease is nan"),
    ("cache append nobody k.npy", USAGE, "2 of 3 arguments given"),
    ("cache append nobody none.npy v.npy", USAGE, "none.npy: No such file"),
    ("cache append nobody bf16.npy v.npy", USAGE, "set --dtype bf16"),
    ("cache attend nobody q.npy", USAGE, "--output is required"),
    ("cache attend nobody q.npy --k k.npy -o y.npy", USAGE, "--k is given without --v"),
    ("cache attend nobody q.npy -o y.npy --lse ./y.npy", USAGE, "--output and --lse both name y.npy"),
    ("cache attend nobody q.npy -o y.npy --dtype fp8", USAGE, "it takes bf16"),
    ("cache attend nobody q.npy -o y.npy", CALL_FAILED, "NOT_FOUND"),
    ("cache truncate nobody", USAGE, "--length is required"),
    ("cache export nobody", USAGE, "one of --output and --to must be given, and not both"),
    ("cache export nobody -o x --to 127.0.0.1:1", USAGE, "one of --output and --to must be given"),
    ("cache export nobody -o x", CALL_FAILED, "NOT_FOUND"),
    ("cache export nobody -o x --lease=-1", USAGE, "--lease is -1"),
    ("cache import none.kvcache", USAGE, "none.kvcache: No such file"),
    ("cache import q.npy", USAGE, "q.npy: "),
    ("cache import", USAGE, "0 of 1 arguments given"),
    ("cache list --address 127.0.0.1:1", UNREACHABLE, "can't reach"),
    ("diagnose", USAGE, "no query given"),
    ("diagnose --q x.npy --softcap -1", CALL_FAILED, "softcap"),
    ("diagnose --q x.npy --softcap -1 --local", CALL_FAILED, "softcap"),
    ("diagnose --q x.npy --address 127.0.0.1:1", UNREACHABLE, "can't reach"),
    ("memory --address 127.0.0.1:1", UNREACHABLE, "can't reach"),
    ("memory --address 127.0.0.1:1 --token-file none", USAGE, "--token-file none can't be read"),
    ("demo now", USAGE, "unexpected argument 'now'"),
    ("memory --seq 0", USAGE, "--seq is 0; it must be at least 1"),
    ("memory --batch -1", USAGE, "--batch is -1; it must be at least 1"),
    ("memory --seq 9000000000000000000", USAGE, "from 0 to 2^40"),
    ("memory --seq ,", USAGE, "whole numbers like 1,2,3"),
    ("memory --hashes 0", USAGE, "--hashes is 0; it must be at least 1"),
    ("memory --hashes 1025", USAGE, "lsh_hashes is 1025; it must be from 1 to 1024"),
    ("memory --chunk-length 0", USAGE, "--chunk-length is 0; it must be at least 1"),
    ("memory --features -1", USAGE, "favor_features is -1; it must be from 1"),
    ("memory --dtype fp8", USAGE, "fp32, fp16, bf16 or fp64"),
    ("memory --block-q 64", USAGE, "block_mask is set but block_k is not"),
    ("memory --bias-table 32 --alibi", USAGE, "alibi and bias_table are both set"),
    ("memory --relative-bias 6", USAGE, "relative_bias has 6 distances"),
    ("plot w.npy --scaling -o w.svg", USAGE, "--scaling draws estimates; it excludes files"),
    ("plot --scaling --batch=1 -o w.svg", USAGE, "--scaling draws estimates; it excludes files"),
    ("plot w.npy --seq=128 -o w.svg", USAGE, "--seq is a flag of --scaling"),
    ("plot --scaling --seq 0 -o w.svg", USAGE, "--seq is 0; it must be at least 1"),
    ("plot --scaling -o w.jpg", USAGE, ".svg, .html or .png"),
    ("plot -o w.svg", USAGE, "no file with weights given"),
    ("plot w.npy -o w.jpg", USAGE, ".svg, .html or .png"),
    ("plot vector.npy -o w.svg", USAGE, "[queries, keys]"),
    ("plot empty.npy -o w.svg", USAGE, "it must not be empty"),
    ("plot w.npy x.npy -o w.svg", USAGE, "w.npy is 3 x 3, x.npy is 3 x 4"),
    ("plot w.npy --queries a,b -o w.svg", USAGE, "--queries has 2 labels; the weights need 3"),
    ("plot w.npy --keys @none -o w.svg", USAGE, "can't open none"),
    ("plot w.npy --heads 1 -o w.svg", USAGE, "has heads 0 to 0"),
    ("plot w.npy --heads x -o w.svg", USAGE, "all, or numbers"),
    ("plot w.npy --layers 1 -o w.svg", USAGE, "--layers names 1; w.npy has layers 0 to 0"),
    ("plot layers.npy layers.npy -o w.svg", USAGE, "layers.npy has 2 layers; of several files, --layers has to choose one layer"),
    ("plot words.npy -o w.svg", USAGE, "words.npy has type text; it must be float16, float32, float64 or bfloat16"),
    ("attend --q words.npy --k w.npy --v w.npy -o y.npy", USAGE, "q has type text"),
    ("plot w.npy --batch 1 -o w.svg", USAGE, "batch rows 0 to 0"),
    ("plot w.npy --query dog -o w.svg", USAGE, "--query is 'dog'"),
    ("plot w.npy --curves 0,3 -o w.svg", USAGE, "--curves is '3'; it takes a label or a number from 0 to 2"),
    ("plot w.npy --curves 0,1,2,0,1,2,0,1,2 -o w.svg", USAGE, "--curves names 9 columns; it takes at most 8"),
    ("plot w.npy --curves 0 --query 1 -o w.svg", USAGE, "--query and --curves are both set"),
    ("plot w.npy -o none/w.svg", USAGE, "can't write none/w.svg"),
]


@pytest.mark.parametrize("flags, field", [
    ("--q x.npy --heads 3", "attention.query_heads"),
    ("--q x.npy --softcap -1", "attention.softcap"),
    ("--q x.npy --dropout 2", "attention.dropout.probability"),
])
@pytest.mark.parametrize("command", ["attend -o y.npy", "diagnose"])
def test_local_errors_equal_the_servers(rapt, files, command, flags, field):
    there = rapt(*command.split(), *flags.split(), code=CALL_FAILED)
    here = rapt(*command.split(), *flags.split(), "--local", code=CALL_FAILED)
    assert here.stderr == there.stderr
    assert field in here.stderr


@pytest.mark.parametrize("command, code, message", ERRORS, ids=[row[0] for row in ERRORS])
def test_an_error_is_one_line(rapt, files, command, code, message):
    ran = rapt(*command.split(), code=code)
    assert ran.stdout == ""
    assert ran.stderr.startswith("rapt: ") and ran.stderr.endswith("\n")
    assert ran.stderr.count("\n") == 1
    assert message in ran.stderr


def test_another_server_at_the_address_is_unreachable(rapt):
    """A listener that responds like a web server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        address = "127.0.0.1:%d" % listener.getsockname()[1]
        ran = rapt("demo", "--address", address, code=UNREACHABLE)
        assert f"can't reach a server at {address}" in ran.stderr
        listener.shutdown(socket.SHUT_RDWR)


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk", [[], ["--chunk", "1"], ["--chunk", "4"], ["--chunk=1000"], ["--priority", "1"]], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_equals_a_unary_call(rapt, save, load, case, chunk):
    q, k, v = draw(1, 2, 4, 7, 8), draw(2, 2, 2, 9, 8), draw(3, 2, 2, 9, 6)
    save(q=q, k=k, v=v)
    if case.mask is not None:
        save(mask=case.mask)
    flags = ["--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "-o", "y.npy", "--lse", "lse.npy", "--scores", "s.npy"]
    shown = json.loads(rapt("attend", *flags, *case.flags, "--stream", *chunk, "--json").stdout)
    assert shown["path"] == "stream"
    y, lse, scores = load("y.npy"), load("lse.npy"), load("s.npy")
    close(y, oracle(q, k, v, **case.oracle)[0], 1e-5)
    rapt("attend", *flags, *case.flags)
    close(lse, load("lse.npy"), 1e-5)
    close(scores, load("s.npy"), 1e-5)


@pytest.mark.parametrize("streams", ["--chunk=2", "--weights=w.npy"])  # keys; queries, for weights
@pytest.mark.parametrize(
    "flags",
    [
        ["--head-sink=sink.npy", "--causal"],
        ["--alibi-slopes=sink.npy"],
        ["--bias-table=buckets.npy", "--bidirectional", "--max-distance=8"],
        ["--relative-bias=clipped.npy"],
        ["--attention-bias=bias.npy", "--causal"],
        ["--relative-keys=rk.npy", "--relative-values=rv.npy"],
    ],
    ids=lambda flags: flags[0],
)
def test_a_stream_takes_variants(rapt, save, load, flags, streams):
    save(q=draw(1, 2, 4, 5, 8), k=draw(2, 2, 4, 9, 8), v=draw(3, 2, 4, 9, 6))
    save(sink=draw(4, 4), buckets=draw(5, 8, 4), clipped=draw(6, 4, 7), bias=draw(7, 4, 5, 9))
    save(rk=draw(8, 4, 7, 8), rv=draw(9, 1, 7, 6))
    files = ["--q=q.npy", "--k=k.npy", "--v=v.npy", "-o=y.npy", *flags]
    rapt("attend", *files, "--local")
    want = load("y.npy")
    rapt("attend", *files, "--stream", streams)
    close(load("y.npy"), want, 1e-5)


def test_streams_return_weights(rapt, save, load):
    save(x=draw(1, 9, 8))
    rapt("attend", "--q", "x.npy", "-o", "y.npy", "--weights", "w.npy", "--stream", "--chunk", "2")
    np.testing.assert_allclose(load("w.npy").sum(-1), np.ones(9), rtol=1e-5)


def test_a_stream_shows_progress_on_a_terminal(tmp_path, save, server):
    save(x=draw(1, 1, 1, 64, 8))
    words = ["attend", "--q", "x.npy", "-o", "y.npy", "--stream", "--chunk", "4", "--address", server.grpc_address]
    master, terminal = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen:
        try:
            ran = subprocess.run([RAPT, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal, timeout=60)
        finally:
            os.close(terminal)
        shown = b""
        try:
            while part := screen.read(4096):
                shown += part
        except OSError:  # the terminal is closed
            pass
    assert ran.returncode == OK
    assert b" 100 % of 6 KiB" in shown
    assert shown.endswith(b"\r\x1b[K")  # erased at the end


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--chunk", "4"], "--chunk needs --stream"),
        (["--stream", "--local"], "--stream and --local are mutually exclusive"),
        (["--stream", "--chunk", "0"], "--chunk is 0; it must be at least 1"),
        (["--priority", "1", "--local"], "--local has no server"),
    ],
)
def test_invalid_stream_flags(rapt, save, flags, message):
    save(x=draw(1, 3, 4))
    ran = rapt("attend", "--q", "x.npy", "-o", "y.npy", *flags, code=USAGE)
    assert message in ran.stderr


def test_compare_memory_finds_equal_outputs_and_less_memory(rapt):
    shown = json.loads(rapt("compare-memory", "--seq", "512,2048", "--heads", "2", "--json").stdout)
    short, long = shown["lengths"]
    assert short["match"] and long["match"]
    assert long["standard"]["peak_bytes"] >= 4 * 2 * 2048 * 2048
    assert long["chunked"]["peak_bytes"] < long["standard"]["peak_bytes"] / 4
    table = rapt("compare-memory", "--seq", "64").stdout
    assert re.search(r"^ +64 .* match \(", table, re.MULTILINE)
    assert "--seq is 0" in rapt("compare-memory", "--seq", "0", code=USAGE).stderr


# --- help -----------------------------------------------------------------------------------------


# Those of kinds of attention with help of their own.
KINDS = ("attend --model",)
RUN_HELP = subprocess.run([RAPT, "run", "--help"], capture_output=True, text=True).stdout
RUNS = tuple(f"run {operator}" for operator in re.findall(r"^  ([a-z_]+)  +[A-Z]", RUN_HELP, re.MULTILINE))
CACHE_COMMANDS = tuple(f"cache {name}" for name in ("create", "append", "attend", "fork", "truncate", "list", "show", "close", "export", "import"))


def command_of(words):
    """The words before the first flag or operand that name a command: attend --model, cache fork."""
    for count in (2, 1):
        if " ".join(words[:count]) in (*COMMANDS, *CACHE_COMMANDS, *KINDS, *RUNS):
            return words[:count]
    raise AssertionError(words)


def examples_of(command):
    text = subprocess.run([RAPT, *command.split(), "--help"], capture_output=True, text=True).stdout
    return [line.strip() for line in text.partition("\nexamples:\n")[2].splitlines()]


def test_help_lists_every_command(rapt):
    shown = rapt("--help").stdout
    assert set(re.findall(r"^  (\S+) ", shown, re.MULTILINE)) == set(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", shown, re.MULTILINE)
        assert rapt(command, "--help").stdout.startswith(f"usage: rapt {command}")
    for command in CACHE_COMMANDS:
        assert re.search(rf"^  {command.split()[1]} ", rapt("cache", "--help").stdout, re.MULTILINE)
        assert rapt(*command.split(), "--help").stdout.startswith(f"usage: rapt {command}")
    assert {"run linear_attention", "run lsh_attention"} < set(RUNS)
    for run in RUNS:
        assert rapt(*run.split(), "--help").stdout.startswith(f"usage: rapt {run} --")
    for kind in KINDS:
        assert rapt(*kind.split(), "--help").stdout.startswith(f"usage: rapt {kind}")
        assert f"rapt {kind} --help" in " ".join(rapt("attend", "--help").stdout.split())


@pytest.fixture
def prepare(rapt, create, server, save, models, tmp_path):
    """prepare(example): writes the files of an example of the help and makes its cache; returns its arguments."""

    def save_tensors(example):
        heads = draw(1, 1, 8, 3, 8), draw(2, 1, 2, 3, 8), draw(3, 1, 2, 3, 8)
        q, k, v = (x.transpose(0, 2, 1, 3).reshape(1, 3, -1) for x in heads)
        if "--heads" not in example and "--kv-num-heads" not in example:
            k = v = q
        save(g=-np.ones((1, 3, 2)))
        save(x=q, q=q, k=k, v=v, w=np.full((4, 3, 3), 1 / 3), before=np.eye(3), after=np.eye(3))
        save(sink=np.zeros(1, "f4"), ids=np.array([5, 7, 0]), table=draw(4, 9, 64), encoding=draw(5, 9, 8))
        save(dy=v, state=draw(6, 3, 16), encoder=draw(7, 5, 32))
        if "--model" in example:
            save(x=draw(8, 3, 32))
        (tmp_path / "models").symlink_to(models)
        np.savez(tmp_path / "in.npz", q=q, k=k, v=v)
        np.savez(tmp_path / "gradients.npz", dq=q, dk=k, dv=v)
        np.savez(tmp_path / "bank.npz", tokens=np.array(["the", "bank", "of"]), weights=np.full((4, 1, 6, 3, 3), 1 / 3))

    def make_cache(example):
        q, k, v = tokens_of(1, 3)
        save(q=q, k=k, v=v)
        cache = create()
        for layer in (0, 1):
            rapt("cache", "append", cache, "k.npy", "v.npy", "--layer", layer)
        if " import " in example:
            rapt("cache", "export", cache, "-o=chat.kvcache")
        return cache

    def make(example):
        if example.startswith("rapt cache "):
            example = example.replace("$ID", make_cache(example))
        else:
            save_tensors(example)
        words = shlex.split(example.replace("127.0.0.1:8001", server.grpc_address))
        assert words[0] == "rapt"
        return words[1:]

    return make


@pytest.mark.parametrize("example", [e for command in (*COMMANDS, *CACHE_COMMANDS, *KINDS) for e in examples_of(command)])
def test_every_example_of_the_help_works(rapt, prepare, example):
    rapt(*prepare(example))


# The forms of pattern, plot and run read flags of their own.
@pytest.mark.parametrize("example", [e for command in (*COMMANDS, *CACHE_COMMANDS, *KINDS)
                                     for e in examples_of(command)[: None if command in ("pattern", "plot", "run") else 1]])  # fmt: skip
def test_integers_out_of_range_name_their_flag(rapt, prepare, example):
    words = prepare(example)
    for flag, kind in re.findall(r"^  (?:-\w,)?--([\w-]+) (\S+)", rapt(*command_of(words), "--help").stdout, re.MULTILINE):
        refused = rapt(*words, f"--{flag}=abc", code=None).stderr if kind in ("N", "LIST", "L,R") else ""
        if "; it takes a whole number" not in refused and "; it takes whole numbers" not in refused:
            assert kind != "N", refused
            continue
        for text in ("", "1e9", "18446744073709551616"):
            assert f"--{flag} is '{text}'; it takes" in rapt(*words, f"--{flag}={text}", code=USAGE).stderr
        for text in ("0", "-1", "2147483648", "9223372036854775808"):
            ran = rapt(*words, f"--{flag}={text}", code=None)
            assert ran.returncode in (OK, CALL_FAILED, USAGE), ran
            if ran.returncode != OK and text != "2147483648":  # which only the tensors or the memory contradict
                assert flag.replace("-", "_") in ran.stderr.replace("-", "_"), ran


@EVERYWHERE
def test_diagnose_shows_how_the_gradient_flows(rapt, save, load, where):
    random = np.random.default_rng(3)
    tensors = {name: random.standard_normal((1, 2, 6, 4), "f4") for name in ("q", "k", "v", "dy")}
    save(**tensors, mask=np.arange(6)[None] != 4)
    files = [*where, "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--mask", "mask.npy"]
    report = json.loads(rapt("diagnose", *files, "--grad", "dy.npy", "--json").stdout)
    rapt("attend", *files, "--grad", "dy.npy", "-o", "gradients.npz")
    with load("gradients.npz") as gradients:
        for gradient in report["gradients"]:
            values = gradients[gradient["name"]].astype("f8")
            assert gradient["norm"] == pytest.approx(np.linalg.norm(values), rel=1e-5)
            assert gradient["position_norms"] == pytest.approx(
                np.sqrt((values**2).sum((0, 1, 3))), rel=1e-5, abs=1e-7
            )
    assert [gradient["name"] for gradient in report["gradients"]] == ["dq", "dk", "dv"]
    assert sum("is 0 at 1 of 6 key positions: 4" in warning for warning in report["warnings"]) == 2
    text = rapt("diagnose", *files, "--grad", "dy.npy").stdout
    assert "norm by position" in text and "4: 0," in text
    assert "norm by position" not in rapt("diagnose", *files).stdout


@EVERYWHERE
def test_diagnose_says_whether_estimates_fit(rapt, save, where):
    save(q=0.3 * draw(1, 600, 8), k=0.3 * draw(2, 600, 8), v=draw(3, 600, 8))
    files = ["--q=q.npy", "--k=k.npy", "--v=v.npy", *where]
    text = rapt("diagnose", *files).stdout
    assert "FAVOR+ may estimate this call" in text and "LSH is useless for these inputs" in text
    report = json.loads(rapt("diagnose", *files, "--scale=30", "--json").stdout)
    assert report["estimates"][0].startswith("FAVOR+ is useless for these inputs")
    assert report["estimates"][1].startswith("LSH may estimate this call")
    assert report["favor_squared_norm"] > 10 and report["lsh_reachable_weight"] > 0.9
    assert "estimates" not in rapt("diagnose", *files, "--softcap=3").stdout.lower()


@EVERYWHERE
@pytest.mark.parametrize("page, least", [("variants.md", 20), ("gradients.md", 6)])
def test_every_command_of_the_pages_works(rapt, tmp_path, where, page, least):
    text = (DOCS / page).read_text()
    for code in re.findall(r'^    python3 -c "\n(.*?)^    "\n', text, re.MULTILINE | re.DOTALL):
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True)
    ran = [shlex.split(command) for command in re.findall(r"^    rapt (.*)", text, re.MULTILINE)]
    assert len(ran) >= least
    for words in ran:
        rapt(*[word for word in words if word != "--local" or where])
