"""The chart, installed in a namespace of its own under the restricted Pod Security Standard."""

import http.client
import os
import pathlib
import re
import subprocess
import urllib.request

import api
import yaml
from daemons import run, wait_until

CHART = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes" / "chart"
IMAGE = f"rapt:{yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}"
NAME = "rapt"
PODS = "app.kubernetes.io/name=rapt"

# Servers that fit several times on a node of two cores. rapt's clients need no minReadySeconds.
SMALL = {
    "server.threads": 1,
    "server.memoryBudgetMiB": 256,
    "server.maxOpenCalls": 256,
    "minReadySeconds": 0,
    "resources.requests.cpu": "250m",
    "resources.requests.memory": "400Mi",
    "resources.limits.memory": "800Mi",
}


def restricted_namespace(name):
    label = "pod-security.kubernetes.io"
    labels = {f"{label}/enforce": "restricted", f"{label}/warn": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def is_ready(pod):
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


class Release:
    def __init__(self, namespace, defaults=SMALL):
        self.namespace = namespace
        self._values = dict(defaults)
        self.tls_secret = None
        api.apply(restricted_namespace(namespace))

    @property
    def address(self):
        return f"dns:///{NAME}.{self.namespace}:8001"

    def install(self, **values):
        """Installs or upgrades the chart; values are added to the earlier ones, `__` stands for a dot."""
        self._values.update({name.replace("__", "."): value for name, value in values.items()})
        secured = {"tls.secret": self.tls_secret} if self.tls_secret else {"insecure": "true"}
        sets = [f"--set={name}={value}" for name, value in {**self._values, **secured}.items()]
        self.helm("upgrade", "--install", NAME, CHART, "--wait", "--timeout=120s", *sets)
        wait_until(lambda: len(self.ready_pods()) >= int(self._values.get("replicas", 2)), "there are too few pods")

    def derive_resources(self):
        """Leaves the resources of pods to the chart."""
        self._values = {name: value for name, value in self._values.items() if not name.startswith("resources.")}

    def helm(self, command, *arguments):
        return run(os.environ["RAPT_HELM"], command, "--namespace", self.namespace, *arguments)

    def kubectl(self, *arguments):
        return api.kubectl("--namespace", self.namespace, *arguments)

    def get(self, kind, group="api/v1", **query):
        return api.get(f"/{group}/namespaces/{self.namespace}/{kind}", **query)

    def pods(self):
        return self.get("pods", labelSelector=PODS)["items"]

    def ready_pods(self):
        return [pod for pod in self.pods() if is_ready(pod)]

    def replicas(self):
        return self.get(f"deployments/{NAME}", "apis/apps/v1")["spec"]["replicas"]

    def events(self, reason):
        return [e["message"] for e in self.get("events")["items"] if e["reason"] == reason]

    def scale(self, replicas):
        self.kubectl("scale", f"deployment/{NAME}", f"--replicas={replicas}")

    def remove(self):
        subprocess.run(["kubectl", "delete", "namespace", self.namespace, "--wait=false"], capture_output=True)


def metrics_of(pod):
    """The pod's metrics page; none while it cannot be read."""
    try:
        return urllib.request.urlopen(f"http://{pod['status']['podIP']}:8002/metrics", timeout=1).read().decode()
    except (KeyError, OSError, http.client.HTTPException):
        return ""


def calls_of(pod):
    series = re.findall(r"^rapt_requests_total\{([^}]*)\} (\S+)$", metrics_of(pod), re.MULTILINE)
    return sum(float(n) for labels, n in series if 'code="OK"' in labels and 'AttentionService/Attend"' in labels)


def container_id(pod):
    return pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
