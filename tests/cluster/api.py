"""The Kubernetes API, by HTTP for frequent questions and by kubectl for what it does in several steps."""

import json
import os
import ssl
import subprocess
import urllib.parse
import urllib.request

from daemons import run

SERVER = "https://127.0.0.1:6443"
TOKEN = "cluster-test"  # of the only user, an administrator
UNCHECKED = ssl._create_unverified_context()  # the API server makes its own certificate


def read(url, token=TOKEN, timeout=10):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    return urllib.request.urlopen(request, context=UNCHECKED, timeout=timeout).read().decode()


def get_text(path, **query):
    return read(f"{SERVER}{path}?{urllib.parse.urlencode(query)}")


def get(path, **query):
    return json.loads(get_text(path, **query))


def is_ready():
    try:
        return get_text("/readyz") == "ok"
    except OSError:
        return False


def kubectl(*arguments, **options):
    return run("kubectl", *arguments, **options)


def kubectl_try(*arguments, **options):
    return subprocess.run(["kubectl", *arguments], capture_output=True, text=True, **options)


def start_kubectl(*arguments):
    return subprocess.Popen(["kubectl", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def apply(*resources):
    everything = {"apiVersion": "v1", "kind": "List", "items": resources}
    return kubectl("apply", "-f", "-", input=json.dumps(everything))


def write_kubeconfig(path):
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": SERVER, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    os.environ["KUBECONFIG"] = str(path)
