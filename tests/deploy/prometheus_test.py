"""A real Prometheus scrapes a real server under load: every expression of rules and dashboard returns data.

RAPT_SERVER names the server; Debian's prometheus and promtool are on the path.
"""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml

from rapt_server import RaptServer

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "rapt.json"
OPERATIONS = DEPLOY.parent / "docs" / "operations.md"
SCRAPE_SECONDS = 1
GIVE_UP_SECONDS = 60

# Series that exist only after failures, which this test does not cause.
ONLY_IN_TROUBLE = {"rapt_backend_fallback_total"}


def rules(kind):
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if kind in rule]


def panel_expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in panels
        for target in panel.get("targets", [])
    ]


def as_grafana_would(expression):
    for variable, value in {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}.items():
        expression = expression.replace(variable, value)
    return expression


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """Scrapes `target` with the configuration in deploy/, at a shorter interval; ready on entry."""

    def __init__(self, target, directory):
        self._address = f"127.0.0.1:{free_port()}"
        self._directory = directory
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {f"{what}_interval": f"{SCRAPE_SECONDS}s" for what in ("scrape", "evaluation")}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        shutil.copytree(RULES, directory / "rules")
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self):
        self._log = open(self._directory / "log", "w+")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._directory}/prometheus.yml",
                f"--storage.tsdb.path={self._directory}/data",
                f"--web.listen-address={self._address}",
            ],
            stderr=self._log,
        )
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def ask(self, expression):
        """The result vector; None while Prometheus does not respond."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}") as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return None
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError:
            assert self._process.poll() is None, (self._directory / "log").read_text()
            return None

    def data_of(self, expression):
        """Returns the first non-empty result, or None on timeout."""
        end = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < end:
            result = self.ask(expression)
            if result:
                return result
            time.sleep(SCRAPE_SECONDS / 4)
        return None


def attend_until(stop, address):
    x = np.zeros((2, 2, 32, 16), np.float32)
    inputs = [triton.InferInput(name, x.shape, "FP32") for name in "QKV"]
    for tensor in inputs:
        tensor.set_data_from_numpy(x)
    with triton.InferenceServerClient(address) as client:
        while not stop.is_set():
            client.infer("attention", inputs)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    stop = threading.Event()
    with RaptServer() as server:
        load = threading.Thread(target=attend_until, args=(stop, server.grpc_address))
        load.start()
        try:
            with Prometheus(server.metrics_address, tmp_path_factory.mktemp("prometheus")) as running:
                assert running.data_of("vector(1)"), "Prometheus does not respond"
                yield running
        finally:
            stop.set()
            load.join()


@pytest.mark.parametrize("expression", [e for _, e in panel_expressions()], ids=[n for n, _ in panel_expressions()])
def test_panel_has_data(prometheus, expression):
    if ONLY_IN_TROUBLE & set(re.findall(r"\brapt_\w+", expression)) and "cudnn" not in expression:
        assert prometheus.ask(as_grafana_would(expression)) is not None
        return
    assert prometheus.data_of(as_grafana_would(expression)), expression


@pytest.mark.parametrize("rule", rules("record"), ids=lambda rule: rule["record"])
def test_rule_records(prometheus, rule):
    if ONLY_IN_TROUBLE & set(re.findall(r"\brapt_\w+", rule["expr"])):
        assert prometheus.ask(rule["expr"]) is not None
        return
    assert prometheus.data_of(rule["record"]), rule["expr"]


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_alert_uses_existing_series(prometheus, rule):
    for metric in set(re.findall(r"\b(?:rapt[_:][\w:]+|up)\b", rule["expr"])):
        if metric in ("rapt:fallback_calls:ratio_rate5m",):
            continue
        assert prometheus.data_of(metric), f"{metric} of {rule['expr']}"


def test_load_is_visible(prometheus):
    served = prometheus.data_of('sum(rate(rapt_requests_total{code="OK",dtype="FP32",backend="cpu"}[1m])) > 0')
    assert served and float(served[0]["value"][1]) > 0


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_alert_has_a_runbook(rule):
    page, anchor = rule["annotations"]["runbook"].split("#")
    assert (DEPLOY.parent / page) == OPERATIONS
    headings = re.findall(r"^#+ (.*)$", OPERATIONS.read_text(), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert anchor in anchors, sorted(anchors)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        ["check", "rules", *map(str, sorted(RULES.glob("*.yml")))],
        ["test", "rules", str(DEPLOY / "prometheus" / "tests" / "rules_test.yml")],
    ],
    ids=["config", "rules", "rules' own tests"],
)
def test_promtool_accepts(arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
