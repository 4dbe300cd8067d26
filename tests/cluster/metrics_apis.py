"""Stands for metrics-server and the Prometheus adapter: CPU time and the oldest request's age of pods."""

import datetime
import http.client
import http.server
import json
import re
import ssl
import threading
import time
import urllib.parse

import api
import machine
from release import metrics_of

PORT = 6444
KUBELET = f"https://{machine.ADDRESS}:10250/metrics/resource"
AGE = "rapt_oldest_request_age_seconds"
RECENT_SECONDS = 15

CPU_GROUP = "metrics.k8s.io/v1beta1"
CUSTOM_GROUP = "custom.metrics.k8s.io/v1beta2"
PLURALS = {CPU_GROUP: [("pods", "PodMetrics")], CUSTOM_GROUP: [(f"pods/{AGE}", "MetricValueList")]}


def registration(group_version):
    group, version = group_version.split("/")
    spec = {"group": group, "version": version, "insecureSkipTLSVerify": True, "groupPriorityMinimum": 100}
    spec.update(versionPriority=100, service={"name": "metrics-apis", "namespace": "kube-system"})
    metadata = {"name": f"{version}.{group}"}
    return {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata, "spec": spec}


def service():
    metadata = {"name": "metrics-apis", "namespace": "kube-system"}
    port = {"port": 443, "targetPort": PORT}
    addresses = {"addresses": [{"ip": machine.ADDRESS}], "ports": [{"port": PORT}]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [port]}},
        {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": [addresses]},
    ]


def timestamp(seconds):
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Samples:
    """The last two CPU times of each container, as kubelet reports them, and recent ages of requests of each pod."""

    def __init__(self):
        self._cpu = {}
        self._ages = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self):
        while True:
            try:
                self._sample_cpu()
                self._sample_ages()
            except (OSError, ValueError, http.client.HTTPException) as error:
                print(f"metrics: {error}")
            time.sleep(1)

    def _sample_cpu(self):
        page = api.read(KUBELET)
        labels = r'container="([^"]*)",namespace="([^"]*)",pod="([^"]*)"'
        pattern = rf"^container_cpu_usage_seconds_total\{{{labels}\}} (\S+) (\d+)$"
        with self._lock:
            for container, namespace, pod, seconds, at in re.findall(pattern, page, re.MULTILINE):
                samples = self._cpu.setdefault((namespace, pod, container), [])
                sample = (int(at) / 1000, float(seconds))
                if sample not in samples:
                    samples[:] = [*samples[-1:], sample]

    def _sample_ages(self):
        for pod in api.get("/api/v1/pods", labelSelector="app.kubernetes.io/name=rapt")["items"]:
            key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
            ages = [float(age) for age in re.findall(rf"^{AGE} (\S+)$", metrics_of(pod), re.MULTILINE)]
            with self._lock:
                recent = [(at, age) for at, age in self._ages.get(key, []) if at > time.time() - RECENT_SECONDS]
                self._ages[key] = recent + [(time.time(), age) for age in ages]

    def cpu(self, namespace, pod):
        """PodMetrics, if there are two samples."""
        with self._lock:
            of_pod = {key[2]: value for key, value in self._cpu.items() if key[:2] == (namespace, pod)}
        containers = []
        for container, samples in of_pod.items():
            if len(samples) < 2:
                return None
            (begin, before), (end, after) = samples
            usage = {"cpu": f"{int((after - before) / (end - begin) * 1e9)}n", "memory": "0"}
            containers.append({"name": container, "usage": usage})
        if not containers:
            return None
        metadata, window = {"name": pod, "namespace": namespace}, f"{end - begin:.0f}s"
        return {"metadata": metadata, "timestamp": timestamp(end), "window": window, "containers": containers}

    def age(self, namespace, pod):
        """MetricValue, if there are samples."""
        with self._lock:
            ages = [age for _, age in self._ages.get((namespace, pod), [])]
        if not ages:
            return None
        described = {"kind": "Pod", "namespace": namespace, "name": pod, "apiVersion": "/v1"}
        now, value = timestamp(time.time()), f"{int(max(ages) * 1000)}m"
        return {"describedObject": described, "metric": {"name": AGE}, "timestamp": now, "value": value}


class MetricsApis:
    """Registered with the API server. `serves_cpu` may be taken away."""

    def __init__(self, certificates):
        self.serves_cpu = True
        self._samples = Samples()
        server = http.server.ThreadingHTTPServer((machine.ADDRESS, PORT), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api.apply(*service(), registration(CPU_GROUP), registration(CUSTOM_GROUP))

    def _handler(self):
        answer = self._answer

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                url = urllib.parse.urlsplit(self.path)
                body = answer(url.path.rstrip("/"), dict(urllib.parse.parse_qsl(url.query)))
                text = json.dumps(body).encode()
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        return Handler

    def _answer(self, path, query):
        """The body, or None for an unknown path."""
        group = next((group for group in PLURALS if path.startswith(f"/apis/{group}")), None)
        if group is None:
            return None
        rest = path.removeprefix(f"/apis/{group}")
        if not rest:
            kinds = [{"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
                     for name, kind in PLURALS[group]]  # fmt: skip
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": kinds}
        namespace = rest.split("/")[2]
        pods = api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=query.get("labelSelector", ""))["items"]
        names = [pod["metadata"]["name"] for pod in pods]
        kind, of_pod = ("PodMetricsList", self._cpu) if group == CPU_GROUP else ("MetricValueList", self._samples.age)
        items = [item for item in (of_pod(namespace, name) for name in names) if item]
        return {"kind": kind, "apiVersion": group, "metadata": {}, "items": items}

    def _cpu(self, namespace, pod):
        return self._samples.cpu(namespace, pod) if self.serves_cpu else None
