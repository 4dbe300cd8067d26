"""The chart's HorizontalPodAutoscaler, by CPU time and by the age of waiting requests."""

import time

from daemons import wait_until
from traffic import Client, Traffic, load_command

# Long to compute and quick to transfer: servers stay able to answer pings.
SLOW = "1x1x8192x16"


def enable(release, **values):
    release.install(autoscaler__enabled="true", autoscaler__minReplicas=2, autoscaler__maxReplicas=4, **values)


def wait_for_new_pods(release, traffic):
    """Waits until new pods get calls; returns the autoscaler's reasons and a note."""
    begin = time.monotonic()
    pods = wait_until(lambda: len(release.ready_pods()) > 2 and release.ready_pods(), "the autoscaler adds no pods")
    names = {pod["metadata"]["name"] for pod in pods}
    wait_until(lambda: all(traffic.calls_by_pod().get(name) for name in names), "a new pod gets no calls")
    note = f"2 to {len(names)} pods with calls in {time.monotonic() - begin:.0f} s"
    return release.events("SuccessfulRescale"), note


def test_by_cpu(node, release, metrics_apis):
    enable(release, autoscaler__queueAgeMilliseconds=0)
    with Traffic(node, release) as traffic:
        events, note = wait_for_new_pods(release, traffic)
        traffic.finish("autoscaler, CPU", note)
    assert any("cpu resource utilization" in event for event in events), events


def test_by_age_of_requests(node, release, metrics_apis, monkeypatch):
    monkeypatch.setattr(metrics_apis, "serves_cpu", False)
    enable(release)
    with Traffic(node, release) as traffic:
        slow = Client(node, release, "slow-load", load_command(release.address, shape=SLOW, callers=16))
        events, note = wait_for_new_pods(release, traffic)
        slow.interrupt()
        traffic.finish("autoscaler, age of requests", note)
    assert any("rapt_oldest_request_age_seconds" in event for event in events), events


def test_enabling_keeps_the_number_of_pods(node, release, metrics_apis):
    release.install(replicas=3)
    with Traffic(node, release) as traffic:
        enable(release)

        def has_decided():
            assert release.replicas() >= 3
            (autoscaler,) = release.get("horizontalpodautoscalers", "apis/autoscaling/v2")["items"]
            conditions = autoscaler["status"].get("conditions", [])
            return any(c["type"] == "ScalingActive" and c["status"] == "True" for c in conditions)

        wait_until(has_decided, "the autoscaler does not decide")
        time.sleep(10)  # two of its periods
        assert release.replicas() >= 3
        assert not [event for event in release.events("ScalingReplicaSet") if "Scaled down" in event]
        traffic.finish("autoscaler enabled with 3 pods", f"{release.replicas()} pods afterwards")
