"""The package as a user meets it: importing it where the library or parts of the system are missing, help(), and beside modules
that protoc generates from proto/rapt/v1."""

import inspect
import os
import pathlib
import pydoc
import re
import subprocess
import sys

import numpy as np
import pytest
import rapt
from scripted_server import ScriptedServer, answer

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "client/python"


def run(code, *arguments, path=(PACKAGE,), **variables):
    """Runs Python code in a process of its own, and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | variables
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- What is missing ----------------------------------------------------------------------------------

CALL = """
import sys, numpy as np, rapt
x = np.zeros((1, 1, 4, 8), np.float32)
with rapt.Client(sys.argv[1]) as client:
    print(client.info().version)
    try:
        client.attend(x, x, x, causal="yes")
    except TypeError as error:
        print(error)
"""


def test_a_client_needs_no_library(tmp_path):
    with ScriptedServer(answer(body={"version": "7.8"})) as server:
        printed = run(CALL, server.url, RAPT_LIBRARY=str(tmp_path / "none.so"))
    assert printed.splitlines() == ["7.8", "causal is 'yes'; it must be True or False"]


def test_functions_say_that_they_need_the_library(tmp_path):
    code = "import rapt, numpy as np\nx = np.zeros((1, 1, 4, 8))\ntry: rapt.attention(x, x, x)\nexcept ImportError as e: print(e)"
    printed = run(code, RAPT_LIBRARY=str(tmp_path / "none.so"))
    assert re.search(r"none\.so: .*; RAPT_LIBRARY may name librapt_attention\.so.*rapt\.Client needs none$", printed)


def test_a_client_on_other_platforms():
    """Windows and macOS lack these functions."""
    missing = (
        "import os, random, select, socket, ssl, numpy\n"
        "del os.register_at_fork, os.sched_getaffinity, select.poll\n"
        "socket.socket.sendmsg = property()\n"
        "assert not hasattr(socket.socket(), 'sendmsg')\n"
    )
    with ScriptedServer(answer(body={"version": "7.8"})) as server:
        printed = run(missing + CALL + "    print(client.info().version, rapt.get_num_threads())", server.url, RAPT_LIBRARY="none")
        assert server.accepted == 1
    assert printed.splitlines()[::2] == ["7.8", f"7.8 {os.cpu_count()}"]


def test_the_version_is_that_of_the_project_and_of_the_library():
    project = (ROOT / "CMakeLists.txt").read_text()
    assert rapt.__version__ == re.search(r"project\(rapt VERSION ([\d.]+)", project)[1]
    assert rapt.__version__ == run("import rapt.capi; print(rapt.capi.version())")


# --- Beside generated modules -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    protos = sorted(f"rapt/v1/{proto.name}" for proto in (ROOT / "proto/rapt/v1").glob("*.proto"))
    subprocess.run(["protoc", "-I", ROOT / "proto", f"--python_out={folder}", *protos], check=True)
    return folder


STUBS = "from rapt.v1 import attention_pb2"
COMPUTE = "import rapt, numpy as np; x = np.ones((1, 1, 2, 4)); y = rapt.attention(x, x, x)"


@pytest.mark.parametrize("is_first", (True, False), ids=("generated first", "package first"))
@pytest.mark.parametrize("lines", ((STUBS, COMPUTE), (COMPUTE, STUBS)), ids=("stubs first", "rapt first"))
def test_generated_modules_live_beside_the_package(generated, lines, is_first):
    path = [generated, PACKAGE] if is_first else [PACKAGE, generated]
    printed = run("\n".join([*lines, "print(attention_pb2.AttendRequest.DESCRIPTOR.full_name, y.shape)"]), path=path)
    assert printed == "rapt.v1.AttendRequest (1, 1, 2, 4)"


# --- help() -------------------------------------------------------------------------------------------

OPTIONS = [(name, rapt.Options) for name in ("attention", "attend", "attend_backward")]
OPTIONS += [("linear_attention", rapt.LinearOptions), ("lsh_attention", rapt.LshOptions)]


def functions_of(name):
    return [getattr(side, name) for side in (rapt, rapt.Client, rapt.AsyncClient)]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_signatures_have_the_options_and_their_defaults(name, options):
    for function in functions_of(name):
        parameters = inspect.signature(function).parameters
        assert options.__annotations__.keys() < parameters.keys()
        assert "ForwardRef" not in str(parameters["scale"]) and str(parameters["scale"]) == "scale: 'float | int | None' = None"
        assert not [p for p in parameters.values() if p.default is ...]
        assert "Annotated" not in str(inspect.signature(function))


def test_defaults_are_those_that_are_used():
    """A call with all of them is the call without."""
    q = np.random.default_rng(1).standard_normal((1, 2, 4, 8)).astype(np.float32)
    parameters = inspect.signature(rapt.attention).parameters
    defaults = {name: parameters[name].default for name in rapt.Options.__annotations__}
    assert defaults["causal"] is False and defaults["alignment"] == "top_left" and defaults["softcap"] == 0
    np.testing.assert_array_equal(rapt.attention(q, q, q, **defaults), rapt.attention(q, q, q))

    rows = q.reshape(1, 4, 16)
    parameters = inspect.signature(rapt.linear_attention).parameters
    required = {"query_heads": 2, "kv_heads": 2}
    assert {name for name in required if parameters[name].default is inspect.Parameter.empty} == required.keys()
    defaults = {name: parameters[name].default for name in rapt.LinearOptions.__annotations__.keys() - required}
    required |= {"decay": -np.ones((1, 4, 2), np.float32), "beta": np.ones((1, 4, 2), np.float32)}  # of gated_delta
    want = rapt.linear_attention(rows, rows, rows, **required)
    np.testing.assert_array_equal(rapt.linear_attention(rows, rows, rows, **defaults | required).output, want.output)

    parameters = inspect.signature(rapt.lsh_attention).parameters
    assert parameters["chunk_length"].default is inspect.Parameter.empty
    defaults = {name: parameters[name].default for name in rapt.LshOptions.__annotations__.keys() - {"chunk_length"}}
    want = rapt.lsh_attention(q, q, chunk_length=2, seed=1)
    np.testing.assert_array_equal(rapt.lsh_attention(q, q, chunk_length=2, **defaults | {"seed": 1}).y, want.y)


@pytest.mark.parametrize(
    ("documented", "options"),
    [(function, options) for name, options in OPTIONS for function in (*functions_of(name), options)]
    + [(rapt.Cache.attend, rapt.StepOptions), (rapt.AsyncCache.attend, rapt.StepOptions)],
)
def test_help_explains_every_option(documented, options):
    text = pydoc.render_doc(documented, renderer=pydoc.plaintext)
    for name in options.__annotations__:
        assert re.search(rf"\n[ |]{{4,}}{name} \([^\n]+\): \S", text), name
    assert "Ellipsis" not in text


def test_help_explains_the_alignment():
    text = " ".join(pydoc.render_doc(rapt.attention, renderer=pydoc.plaintext).split())
    assert 'alignment="bottom_right" sees all five' in text


def test_help_without_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert "attend_backward(" in pydoc.render_doc(rapt)
    assert {"__version__", *rapt.__all__} <= set(dir(rapt)) and "torch" not in dir(rapt)
    with pytest.raises(AttributeError, match="rapt.torch needs PyTorch"):
        rapt.torch
