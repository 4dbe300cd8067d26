"""Other clients of gRPC, set up as docs/scaling.md says: one of two servers ends or stops under load. No call is lost.

RAPT_LOSSES_CALLS is the number of calls of each case, for the table in docs/scaling.md. RAPT_CLIENTS names the clients;
`./dev test clients` installs all, and waits for those that ping seldom (RAPT_PATIENT).
"""

import json
import os
import pathlib
import re
import signal

import pytest
from dns_server import DnsServer
from loads import TOOLS, GrpcioLoad, ProgramLoad
from rapt_server import wait_until
from several_servers import SeveralServers, calls_of

CALLS = int(os.environ.get("RAPT_LOSSES_CALLS", 900))
SOURCES = pathlib.Path(__file__).parent / "clients"
DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
SERVICE_CONFIG = json.loads(re.search(r"^```json$(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)[1])


def documented(client):
    """What the table of clients says about one."""
    return re.search(rf"^\| {client} \| (.*) \|$", DOCUMENT, re.MULTILINE)[1]


class Grpcio(GrpcioLoad):
    pings_seldom = False

    def __init__(self, dns, port):
        arguments = re.findall(r'\("(grpc\.[^"]+)", (\d+)\)', documented("grpcio"))
        options = [(name, int(value)) for name, value in arguments]
        target = f"dns://127.0.0.1:{dns.port}/rapt.test:{port}"
        super().__init__(target, [("grpc.service_config", json.dumps(SERVICE_CONFIG)), *options])


class Go(ProgramLoad):
    pings_seldom = True

    def __init__(self, dns, port):
        super().__init__([f"{TOOLS}/go-client", "load"], f"dns://127.0.0.1:{dns.port}/rapt.test:{port}", SERVICE_CONFIG)


class Java(ProgramLoad):
    """Java asks the machine's own resolver, here a file of hosts."""

    pings_seldom = True

    def __init__(self, dns, port):
        self._hosts = pathlib.Path(f"{TOOLS}/java-client/hosts")
        self._hosts.write_text("".join(f"{address} rapt.test\n" for address in dns.addresses))
        classes = f"{TOOLS}/java-client:{TOOLS}/java-client/*"
        command = ["java", f"-Djdk.net.hosts.file={self._hosts}", "-cp", classes, "Load"]
        super().__init__(command, f"dns:///rapt.test:{port}", SERVICE_CONFIG)


CLIENTS = {"grpcio": Grpcio, "go": Go, "java": Java}
NAMES = [name for name in os.environ.get("RAPT_CLIENTS", "grpcio go").split() if name in CLIENTS]
SIGNALS = [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture
def servers():
    with SeveralServers() as running:
        yield running


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", NAMES)
def test_a_server_ends_or_stops(servers, name, number):
    if number == signal.SIGSTOP and CLIENTS[name].pings_seldom and "RAPT_PATIENT" not in os.environ:
        pytest.skip("it pings every 10 s; ./dev test clients waits for that")
    first, second = servers.start(1), servers.start(2)
    with CLIENTS[name](DnsServer(servers.addresses), servers.port) as load:
        load.wait_for_more(CALLS // 3)
        for server in (first, second):
            wait_until(lambda: calls_of(server) > 0, "a server gets no calls")
        if number == signal.SIGTERM:
            servers.terminate(first)
        elif number == signal.SIGKILL:
            servers.kill(first)
        else:
            first.signal(signal.SIGSTOP)
        try:
            report = load.wait_for_more(CALLS - CALLS // 3)
        finally:
            first.signal(signal.SIGCONT)
    print(f"{name}, {number.name}: {report.ok} calls, {sum(report.lost.values())} lost, slowest {report.slowest:.3f} s")
    assert not report.lost


@pytest.mark.parametrize("client, program", [("Go", "go/load.go"), ("Java", "java/Load.java")])
def test_the_programs_are_set_up_as_documented(client, program):
    source = "".join((SOURCES / program).read_text().split())
    for code in re.findall(r"`([^`]*[(\"][^`]*)`", documented(client)):
        assert "".join(code.split()) in source, code
