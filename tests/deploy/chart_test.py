"""The Helm chart: lint, the Kubernetes schemas, and what its values promise.

RAPT_HELM names the program helm.
"""

import os
import pathlib
import subprocess

import kubernetes_validate
import pytest
import yaml

CHART = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes" / "chart"
KUBERNETES = "1.31"
# Custom resources, for which Kubernetes has no schema.
CUSTOM = {"ServiceMonitor"}

PLAIN = ("insecure=true",)
TLS = ("tls.secret=rapt-tls",)
VALUE_SETS = {
    "plain": PLAIN,
    "tls": TLS,
    "mtls and tokens": (*TLS, "tls.clientAuth=true", "tokens.secret=rapt-tokens"),
    "gpu": (*TLS, "gpu.enabled=true", "gpu.runtimeClassName=nvidia"),
    "gpu with kept plans": (*PLAIN, "gpu.enabled=true", "gpu.planCacheClaim=plans"),
    "autoscaled": (*PLAIN, "autoscaler.enabled=true", "serviceMonitor.enabled=true"),
    "bare": (*PLAIN, "podDisruptionBudget.enabled=false", "networkPolicy.enabled=false", "service.headless=false"),
    "placed": (
        *PLAIN,
        "nodeSelector.pool=cpu",
        "tolerations[0].key=pool",
        "imagePullSecrets[0].name=registry",
        "server.extraArgs[0]=--isa=avx2",
        "server.env[0].name=RAPT_BACKEND",
        "server.env[0].value=cpu",
        "podAnnotations.team=search",
    ),
}


def helm(*arguments):
    return subprocess.run([os.environ["RAPT_HELM"], *arguments], capture_output=True, text=True)


def flags_of(values):
    return [argument for value in values for argument in ("--set", value)]


def render(values):
    """The resources by kind."""
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART), "--namespace=attention", *flags_of(values))
    assert done.returncode == 0, done.stderr
    resources = [r for r in yaml.safe_load_all(done.stdout) if r]
    return {resource["kind"]: resource for resource in resources}


def container_of(resources):
    return resources["Deployment"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_lints(values):
    done = helm("lint", "--strict", str(CHART), *flags_of(values))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_fits_the_schemas(values):
    for kind, resource in render(values).items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_plain_text_needs_permission():
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART))
    assert done.returncode != 0 and "insecure=true" in done.stderr


def test_tokens_need_tls():
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART), *flags_of((*PLAIN, "tokens.secret=t")))
    assert done.returncode != 0 and "tls.secret" in done.stderr


@pytest.mark.parametrize("bad", ["server.threads=0", "server.memoryBudgetMiB=much", "insecure=yes", "replicas=-1"])
def test_rejects_invalid_values(bad):
    assert helm("template", "--kube-version=1.31.0", "test", str(CHART), *flags_of((*TLS, bad))).returncode != 0


def test_resources_follow_the_servers_flags():
    container = container_of(render((*PLAIN, "server.threads=6", "server.memoryBudgetMiB=4096", "server.maxOpenCalls=1024")))
    assert "--threads=6" in container["args"]
    assert f"--memory_budget_bytes={4096 << 20}" in container["args"]
    promised = 4096 + 128 + 1024 * 64 // 1024 + 128
    assert container["resources"]["requests"] == {"cpu": "6", "memory": f"{promised}Mi"}
    assert container["resources"]["limits"] == container["resources"]["requests"]


def test_a_gpu_is_used_if_enabled():
    resources = render((*PLAIN, "gpu.enabled=true", "gpu.memoryMiB=8192", r"gpu.warmPlans=1x32/8x4096x128 bf16 causal"))
    container = container_of(resources)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert f"--cudnn_memory_bytes={8192 << 20}" in container["args"]
    assert "--cudnn_warm_plans=1x32/8x4096x128 bf16 causal" in container["args"]
    assert "--cudnn_plan_cache=/var/cache/rapt" in container["args"]
    assert {"name": "plans", "mountPath": "/var/cache/rapt"} in container["volumeMounts"], "the root is read-only"
    volumes = resources["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert [volume["name"] for volume in volumes] == ["plans"]
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600


def test_limits_include_host_memory_pinned_for_a_gpu():
    def promised(*values):
        return int(container_of(render((*PLAIN, *values)))["resources"]["limits"]["memory"].removesuffix("Mi"))

    assert promised("gpu.enabled=true", "gpu.memoryMiB=8192") >= promised() + 8192


def test_no_gpu_is_requested_by_default():
    container = container_of(render(PLAIN))
    assert not [argument for argument in container["args"] if "cudnn" in argument]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_grpc_is_plain_text_only_if_insecure():
    assert "--tls_cert=/etc/rapt/tls/tls.crt" not in container_of(render(PLAIN))["args"]
    assert "--tls_cert=/etc/rapt/tls/tls.crt" in container_of(render(TLS))["args"]


def test_pods_have_no_privileges():
    resources = render(PLAIN)
    pod = resources["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
    assert container_of(resources)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]


def test_the_termination_grace_period_covers_the_drain():
    pod = render((*PLAIN, "server.gracePeriodSeconds=45"))["Deployment"]["spec"]["template"]["spec"]
    assert "--grace_period=45s" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > 45 + 5


def test_probes_match_the_servers_protocol():
    assert container_of(render(PLAIN))["readinessProbe"]["grpc"] == {"port": 8001}
    assert container_of(render(TLS))["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_dns_resolves_to_every_pod():
    assert render(PLAIN)["Service"]["spec"]["clusterIP"] == "None"


def test_kserve_example_matches_the_server():
    text = (CHART.parent / "kserve.yaml").read_text()
    runtime, service = yaml.safe_load_all(text)
    assert runtime["spec"]["supportedModelFormats"][0]["name"] == service["spec"]["predictor"]["model"]["modelFormat"]["name"]
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]


def test_versions_equal_the_projects():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "CMakeLists.txt").read_text()
    assert f"project(rapt VERSION {chart['appVersion']} " in project
    assert chart["version"] == chart["appVersion"]
