"""The API server accepts every object of the chart that Kubernetes itself defines, with each set of values."""

import api
import chart_test
import pytest
import yaml

KSERVE = chart_test.CHART.parent / "kserve.yaml"


def dry_run(release, resources):
    """Returns what kubectl printed, with the warnings of the restricted Pod Security Standard."""
    for resource in resources:
        resource["metadata"]["namespace"] = release.namespace
    done = api.kubectl_try("apply", "--dry-run=server", "-f", "-", input=yaml.safe_dump_all(resources))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("values", chart_test.VALUE_SETS.values(), ids=chart_test.VALUE_SETS)
def test_the_chart(release, values):
    resources = [r for r in chart_test.render_all(values) if r["kind"] not in chart_test.CUSTOM]
    output = dry_run(release, resources)
    assert 'container "rapt-server" must' not in output and "pod must" not in output, output
    assert output.count("(server dry run)") == len(resources)


def test_the_pod_of_kserve(release):
    runtime, _ = yaml.safe_load_all(KSERVE.read_text())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kserve"}, "spec": {}}
    pod["spec"]["containers"] = runtime["spec"]["containers"]
    assert "pod/kserve created (server dry run)" in dry_run(release, [pod])
