"""proto/openapi.json against a running server: the same paths, and answers as declared to the examples."""

import base64
import json
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.request

import jsonschema
import make_layers
import openapi_spec_validator
import pytest
from rapt_server import RaptServer

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"
DOCUMENT = json.loads((PROTO / "openapi.json").read_text())
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
REGION = pathlib.Path("/dev/shm/rapt-openapi-example")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    make_layers.write_layer(models / "torch_block", *make_layers.layers()["torch_block"])
    with RaptServer(
        f"--model_repository={models}",
        "--allow_shared_memory",
        "--explorer=false",
        "--kv_cache_bytes=67108864",
        "--cudnn_memory_bytes=67108864",
        "--cudnn_min_flops=10000000000",
        program="RAPT_SERVER_WITH_FAKE_GPU",
    ) as running:
        REGION.write_bytes(bytes(64))
        yield running
        REGION.unlink()


def send(server, method, path, body=None):
    """Returns the status, the headers and the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http_address}{path}", data, method=method.upper())
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def check(schema, value):
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def schema_of(answer):
    if "$ref" in answer:
        answer = DOCUMENT["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    return answer["content"]["application/json"]["schema"]


def example_of(path, method):
    """The target and the body of an operation's example."""
    operation, query = DOCUMENT["paths"][path][method], []
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            path = path.replace("{" + parameter["name"] + "}", parameter["example"])
        if parameter["in"] == "query":
            query.append(f"{parameter['name']}={parameter['example']}")
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return path + ("?" + "&".join(query) if query else ""), content.get("example"), content.get("schema")


def test_is_up_to_date():
    subprocess.run([sys.executable, PROTO / "openapi.py", "--check"], check=True)


def test_is_openapi():
    openapi_spec_validator.validate(DOCUMENT, cls=openapi_spec_validator.OpenAPIV31SpecValidator)


def test_has_the_paths_of_the_server(server):
    status, _, error = send(server, "get", "/none")
    assert status == 404
    served = set(error["error"].removeprefix("unknown path; the paths are ").split(", "))
    assert served == {re.sub(r"{\w+}", "*", path) for path in DOCUMENT["paths"]}


@pytest.mark.parametrize("path", DOCUMENT["paths"])
def test_a_path_has_the_methods_of_the_server(server, path):
    target, _, _ = example_of(path, next(iter(DOCUMENT["paths"][path])))
    status, headers, error = send(server, "delete", target)
    assert status == 405
    check(schema_of(DOCUMENT["components"]["responses"]["Error"]), error)
    declared = {method.upper() for method in DOCUMENT["paths"][path]}
    assert set(headers["Allow"].split(", ")) == declared | ({"HEAD"} if "GET" in declared else set())


@pytest.mark.parametrize("path, method", OPERATIONS)
def test_an_answer_is_as_declared(server, path, method):
    answers = DOCUMENT["paths"][path][method]["responses"]
    target, body, schema = example_of(path, method)
    if schema:
        check(schema, body)
    texts = {"KEY": REGION.name, "HANDLE": base64.b64encode(f"/{REGION.name}".encode().ljust(64, b"\0")).decode()}
    if "CACHE" in json.dumps(body):
        texts["CACHE"] = make_cache(server)
    text = json.dumps(body)
    for name, value in texts.items():
        text = text.replace(name, value)
    if "sharedmemory" in path:
        prepare_regions(server, path, texts["HANDLE"])
    status, headers, answer = send(server, method, target, json.loads(text))
    assert str(status) in answers, answer
    assert headers["Content-Type"] == "application/json"
    check(schema_of(answers[str(status)]), answer)
    assert answer != [] and (answer != {} or "Nothing" in json.dumps(answers)), "the example shows nothing"


def prepare_regions(server, path, handle):
    """Registers the example of a path that needs one."""
    messages = {"system": {"key": f"/{REGION.name}"}, "cuda": {"raw_handle": {"b64": handle}, "device_id": 0}}
    for kind in messages:
        assert send(server, "post", f"/v2/{kind}sharedmemory/unregister")[0] == 200
    for kind, message in messages.items():
        if f"/{kind}shared" in path and not path.endswith("/register"):
            register = f"/v2/{kind}sharedmemory/region/example/register"
            assert send(server, "post", register, {"byte_size": 64, **message})[0] == 200


def make_cache(server):
    """A cache of the example's form with one token."""
    _, create, _ = example_of("/rapt/v1/caches", "post")
    status, _, cache = send(server, "post", "/rapt/v1/caches", {**create, "name": ""})
    assert status == 200, cache
    _, append, _ = example_of("/rapt/v1/caches/append", "post")
    part = {**append["parts"][0], "cache": cache["id"]}
    assert send(server, "post", "/rapt/v1/caches/append", {"parts": [part]})[0] == 200
    return cache["id"]


@pytest.mark.parametrize("path, method", [o for o in OPERATIONS if "requestBody" in DOCUMENT["paths"][o[0]][o[1]]])
def test_an_error_is_as_declared(server, path, method):
    status, _, error = send(server, method, example_of(path, method)[0], ["no", "object"])
    assert status == 400
    check(schema_of(DOCUMENT["paths"][path][method]["responses"]["default"]), error)


@pytest.mark.parametrize("path, method", [o for o in OPERATIONS if "requestBody" in DOCUMENT["paths"][o[0]][o[1]]])
def test_a_body_is_required_as_declared(server, path, method):
    status, _, _ = send(server, method, example_of(path, method)[0])
    assert (status >= 400) == DOCUMENT["paths"][path][method]["requestBody"]["required"]


def test_is_served(server):
    assert send(server, "get", "/openapi.json")[2] == DOCUMENT
