"""The notebook docs/python.ipynb and the examples of the documents run. A cell's last expression is its result, as in
Jupyter, which the tests do not need."""

import ast
import json
import pathlib
import re

import numpy as np
import pytest
from rapt_server import RaptServer

ROOT = pathlib.Path(__file__).resolve().parents[3]


def run(source, names):
    """Returns the value of the last statement if it is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None


@pytest.fixture(scope="module")
def server():
    with RaptServer("--kv_cache_bytes=268435456") as running:
        yield running


def test_the_notebook_runs(server):
    notebook = json.loads((ROOT / "docs/python.ipynb").read_text())
    assert notebook["nbformat"] == 4
    names, results = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the notebook is kept without outputs"
            results.append(run("".join(cell["source"]).replace("127.0.0.1:8000", server.http_address), names))
    first, *others = results
    np.testing.assert_allclose(first[0, 0, 2], [0.7259, 0.7259, 0.2741, 0.2741], atol=5e-5)
    shown = [result._repr_html_() for result in others if hasattr(result, "_repr_html_")]
    assert [text.count("<img ") for text in shown] == [1, 2, 1]
    assert '<th scope="row">animal</th>' in shown[1]


@pytest.mark.parametrize("document", ("README.md", "docs/python.md", "client/python/README.md"))
def test_the_first_example_runs(document):
    source = re.search(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)[1]
    assert "import rapt\n" in source
    names = {}
    run(source, names)
    assert names["y"].shape == (1, 8, 128, 64) and np.isfinite(names["y"]).all()


def test_the_example_of_alignments_runs():
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    (source,) = [source for source in examples if "bottom_right" in source]
    names = {}
    run(source, names)
    np.testing.assert_allclose(names["first"], [1, 0, 0, 0, 0])
    np.testing.assert_allclose(names["last"], [0.2] * 5)


def test_the_examples_of_clients_run(server):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    of_clients = [source for source in examples if "rapt.Client(" in source]
    assert len(of_clients) == 2
    printed = []
    for source in of_clients:
        run(source.replace("127.0.0.1:8000", server.http_address), {"print": lambda *values: printed.append(values)})
    assert printed[0][0] == (1, 8, 128, 64) and printed[1] == ((1, 8, 64), [513], [514])
