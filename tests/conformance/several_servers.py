"""Servers on one port of 127.0.0.1, 127.0.0.2, ..., which a DNS name may list."""

import re
import signal
import urllib.request

from rapt_server import RaptServer


def calls_of(server):
    """The number of calls that the server has completed."""
    page = urllib.request.urlopen(f"http://{server.metrics_address}/metrics").read().decode()
    series = re.findall(r"^rapt_requests_total\{([^}]*)\} (\S+)$", page, re.MULTILINE)
    return sum(float(n) for labels, n in series if 'code="OK"' in labels and "ModelInfer" in labels)


class SeveralServers:
    """They drain as by default. Those that still run at the end must exit cleanly."""

    def __init__(self):
        self._running = {}
        self.port = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in list(self._running.values()):
            self.terminate(server)

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

    def _forget(self, server):
        self._running = {a: s for a, s in self._running.items() if s is not server}

    def kill(self, server):
        """SIGKILL: its exit code is not checked."""
        self._forget(server)
        server.signal(signal.SIGKILL)

    def terminate(self, server):
        """SIGTERM; returns when it has exited."""
        self._forget(server)
        server.__exit__()

    @property
    def addresses(self):
        return list(self._running)
