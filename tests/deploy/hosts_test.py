"""Who reaches the HTTP listeners of the image and of the Compose file by which names: their settings, read from the files, on
the built server. `./dev docker-test` runs the image itself."""

import http.client
import pathlib
import re

import pytest
import yaml
from rapt_server import RaptServer

ROOT = pathlib.Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose/compose.yml").read_text())["services"]["server"]["command"]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
IMAGE = dict(re.findall(r"(RAPT_\w+)=(\S+)", next(line for line in LINES if line.startswith("ENV RAPT_"))))
ADDRESSES = [f"--{listener}_address=0.0.0.0:0" for listener in ("grpc", "metrics", "http")]


def status(server, host):
    port = server.http_address.rpartition(":")[2]
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    connection.request("GET", "/v2", headers={"Host": host})
    return connection.getresponse().status


@pytest.mark.parametrize(
    ("flags", "environment", "names"),
    (
        (["--insecure"], IMAGE, ["host.docker.internal"]),
        (COMPOSE, {}, ["server", "host.docker.internal"]),
        (COMPOSE, IMAGE, ["server", "host.docker.internal"]),  # the command line of the image's container
    ),
    ids=("image", "compose", "both"),
)
def test_names_of_the_host(monkeypatch, flags, environment, names):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with RaptServer(*ADDRESSES, *flags, own_addresses=True) as server:
        for host in (*names, "localhost", "127.0.0.1"):
            assert status(server, f"{host}:8000") == 200, host
        for host in ("rebound.example", "server.example", "docker.internal"):
            assert status(server, host) == 403, host
