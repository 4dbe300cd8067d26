"""The image as an operator runs it: read-only, unprivileged, stopped under load.

RAPT_IMAGE names it. `./dev docker-test` builds it and runs this.
"""

import json
import os
import re
import subprocess
import threading
import urllib.request

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

IMAGE = os.environ["RAPT_IMAGE"]
# The restrictions of strict cluster policies.
HARDENED = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--memory=1g"]
LOAD_CALLERS = 4
CALLS_BEFORE_STOP = 50


def docker(*arguments):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def inspect(name, template):
    return docker("inspect", f"--format={template}", name)


PORTS = ("8000", "8001", "8002")


class Container:
    """Runs the image until the block ends; ready on entry."""

    def __init__(self, *flags):
        self._flags = flags

    def __enter__(self):
        self.id = docker(
            "run", "--detach", *HARDENED, *(f"--publish=127.0.0.1::{port}" for port in PORTS), IMAGE, *self._flags
        )
        follow = subprocess.Popen(
            ["docker", "logs", "--follow", self.id], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.ready = follow.stdout.readline().strip()  # empty where it ended without
        follow.kill()
        follow.wait()
        if self.ready:
            self.http_address, self.grpc_address, self.metrics_address = (
                docker("port", self.id, port).splitlines()[0] for port in PORTS
            )
        return self

    def __exit__(self, *_):
        docker("rm", "--force", self.id)

    def logs(self):
        return subprocess.run(["docker", "logs", self.id], capture_output=True, text=True).stderr


@pytest.fixture(scope="module")
def container():
    with Container("--insecure") as running:
        assert running.ready, running.logs()
        yield running


def attend(client):
    x = np.random.default_rng(0).standard_normal((1, 2, 16, 8), np.float32)
    inputs = [triton.InferInput(name, x.shape, "FP32") for name in "QKV"]
    for tensor in inputs:
        tensor.set_data_from_numpy(x)
    scores = x @ x.swapaxes(-1, -2) / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ x
    return np.abs(client.infer("attention", inputs).as_numpy("Y") - expected).max()


def test_computes_correct_results(container):
    with triton.InferenceServerClient(container.grpc_address) as client:
        assert attend(client) < 1e-5


def test_serves_http(container):
    with urllib.request.urlopen(f"http://{container.http_address}/v2/models/attention/ready") as answer:
        assert answer.status == 200


def test_serves_metrics(container):
    with urllib.request.urlopen(f"http://{container.metrics_address}/metrics") as page:
        assert b"rapt_requests_total" in page.read()


def test_health_check_uses_its_own_client(container):
    # Docker runs the check every ten seconds; running it in the container avoids waiting.
    command = json.loads(inspect(container.id, "{{json .Config.Healthcheck.Test}}"))
    assert command[0] == "CMD", "a shell would be needed"
    assert docker("exec", container.id, *command[1:]) == "SERVING"


def test_is_unprivileged_and_read_only(container):
    assert inspect(container.id, "{{.Config.User}}") == "65532:65532"
    status = docker("exec", container.id, "cat", "/proc/1/status")
    assert re.search(r"^Name:\trapt-server$", status, re.M), "the server is process 1"
    assert re.search(r"^CapEff:\t0+$", status, re.M), status
    assert re.search(r"^Uid:\t65532\t", status, re.M), status


def test_has_labels(container):
    labels = json.loads(inspect(IMAGE, "{{json .Config.Labels}}"))
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+", labels["org.opencontainers.image.version"])


def test_rejects_plain_text_by_default():
    with Container() as refused:
        assert docker("wait", refused.id) == "2"
        assert "--insecure" in refused.logs()


def test_reports_why_the_gpu_is_unavailable():
    """There is no GPU, and the image target cpu has no cuDNN."""
    with Container("--insecure", "--backend=cudnn") as refused:
        assert docker("wait", refused.id) == "2"
        assert "cudnn" in refused.logs()


def test_drains_under_load_without_losing_calls(container):
    """Every accepted call is answered; later ones are rejected, not dropped."""
    answered = [0] * LOAD_CALLERS
    wrong = []
    enough = threading.Semaphore(0)

    def load(caller):
        with triton.InferenceServerClient(container.grpc_address) as client:
            while True:
                try:
                    error = attend(client)
                except triton.InferenceServerException as refusal:
                    if refusal.status() != str(grpc.StatusCode.UNAVAILABLE):
                        wrong.append(f"after {answered[caller]} calls: {refusal}")
                    return
                finally:
                    enough.release()
                if error >= 1e-5:
                    wrong.append(f"error {error}")
                answered[caller] += 1

    callers = [threading.Thread(target=load, args=(i,)) for i in range(LOAD_CALLERS)]
    for caller in callers:
        caller.start()
    for _ in range(CALLS_BEFORE_STOP):
        enough.acquire()
    docker("stop", "--time=30", container.id)
    for caller in callers:
        caller.join()
    assert not wrong, wrong
    assert min(answered) > 0
    assert inspect(container.id, "{{.State.ExitCode}}") == "0", container.logs()
    served = int(re.search(r'served_calls["=: ]+(\d+)', container.logs()).group(1))
    # An earlier test may have made one more call.
    assert served >= sum(answered), f"{served} served, {sum(answered)} answered"
