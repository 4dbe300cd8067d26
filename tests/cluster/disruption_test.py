"""Pods end under load, in every way."""

import time

import api
from daemons import wait_until
from node import NODE
from release import PODS, container_id
from traffic import RETRYING, Traffic


def names_of(pods):
    return {pod["metadata"]["name"] for pod in pods}


def wait_for_successors(release, ended, count=2):
    """Waits until the ended pods are gone and as many others are ready."""

    def replaced():
        return not ended & names_of(release.pods()) and len(release.ready_pods()) == count

    wait_until(replaced, "the pods are not replaced")


def test_rollout_at_once(node, release):
    release.install()
    with Traffic(node, release) as traffic:
        ended = names_of(release.pods())
        begin = time.monotonic()
        release.kubectl("rollout", "restart", "deployment/rapt")
        release.kubectl("rollout", "status", "deployment/rapt", "--timeout=120s")
        note = f"in {time.monotonic() - begin:.0f} s"
        wait_for_successors(release, ended)
        traffic.finish("rollout", note)


def test_a_pod_is_deleted(node, release):
    release.install()
    with Traffic(node, release) as traffic:
        ended = names_of(release.pods()[:1])
        release.kubectl("delete", "pod", *ended)
        wait_for_successors(release, ended)
        traffic.finish("a pod deleted")


def test_a_server_is_killed(node, release):
    """Calls in flight can only be repeated, so rapt-load is left out."""
    release.install()
    with Traffic(node, release, clients=[RETRYING]) as traffic:
        pod = release.pods()[0]
        node.ctr("tasks", "kill", "--signal", "SIGKILL", container_id(pod))

        def has_restarted():
            (status,) = release.get(f"pods/{pod['metadata']['name']}")["status"]["containerStatuses"]
            return status["restartCount"] == 1 and status["ready"]

        wait_until(has_restarted, "the server is not restarted")
        traffic.finish("kill -9")


def test_the_node_is_drained(node, release):
    """With a single node, it is made available again after the first eviction; the second waits for the new pod."""
    release.install()
    with Traffic(node, release) as traffic:
        ended = names_of(release.pods())
        drain = api.start_kubectl("drain", NODE, f"--pod-selector={PODS}", "--delete-emptydir-data", "--timeout=120s")
        wait_until(lambda: release.get("pods", fieldSelector="status.phase=Pending")["items"], "nothing is evicted")
        assert len(ended & names_of(release.ready_pods())) == 1, "the PodDisruptionBudget allows one"
        api.kubectl("uncordon", NODE)
        output, _ = drain.communicate()
        assert drain.returncode == 0, output
        wait_for_successors(release, ended)
        traffic.finish("drain, with a PodDisruptionBudget")
    assert "Cannot evict pod" in output, "both pods were evicted at once"
