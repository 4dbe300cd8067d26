import itertools
import os
import pathlib
import shutil
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "deploy"))  # chart_test.py has the sets of values
sys.path.insert(0, str(HERE.parents[1] / "client" / "examples"))  # make_layers.py

import image  # noqa: E402
import rows  # noqa: E402
from certificates import make_certificates  # noqa: E402
from metrics_apis import MetricsApis  # noqa: E402
from node import Node  # noqa: E402
from release import IMAGE, Release  # noqa: E402

FOLDER = pathlib.Path(os.environ["RAPT_CLUSTER_FOLDER"])
BIN = pathlib.Path(os.environ["RAPT_BIN"])
# `sleep` is for the chart's preStop.
PROGRAMS = [*(BIN / name for name in ("rapt-server", "rapt", "rapt-load", "retrying_load")), "sleep"]


@pytest.fixture(scope="session")
def node():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    archive = FOLDER / "rapt.tar"
    image.write_image(archive, IMAGE, ["/usr/bin/rapt-server"], PROGRAMS, image.dockerfile_environment())
    running = Node(FOLDER)
    try:
        running.start([archive])
        yield running
    finally:
        running.close()


@pytest.fixture
def release(node, count=itertools.count(1)):
    """A namespace, in which the test installs the chart."""
    node.check()
    namespace = Release(f"attention-{next(count)}")
    yield namespace
    namespace.remove()


@pytest.fixture(scope="session")
def metrics_apis(node):
    make_certificates(FOLDER / "metrics-certificates", ["metrics-apis.kube-system.svc"])
    return MetricsApis(FOLDER / "metrics-certificates")


def pytest_terminal_summary(terminalreporter):
    if rows.ROWS:
        terminalreporter.write_line("\n".join(["", *rows.table()]))
