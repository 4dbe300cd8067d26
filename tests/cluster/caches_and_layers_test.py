"""Caches and layers of the chart: every pod serves them, and the memory limit follows the caches."""

import make_layers
import numpy as np
import tritonclient.grpc as triton

# An average over the tokens: the scores are 0, and all projections but those of Q and K keep their input.
SIZE = 8
LAYER = (
    {"num_attention_heads": 1},
    {
        "in_proj_weight": np.concatenate([np.zeros((2 * SIZE, SIZE), np.float32), np.eye(SIZE, dtype=np.float32)]),
        "out_proj.weight": np.eye(SIZE, dtype=np.float32),
    },
)
FILES = ("config.json", "model.safetensors")


def memory_limit(release):
    (container,) = release.get("deployments/rapt", "apis/apps/v1")["spec"]["template"]["spec"]["containers"]
    return int(container["resources"]["limits"]["memory"].removesuffix("Mi"))


def serve(release, **values):
    """Installs one pod whose resources are derived; returns a client of it."""
    release.derive_resources()
    release.install(replicas=1, **values)
    (pod,) = release.ready_pods()
    return triton.InferenceServerClient(f"{pod['status']['podIP']}:8001")


def tensor(name, array):
    made = triton.InferInput(name, list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    return made


def test_a_pod_keeps_sequences_in_the_memory_of_its_limit(node, release):
    with serve(release, server__memoryBudgetMiB=256, server__maxOpenCalls=1024, server__kvCacheMiB=64) as client:
        assert memory_limit(release) == 256 + 64 + 128 + 68 + 128
        x = np.ones((1, 1, 2, 16), np.float32)
        options = {"sequence_id": 1, "sequence_start": True, "outputs": [triton.InferRequestedOutput("Y")]}
        result = client.infer("attention_session", [tensor(name, x) for name in "QKV"], **options)
        np.testing.assert_allclose(result.as_numpy("Y"), x, rtol=1e-6)
        assert client.get_inference_statistics("attention_session").model_stats[0].inference_count == 1


def test_a_pod_loads_the_layers_of_its_volume(node, release, tmp_path):
    make_layers.write_layer(tmp_path, *LAYER)
    release.kubectl("create", "configmap", "layers", *(f"--from-file={tmp_path / name}" for name in FILES))
    volume = {"modelRepository__volume__configMap__name": "layers"}
    for n, name in enumerate(FILES):
        item = f"modelRepository__volume__configMap__items[{n}]"
        volume |= {f"{item}__key": name, f"{item}__path": f"average/{name}"}
    with serve(release, **volume) as client:
        assert client.is_model_ready("average")
        x = np.arange(3 * SIZE, dtype=np.float32).reshape(1, 3, SIZE)
        result = client.infer("average", [tensor("query", x)], outputs=[triton.InferRequestedOutput("Y")])
        np.testing.assert_allclose(result.as_numpy("Y"), np.broadcast_to(x.mean(1, keepdims=True), x.shape), rtol=1e-6)
