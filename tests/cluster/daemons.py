"""Programs in the background, each with a log file."""

import subprocess
import time

GIVE_UP_SECONDS = 300


def run(*command, **options):
    """Runs a program to its end; returns its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(condition, what, seconds=GIVE_UP_SECONDS):
    """Returns the condition's first true value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Daemons:
    def __init__(self, folder):
        self._folder = folder
        self._running = {}
        folder.mkdir(parents=True)

    def start(self, name, *command):
        with (self._folder / f"{name}.log").open("w") as log:
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def check(self):
        """Fails if one has exited."""
        for name, process in self._running.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text()
                raise AssertionError(f"{name} exited with {process.returncode}:\n{log[-4000:]}")

    def close(self):
        for process in reversed(self._running.values()):
            process.kill()
            process.wait()
