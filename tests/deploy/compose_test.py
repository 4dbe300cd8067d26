"""The Compose file as an operator runs it: Prometheus scrapes a server under load.

RAPT_IMAGE names the server's image; `./dev docker-test` builds it and runs this. No registry need be
reachable: where prom/prometheus is not there, Debian's Prometheus stands in under its name. Grafana's
image has no such twin; its dashboard is tested by prometheus_test.py.
"""

import json
import os
import pathlib
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import yaml

COMPOSE_FILE = pathlib.Path(__file__).parents[2] / "deploy" / "compose" / "compose.yml"
SERVICES = ["server", "prometheus", "load"]
GIVE_UP_SECONDS = 120
STAND_IN = """\
FROM debian:bookworm-slim
RUN apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
"""


def run(*command, **how):
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def compose(*arguments):
    return run("docker-compose", "--project-name=rapt-test", f"--file={COMPOSE_FILE}", *arguments)


@pytest.fixture(scope="module")
def services():
    run("docker", "tag", os.environ["RAPT_IMAGE"], "rapt")  # the name that the file gives it
    image = yaml.safe_load(COMPOSE_FILE.read_text())["services"]["prometheus"]["image"]
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode != 0:
        run("docker", "build", "--quiet", "--network=host", f"--tag={image}", "-", input=STAND_IN)
    try:
        compose("--profile=load", "up", "--detach", "--no-build", *SERVICES)
        yield
    finally:
        compose("--profile=load", "down", "--volumes")


def ask(expression):
    """The result vector; None while Prometheus does not respond."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:9090/api/v1/query?{query}") as answer:
            return json.load(answer)["data"]["result"]
    except OSError:
        return None


@pytest.mark.parametrize(
    "expression",
    [
        'up{job="rapt"} == 1',
        "sum(rate(rapt_requests_total[1m])) > 0",
    ],
)
def test_prometheus_sees_the_server_under_load(services, expression):
    end = time.monotonic() + GIVE_UP_SECONDS
    while not ask(expression):
        assert time.monotonic() < end, f"{expression}\n{compose('logs', '--tail=20')}"
        time.sleep(1)
