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
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "GRPCRoute"}

KSERVE_FILES = ("kserve.yaml", "kserve-http.yaml")

PLAIN = ("insecure=true",)
TLS = ("tls.secret=rapt-tls",)
VALUE_SETS = {
    "plain": PLAIN,
    "tls": TLS,
    "mtls and tokens": (*TLS, "tls.clientAuth=true", "tokens.secret=rapt-tokens"),
    "gpu": (*TLS, "gpu.enabled=true", "gpu.runtimeClassName=nvidia"),
    "gpu with kept plans": (*PLAIN, "gpu.enabled=true", "gpu.planCacheClaim=plans"),
    "autoscaled": (*PLAIN, "autoscaler.enabled=true", "serviceMonitor.enabled=true"),
    "scaled by KEDA": (
        *PLAIN,
        "autoscaler.enabled=true",
        "autoscaler.kind=ScaledObject",
        "autoscaler.prometheusAddress=http://prometheus:9090",
    ),
    "gpu, autoscaled": (*PLAIN, "gpu.enabled=true", "autoscaler.enabled=true"),
    "routed": (*PLAIN, "grpcRoute.enabled=true", "grpcRoute.parentRefs[0].name=gateway", "grpcRoute.hostnames[0]=a.b"),
    "observed": (*PLAIN, "serviceMonitor.enabled=true", "prometheusRule.enabled=true", "prometheusRule.labels.team=a"),
    "shared memory": (
        *TLS,
        "sharedMemoryMiB=512",
        "sidecars[0].name=caller",
        "sidecars[0].image=caller:1",
        "sidecars[0].volumeMounts[0].name=shm",
        "sidecars[0].volumeMounts[0].mountPath=/dev/shm",
    ),
    "caches": (*PLAIN, "server.kvCacheMiB=512"),
    "layers": (*TLS, "modelRepository.volume.persistentVolumeClaim.claimName=layers"),
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
        "priorityClassName=important",
        "strategy.type=Recreate",
        "strategy.rollingUpdate=null",
        "topologySpreadConstraints=null",
    ),
}


def helm(*arguments):
    return subprocess.run([os.environ["RAPT_HELM"], *arguments], capture_output=True, text=True)


def flags_of(values):
    return [argument for value in values for argument in ("--set", value)]


def render_all(values):
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART), "--namespace=attention", *flags_of(values))
    assert done.returncode == 0, done.stderr
    return [r for r in yaml.safe_load_all(done.stdout) if r]


def render(values):
    """The resources by kind, the first of each."""
    resources = {}
    for resource in render_all(values):
        resources.setdefault(resource["kind"], resource)
    return resources


def refusal(*values):
    """The message that refuses the values."""
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART), *flags_of(values))
    assert done.returncode != 0, values
    return done.stderr


def container_of(resources):
    return resources["Deployment"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_lints(values):
    done = helm("lint", "--strict", str(CHART), *flags_of(values))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_fits_the_schemas(values):
    for resource in render_all(values):
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_plain_text_needs_permission():
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART))
    assert done.returncode != 0 and "insecure=true" in done.stderr


def test_tokens_need_tls():
    done = helm("template", "--kube-version=1.31.0", "test", str(CHART), *flags_of((*PLAIN, "tokens.secret=t")))
    assert done.returncode != 0 and "tls.secret" in done.stderr


@pytest.mark.parametrize(
    "bad, named",
    [
        ("server.threads=0", "server.threads"),
        ("server.memoryBudgetMiB=much", "server.memoryBudgetMiB"),
        ("server.kvCacheMiB=3", "server.kvCacheMiB"),
        ("server.extraArgs[0]=--kv_cache_bytes=8G", "server.kvCacheMiB"),
        ("modelRepository.claim=layers", "claim is not allowed"),
        ("modelRepository.volume.nfs=server", "modelRepository.volume.nfs"),
        ("server.maxConnectionAgeSeconds=10s", "server.maxConnectionAgeSeconds"),
        ("server.extraArgs[0]=threads", "server.extraArgs.0"),
        ("server.thread=2", "thread is not allowed"),
        ("insecure=yes", "insecure"),
        ("replicas=-1", "replicas"),
        ("minReadySeconds=-1", "minReadySeconds"),
        ("strategy.type=Slow", "strategy.type"),
        ("resources.limit.cpu=1", "limit is not allowed"),
        ("sharedMemoryMiB=1Gi", "sharedMemoryMiB"),
        ("service.grpcPort=0", "service.grpcPort"),
        ("service.clusterIp=true", "clusterIp is not allowed"),
        ("autoscaler.kind=VPA", "autoscaler.kind"),
        ("autoscaler.cpuPercent=0", "autoscaler.cpuPercent"),
        ("autoscaler.busyThreadsPercent=70", "busyThreadsPercent is not allowed"),
        ("autoscaler.minReplicas=20", "autoscaler.minReplicas is 20"),
        ("autoscaler.prometheusAddress=prometheus", "autoscaler.prometheusAddress"),
        ("grpcRoute.enabled=true", "grpcRoute"),
        ("serviceMonitor.interval=fast", "serviceMonitor.interval"),
        ("topologySpreadConstraints[0].maxSkew=1", "topologySpreadConstraints.0"),
        ("priorityClassName=Not Valid", "priorityClassName"),
        ("replica=2", "replica is not allowed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(bad, named):
    assert named in refusal(*TLS, bad)


def test_keda_needs_the_address_of_prometheus():
    assert "autoscaler.prometheusAddress" in refusal(*PLAIN, "autoscaler.enabled=true", "autoscaler.kind=ScaledObject")


def test_resources_follow_the_servers_flags():
    container = container_of(render((*PLAIN, "server.threads=6", "server.memoryBudgetMiB=4096", "server.maxOpenCalls=1024")))
    assert "--threads=6" in container["args"]
    assert f"--memory_budget_bytes={4096 << 20}" in container["args"]
    promised = 4096 + 128 + 1024 * 68 // 1024 + 128
    assert container["resources"]["requests"] == {"cpu": "7", "memory": f"{promised}Mi"}
    assert container["resources"]["limits"] == container["resources"]["requests"]


@pytest.mark.parametrize("threads, cores", [(1, 2), (2, 3), (7, 8), (8, 10), (16, 20)])
def test_the_network_threads_have_cores(threads, cores):
    container = container_of(render((*PLAIN, f"server.threads={threads}")))
    assert container["resources"]["limits"]["cpu"] == str(cores)


def test_resources_can_be_replaced():
    resources = container_of(render((*PLAIN, r"resources.limits.nvidia\.com/mig-1g\.10gb=1", "gpu.enabled=true")))["resources"]
    assert resources == {"limits": {"nvidia.com/mig-1g.10gb": 1}}


def limit(resources):
    return int(container_of(resources)["resources"]["limits"]["memory"].removesuffix("Mi"))


def test_the_memory_limit_follows_the_caches():
    resources = render(VALUE_SETS["caches"])
    assert f"--kv_cache_bytes={512 << 20}" in container_of(resources)["args"]
    assert limit(resources) == limit(render(PLAIN)) + 512
    assert not [argument for argument in container_of(render(PLAIN))["args"] if "kv_cache" in argument]


def test_caches_in_extra_arguments_need_resources_of_their_own():
    values = (*PLAIN, "server.extraArgs[0]=--kv_cache_bytes=8G", "resources.limits.memory=16Gi")
    assert "--kv_cache_bytes=8G" in container_of(render(values))["args"]


def test_layers_are_mounted_and_loaded_before_a_pod_is_ready():
    resources = render((*VALUE_SETS["layers"], "modelRepository.startSeconds=900"))
    container = container_of(resources)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
    assert mount["readOnly"] and f"--model_repository={mount['mountPath']}" in container["args"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "layers"}} in resources["Deployment"]["spec"]["template"][
        "spec"
    ]["volumes"]
    assert container["startupProbe"]["failureThreshold"] == 900
    assert limit(resources) == limit(render(TLS)), "the weights are part of the budget"
    plain = container_of(render(PLAIN))
    assert plain["startupProbe"]["failureThreshold"] == 60 and "volumeMounts" not in plain


def test_services_named_rapt_set_no_variables_of_the_server():
    assert render(PLAIN)["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_shared_memory_is_mounted_and_counted():
    resources = render((*PLAIN, "sharedMemoryMiB=512"))
    assert "--allow_shared_memory" in container_of(resources)["args"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container_of(resources)["volumeMounts"]
    assert resources["Deployment"]["spec"]["template"]["spec"]["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}}
    ]
    assert limit(resources) == limit(render(PLAIN)) + 512
    assert "--allow_shared_memory" not in container_of(render(PLAIN))["args"]


def test_clients_find_new_pods_and_leave_old_ones():
    deployment = render(PLAIN)["Deployment"]["spec"]
    assert "--max_connection_age=10s" in deployment["template"]["spec"]["containers"][0]["args"]
    assert deployment["minReadySeconds"] > 30, "gRPC resolves a name every 30 s"
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_the_autoscaler_never_lowers_the_number_of_pods_to_one():
    # Without a cluster there are no pods, so the minimum is rendered.
    deployment = render((*PLAIN, "autoscaler.enabled=true", "autoscaler.minReplicas=3"))["Deployment"]
    assert deployment["spec"]["replicas"] == 3


def metrics_of(*values):
    metrics = render((*PLAIN, "autoscaler.enabled=true", *values))["HorizontalPodAutoscaler"]["spec"]["metrics"]
    return [metric["resource"]["name"] if "resource" in metric else metric["pods"]["metric"]["name"] for metric in metrics]


def test_the_autoscaler_follows_cpu_or_lanes_and_the_age_of_requests():
    assert metrics_of() == ["cpu", "rapt_oldest_request_age_seconds"]
    assert metrics_of("gpu.enabled=true") == ["rapt_device_lanes_busy_ratio", "rapt_oldest_request_age_seconds"]
    assert metrics_of("autoscaler.queueAgeMilliseconds=0") == ["cpu"]


def test_the_adapter_exposes_the_autoscalers_metrics():
    values = yaml.safe_load((CHART.parent / "prometheus-adapter-values.yaml").read_text())
    exposed = {rule["name"]["as"] for rule in values["rules"]["custom"]}
    assert exposed == {*metrics_of(), *metrics_of("gpu.enabled=true")} - {"cpu"}


def test_keda_scales_instead_of_the_autoscaler():
    resources = render((*VALUE_SETS["scaled by KEDA"], "autoscaler.queueAgeMilliseconds=500"))
    assert "HorizontalPodAutoscaler" not in resources
    cpu, age = resources["ScaledObject"]["spec"]["triggers"]
    assert (cpu["type"], cpu["metadata"]) == ("cpu", {"value": "75"})
    assert age["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(max by (pod) (rapt_oldest_request_age_seconds{namespace="attention",pod=~"test-.*"}))',
        "threshold": "0.5",
    }


def services_of(*values):
    return {r["metadata"]["name"]: r["spec"] for r in render_all((*PLAIN, *values)) if r["kind"] == "Service"}


def test_proxies_have_a_service_with_one_address():
    services = services_of()
    assert "clusterIP" not in services["test-cluster-ip"]
    names = [port["name"] for port in services["test-cluster-ip"]["ports"]]
    assert names == ["grpc", "http"], "metrics are scraped once"
    assert list(services_of("service.clusterIP=false")) == ["test"]
    assert list(services_of("service.headless=false")) == ["test"]


@pytest.mark.parametrize("values, name", [((), "test-cluster-ip"), (("service.clusterIP=false",), "test")])
def test_the_route_leads_to_a_service(values, name):
    route = render((*VALUE_SETS["routed"], *values))["GRPCRoute"]["spec"]
    assert route["rules"] == [{"backendRefs": [{"name": name, "port": 8001}]}]
    assert route["parentRefs"] == [{"name": "gateway"}] and route["hostnames"] == ["a.b"]


@pytest.mark.parametrize("values, protocol", [(PLAIN, "http"), (TLS, "https")], ids=["plain", "tls"])
def test_http_is_served_beside_grpc(values, protocol):
    resources = render_all((*values, "service.httpPort=80"))
    container = container_of({r["kind"]: r for r in resources})
    (port,) = [port for port in container["ports"] if port["name"] == "http"]
    assert f"--http_address=0.0.0.0:{port['containerPort']}" in container["args"]
    for service in [r["spec"] for r in resources if r["kind"] == "Service"]:
        assert {"name": "http", "port": 80, "targetPort": "http", "appProtocol": protocol} in service["ports"]
    (policy,) = [r["spec"] for r in resources if r["kind"] == "NetworkPolicy"]
    assert {"port": "http"} in policy["ingress"][0]["ports"], "callers over HTTP are those over gRPC"


def test_hosts_of_plain_http_are_the_services():
    def hosts(*values):
        args = container_of(render(values))["args"]
        return [arg.removeprefix("--http_hosts=").split(",") for arg in args if arg.startswith("--http_hosts=")]

    (names,) = hosts(*PLAIN, "server.httpHosts={rapt.example.org,*.a.example}")
    for resource in render_all(PLAIN):
        if resource["kind"] == "Service":
            name = resource["metadata"]["name"]
            assert name in names and f"{name}.attention.svc.cluster.local" in names
    assert names[-2:] == ["rapt.example.org", "*.a.example"]
    assert hosts(*TLS) == [], "over TLS the certificate has the names"


def test_the_image_publishes_the_ports_of_the_chart():
    dockerfile = (CHART.parents[2] / "Dockerfile").read_text()
    container = container_of(render(PLAIN))
    assert f"EXPOSE {' '.join(str(p) for p in sorted(p['containerPort'] for p in container['ports']))}\n" in dockerfile
    compose = yaml.safe_load((CHART.parents[1] / "compose" / "compose.yml").read_text())
    for name in ("grpc", "http", "metrics"):
        (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == name]
        assert f"RAPT_{name.upper()}_ADDRESS=0.0.0.0:{port}" in dockerfile
        assert f"127.0.0.1:{port}:{port}" in compose["services"]["server"]["ports"]


def test_the_rules_are_those_of_prometheus():
    rules = CHART.parents[1] / "prometheus" / "rules"
    groups = render(VALUE_SETS["observed"])["PrometheusRule"]["spec"]["groups"]
    expected = [rule for file in ("alerts", "recording") for group in yaml.safe_load((rules / f"{file}.yml").read_text())["groups"]
                for rule in group["rules"]]  # fmt: skip
    assert [rule for group in groups for rule in group["rules"]] == expected
    assert len({group["name"] for group in groups}) == len(groups)


def test_pods_that_are_not_ready_do_not_block_eviction():
    assert render(PLAIN)["PodDisruptionBudget"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    old = helm("template", "--kube-version=1.26.0", "test", str(CHART), *flags_of(PLAIN)).stdout
    assert "PodDisruptionBudget" in old and "unhealthyPodEvictionPolicy" not in old


def test_pods_spread_over_zones():
    pod = render(PLAIN)["Deployment"]["spec"]["template"]
    (constraint,) = pod["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
    assert constraint["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("values", [PLAIN, VALUE_SETS["mtls and tokens"]], ids=["plain", "mtls"])
def test_helm_test_asks_for_health(values):
    resources = render_all(values)
    (pod,) = [resource for resource in resources if resource["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["rapt", "health"] and "--address=test:8001" in container["args"]
    assert ("--tls-cert=/etc/rapt/tls/tls.crt" in container["args"]) == (values != PLAIN)
    for service in [r["spec"] for r in resources if r["kind"] == "Service"]:
        assert not service["selector"].items() <= pod["metadata"]["labels"].items(), "it gets calls"


def restricted_faults(pod):
    """What the restricted Pod Security Standard refuses of the fields that these pods use."""
    faults = []
    of_pod = pod.get("securityContext", {})
    for container in pod["containers"]:
        context = {**of_pod, **container.get("securityContext", {})}
        if context.get("allowPrivilegeEscalation") is not False:
            faults.append("allowPrivilegeEscalation")
        if context.get("capabilities", {}).get("drop") != ["ALL"]:
            faults.append("capabilities")
        if not context.get("runAsNonRoot"):
            faults.append("runAsNonRoot")
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            faults.append("seccompProfile")
    return faults


def test_every_pod_is_restricted():
    for resource in render_all(PLAIN):
        if resource["kind"] == "Deployment":
            assert restricted_faults(resource["spec"]["template"]["spec"]) == []
        if resource["kind"] == "Pod":
            assert restricted_faults(resource["spec"]) == []
    for file in KSERVE_FILES:
        runtime, _ = yaml.safe_load_all((CHART.parent / file).read_text())
        assert restricted_faults(runtime["spec"]) == []


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


@pytest.mark.parametrize("file", KSERVE_FILES)
def test_kserve_example_matches_the_server(file):
    runtime, service = yaml.safe_load_all((CHART.parent / file).read_text())
    model = service["spec"]["predictor"]["model"]
    assert runtime["spec"]["supportedModelFormats"][0]["name"] == model["modelFormat"]["name"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert [model["protocolVersion"]] == runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    (port,) = container["ports"]
    # KServe names ports as Knative does.
    flag, name, closed = {
        "v2": ("http", "http1", "--grpc_address=127.0.0.1:8001"),
        "grpc-v2": ("grpc", "h2c", "--http_address="),
    }[model["protocolVersion"]]
    assert port["name"] == name and f"--{flag}_address=0.0.0.0:{port['containerPort']}" in container["args"]
    assert closed in container["args"]  # the image opens both
    # The rest of a runtime is a pod.
    pod = {key: value for key, value in runtime["spec"].items() if key in ("containers",)}
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}, KUBERNETES, strict=True)


def test_versions_equal_the_projects():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "CMakeLists.txt").read_text()
    assert f"project(rapt VERSION {chart['appVersion']} " in project
    assert chart["version"] == chart["appVersion"]
