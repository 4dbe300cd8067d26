"""Load on a release from pods in its namespace.

Each client is rapt-load, which never retries, or retrying_load, which has rapt's client and its default retries. The
addresses are the release's DNS name.
"""

import contextlib
import json
import threading
import time

import api
from daemons import wait_until
from release import IMAGE, calls_of, container_id
from rows import CALLS, add_row

CALLERS = 4
CPU = "200m"
CA_FILE = "/etc/rapt/tls/ca.crt"
# Calls of rapt-load are known from the servers' counters, which are read twice a second.
UNCERTAIN_CALLS = 1000

RAPT_LOAD = "rapt-load"
RETRYING = "retrying-load"


def load_command(address, shape="1x4x64x32", callers=CALLERS, tls=False):
    flags = [f"--address={address}", f"--concurrency={callers}", f"--shape={shape}", "--warmup=0", "--duration=86400"]
    return ["rapt-load", *flags, "--quiet", "--json=-", *([f"--tls-ca={CA_FILE}"] if tls else [])]


def retrying_command(address, tls=False):
    return ["retrying_load", address, str(CALLERS), *([CA_FILE] if tls else [])]


def pod(name, command, cpu, tls_secret):
    container = {
        "name": "load",
        "image": IMAGE,
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if cpu:
        container["resources"] = {"requests": {"cpu": cpu}}
    if tls_secret:
        container["volumeMounts"] = [{"name": "tls", "mountPath": "/etc/rapt/tls", "readOnly": True}]
        spec["volumes"] = [{"name": "tls", "secret": {"secretName": tls_secret}}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Client:
    """A pod that calls until it is interrupted. `cpu` is its request; without one, it may get no time for seconds."""

    def __init__(self, node, release, name, command, cpu=None):
        self._node, self._release, self.name = node, release, name
        resource = pod(name, command, cpu, release.tls_secret)
        resource["metadata"]["namespace"] = release.namespace
        api.apply(resource)
        wait_until(lambda: self._phase() != "Pending", f"{name} does not start")

    def _pod(self):
        return self._release.get(f"pods/{self.name}")

    def _phase(self):
        return self._pod()["status"]["phase"]

    def log(self, **query):
        return api.get_text(f"/api/v1/namespaces/{self._release.namespace}/pods/{self.name}/log", **query)

    def interrupt(self):
        assert self._phase() == "Running", f"{self.name} has ended: {self.log()}"
        self._node.ctr("tasks", "kill", "--signal", "SIGINT", container_id(self._pod()))
        wait_until(lambda: self._phase() in ("Succeeded", "Failed"), f"{self.name} does not end")

    def report(self):
        """(answered calls, lost calls, the slowest in seconds, causes), after the interruption."""
        log = self.log()
        report = json.loads(log[log.index("{") :])
        if self.name == RETRYING:
            return report["ok"], report["failed"], report["slowest"], report["causes"]
        summary, slowest = report["summary"], report["milliseconds"]["latency"]["max"] / 1000
        return summary["ok"], summary["failed"], slowest, report["failures"]


class Traffic:
    """Context manager. `clients` are names of those that call."""

    def __init__(self, node, release, clients=(RAPT_LOAD, RETRYING)):
        self._release = release
        self._calls = {}  # of each pod that ever ran
        self._is_watching = True
        self._watch = threading.Thread(target=self._watch_pods, daemon=True)
        self._watch.start()
        tls = bool(release.tls_secret)
        commands = {RAPT_LOAD: load_command(release.address, tls=tls), RETRYING: retrying_command(release.address, tls)}
        self._clients = [Client(node, release, name, commands[name], CPU) for name in clients]

    def __enter__(self):
        self.wait_for(min(CALLS // 10, 1000))
        return self

    def __exit__(self, *_):
        self._is_watching = False
        self._watch.join()

    def _watch_pods(self):
        while self._is_watching:
            with contextlib.suppress(OSError):  # a slow answer
                for running in self._release.pods():
                    name = running["metadata"]["name"]
                    self._calls[name] = max(self._calls.get(name, 0), calls_of(running))
            time.sleep(0.3)

    def calls_by_pod(self):
        return dict(self._calls)

    def _answered(self):
        """The number of answered calls by client, at least."""
        total = sum(self._calls.values())
        answered = {}
        for client in self._clients:
            if client.name == RETRYING:
                answered[RETRYING] = int((client.log(tailLines=1).split() or [0])[-1])
        if RAPT_LOAD in [client.name for client in self._clients]:
            answered[RAPT_LOAD] = total - answered.get(RETRYING, 0) - UNCERTAIN_CALLS
        return answered

    def wait_for(self, calls):
        """Waits until each client has made this number of calls since the beginning."""
        wait_until(lambda: min(self._answered().values()) >= calls, f"fewer than {calls} calls", seconds=600)

    def finish(self, event, note=""):
        """Ends the load after CALLS of each client, adds the rows and expects no lost call."""
        self.wait_for(CALLS)
        causes = {}
        for client in self._clients:
            client.interrupt()
            ok, lost, slowest, why = client.report()
            add_row(event, client.name, ok, lost, slowest, note)
            assert ok + lost >= CALLS, f"{client.name} made {ok + lost} calls"
            if lost:
                causes[client.name] = why
        assert not causes, causes
