"""A rapt-server of the build under test, on a free loopback port."""

import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request

STOP_SECONDS = 60  # longer than any grace period a test configures
GIVE_UP_SECONDS = 60


def wait_until(condition, what):
    """Returns what `condition` returns, once that is true."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return result


class RaptServer:
    """Context manager: ready on entry; must exit cleanly on SIGTERM at the end."""

    def __init__(self, *flags, program="RAPT_SERVER", grpc_address="127.0.0.1:0", own_addresses=False):
        """`own_addresses`: the flags have them."""
        addresses = [f"--grpc_address={grpc_address}", "--metrics_address=127.0.0.1:0", "--http_address=127.0.0.1:0"]
        self._command = [
            os.environ[program],
            *([] if own_addresses else addresses),
            "--drain_pause=0",
            "--drain_refusal_time=0",
            *flags,
        ]

    def __enter__(self):
        self._is_stopping = False
        self._log = tempfile.TemporaryFile(mode="w+")
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        line = self._process.stdout.readline()
        ready = re.fullmatch(r"rapt-server ready grpc=(\S+) metrics=(\S+)(?: \S+)*?(?: http=(\S+))?\n", line)
        if not ready:
            self._process.kill()
            raise AssertionError(f"expected the ready line, got {line!r}; the log:\n{self.read_log()}")
        self.grpc_address, self.metrics_address, self.http_address = ready.groups()
        return self

    def __exit__(self, *_):
        self.stop()
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = "still running"
        log = self.read_log()
        self._log.close()
        self._process.stdout.close()
        assert status == 0, f"rapt-server exited with {status}; the log:\n{log}"

    def stop(self):
        """Sends SIGTERM, once: a second one would end the process at once."""
        if not self._is_stopping:
            self._process.send_signal(signal.SIGTERM)
        self._is_stopping = True

    def signal(self, number):
        self._process.send_signal(number)

    def read_gauge(self, name):
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics") as page:
            return float(re.search(f"^{name} (.*)$", page.read().decode(), re.MULTILINE)[1])

    def live_caches(self):
        return self.read_gauge("rapt_kv_caches")

    def await_no_caches(self):
        """Returns when the last cache has ended, for instance with its lease."""
        wait_until(lambda: self.live_caches() == 0, "a cache does not end")

    def read_log(self):
        with open(f"/proc/self/fd/{self._log.fileno()}") as log:  # the server writes at the place of the first
            return log.read()
