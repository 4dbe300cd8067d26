"""Servers in separate processes and rapt-load, shared by the service benchmarks."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import urllib.request

READY_SECONDS = 120
WARMUP_SECONDS = 0.2


def descendants(pid):
    children = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for path in children for child in path.read_text().split()]
    return found + [d for child in found for d in descendants(child)]


class Server:
    """A process, with its children, that prints `ready grpc=ADDRESS` or `ready http=ADDRESS`; context manager.

    Its address is that of the protocol, a value of rapt-load's --protocol.
    """

    def __init__(self, name, command, environment=None, protocol="oip"):
        self.name, self.protocol, self._command = name, protocol, [str(word) for word in command]
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self):
        self._log = tempfile.TemporaryFile(mode="w+")
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, env=self._environment, text=True
        )
        with Alarm(READY_SECONDS, self._process):
            for line in self._process.stdout:
                if "ready " in line:
                    addresses = dict(re.findall(r"(\w+)=(\S+)", line))
                    self.http_address, self._metrics_address = addresses.get("http"), addresses.get("metrics")
                    self.address = self.http_address if self.protocol == "http" else addresses["grpc"]
                    return self
        error = self._error()
        self.__exit__()
        raise RuntimeError(f"{self.name} does not start: {error}")

    def __exit__(self, *_):
        processes = descendants(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in processes:  # PyTriton does not stop its tritonserver
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.stdout.close()

    def _error(self):
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else f"exit status {self._process.poll()}"

    def _processes(self):
        return [self._process.pid, *descendants(self._process.pid)]

    def cpu_seconds(self):
        ticks = 0
        for pid in self._processes():
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def read_metric(self, name):
        """Of rapt-server: the value of a metric without labels."""
        with urllib.request.urlopen(f"http://{self._metrics_address}/metrics") as page:
            return float(re.search(rf"^{name} (\S+)$", page.read().decode(), re.MULTILINE)[1])

    def forget_peak(self):
        for pid in self._processes():
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_mib(self):
        pages = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in self._processes()]
        return sum(int(re.search(r"^VmHWM:\s+(\d+)", page, re.MULTILINE)[1]) for page in pages) / 1024


class Alarm:
    """Ends a process that does not finish its startup in time."""

    def __init__(self, seconds, process):
        self._seconds, self._process = seconds, process

    def __enter__(self):
        signal.signal(signal.SIGALRM, lambda *_: self._process.kill())
        signal.alarm(self._seconds)

    def __exit__(self, *_):
        signal.alarm(0)


def load(program, address, shape, dtype, concurrency, seconds, *more):
    """Returns rapt-load's JSON report. Raises RuntimeError if calls fail."""
    command = [program, "--address", address, "--json", "-", "--shape", shape, "--dtype", dtype.lower()]
    command += ["-c", concurrency, "-d", seconds, "--warmup", WARMUP_SECONDS, "--requests", 2 * concurrency, *more]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr.strip().removeprefix("rapt-load: "))
    return json.loads(ran.stdout)
