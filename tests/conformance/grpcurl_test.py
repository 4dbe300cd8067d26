"""grpcurl finds and calls every service by reflection, and the schema is Triton's."""

import base64
import json
import os
import subprocess

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from rapt_server import RaptServer
from tritonclient.grpc import model_config_pb2, service_pb2

SERVICES = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
    "rapt.v1.AttentionService",
    "rapt.v1.CacheService",
}


@pytest.fixture(scope="module")
def grpcurl(server):
    def call(*words, options=()):
        command = [os.environ["RAPT_TOOLS"] + "/grpcurl", "-plaintext", *options, server.grpc_address, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    return call


def ask(grpcurl, method, request=None):
    options = ("-d", json.dumps(request)) if request else ()
    return json.loads(grpcurl(method, options=options))


def test_lists_the_services(grpcurl):
    assert SERVICES == set(grpcurl("list").split())


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_describes_each_service(grpcurl, service):
    assert f"{service} is a service" in grpcurl("describe", service)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_both_versions_of_reflection_answer(grpcurl, version):
    answer = ask(grpcurl, f"grpc.reflection.{version}.ServerReflection/ServerReflectionInfo", {"list_services": ""})
    assert {service["name"] for service in answer["list_services_response"]["service"]} == SERVICES


def test_calls_server_live(grpcurl):
    assert ask(grpcurl, "inference.GRPCInferenceService/ServerLive") == {"live": True}


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "rapt.v1.AttentionService"])
def test_health_is_serving(grpcurl, service):
    answer = ask(grpcurl, "grpc.health.v1.Health/Check", {"service": service})
    assert answer == {"status": "SERVING"}


def test_infers_with_typed_contents(grpcurl):
    x = {"datatype": "FP32", "shape": [1, 1, 2, 2], "contents": {"fp32_contents": [0, 0, 0, 4]}}
    request = {"model_name": "attention", "inputs": [{"name": name, **x} for name in "QKV"]}
    answer = ask(grpcurl, "inference.GRPCInferenceService/ModelInfer", request)
    y = np.frombuffer(base64.b64decode(answer["raw_output_contents"][0]), np.float32)
    # The first query is zero and weights both keys equally; the second scores 16 / sqrt(2) with itself.
    own = 1 / (1 + np.exp(-16 / np.sqrt(2)))
    np.testing.assert_allclose(y, [0, 2, 0, 4 * own], rtol=2e-6)


def test_attends_over_the_native_service(grpcurl):
    data = base64.b64encode(np.array([0, 0, 0, 4], np.float32)).decode()
    x = {"dtype": "FP32", "shape": [1, 1, 2, 2], "data": data}
    answer = ask(grpcurl, "rapt.v1.AttentionService/Attend", {"q": x, "k": x, "v": x, "want_lse": True})
    y = np.frombuffer(base64.b64decode(answer["y"]["data"]), np.float32)
    own = 1 / (1 + np.exp(-16 / np.sqrt(2)))
    np.testing.assert_allclose(y, [0, 2, 0, 4 * own], rtol=2e-6)
    assert answer["lse"]["shape"] == ["1", "1", "2"]


def test_the_native_service_returns_server_info(grpcurl):
    info = ask(grpcurl, "rapt.v1.AttentionService/GetServerInfo")
    assert [backend["name"] for backend in info["backends"]][-1] == "reference"


@pytest.fixture(scope="module")
def caches():
    """caches(method, request): calls a method of CacheService on a server that keeps caches."""
    with RaptServer("--kv_cache_bytes=16777216") as server:

        def call(method, request):
            command = [
                *(os.environ["RAPT_TOOLS"] + "/grpcurl", "-plaintext", "-d", json.dumps(request)),
                *(server.grpc_address, f"rapt.v1.CacheService/{method}"),
            ]
            ran = subprocess.run(command, capture_output=True, text=True)
            return json.loads(ran.stdout) if ran.returncode == 0 else ran.stderr

        yield call


def floats(numbers, shape):
    data = base64.b64encode(np.array(numbers, np.float32)).decode()
    return {"dtype": "FP32", "shape": shape, "data": data}


def test_keeps_keys_and_values(caches):
    shape = {"layers": 1, "kv_heads": 1, "head_size": 2}
    made = caches("Create", {"name": "grpcurl", "dtype": "FP32", "shapes": [shape]})
    named = {"cache": made["id"], "generation": made["generation"]}
    x = floats([0, 0, 0, 4], [2, 1, 2])
    appended = caches("Append", {"parts": [{**named, "at": 0, "k": x, "v": x}]})
    assert appended == {"results": [{"length": "2"}]}
    step = {"items": [{**named, "at": 2, "rows": 1}], "q": floats([0, 4], [1, 1, 2])}
    attended = caches("Attend", step)
    y = np.frombuffer(base64.b64decode(attended["y"]["data"]), np.float32)
    own = 1 / (1 + np.exp(-16 / np.sqrt(2)))
    np.testing.assert_allclose(y, [0, 4 * own], rtol=2e-6)
    report = caches("Diagnose", step)
    assert [tensor["name"] for tensor in report["inputs"]] == ["q", "k", "v"] and report["pairs"] == "2"
    (listed,) = caches("List", {})["caches"]
    assert listed["name"] == "grpcurl" and listed["lengths"] == ["2"]
    closed = caches("Close", {"caches": [made["id"]]})
    assert closed["caches"][0]["id"] == made["id"]
    assert caches("List", {}) == {}
    refused = caches("Attend", step)
    assert "Code: NotFound" in refused and "closed" in refused


def described_by_server(grpcurl, path):
    grpcurl("describe", "inference.GRPCInferenceService", options=("-protoset-out", str(path)))
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file


def described_by_triton():
    for module in (service_pb2, model_config_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        yield file


def schema(files):
    """The parts that determine the wire format: fields, enum values and methods by full name."""
    found = {}

    def add_enum(prefix, enum):
        for value in enum.value:
            found[f"{prefix}.{enum.name}.{value.name}"] = value.number

    def add_message(prefix, message):
        name = f"{prefix}.{message.name}"
        for field in message.field:
            oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
            found[f"{name}.{field.name}"] = (
                field.number,
                field.label,
                field.type,
                field.type_name,
                oneof,
            )
        for nested in message.nested_type:
            add_message(name, nested)
        for enum in message.enum_type:
            add_enum(name, enum)

    for file in files:
        if file.package != "inference":
            continue
        for message in file.message_type:
            add_message(file.package, message)
        for enum in file.enum_type:
            add_enum(file.package, enum)
        for service in file.service:
            for method in service.method:
                found[f"{file.package}.{service.name}.{method.name}"] = (
                    method.input_type,
                    method.output_type,
                    method.client_streaming,
                    method.server_streaming,
                )
    return found


def test_the_schema_is_tritons(grpcurl, tmp_path):
    ours = schema(described_by_server(grpcurl, tmp_path / "served.protoset"))
    tritons = schema(described_by_triton())
    assert ours.keys() == tritons.keys()
    assert ours == tritons
