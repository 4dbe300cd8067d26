"""Writes openapi.json: what rapt-server serves over HTTP, in OpenAPI 3.1.

    python3 proto/openapi.py --write     # needs protoc and the package protobuf
    python3 proto/openapi.py --check     # fails if the file is not up to date

The messages come from the protos, with their comments. The paths, with an example of each request, are listed below; a test
sends the examples to a server and compares the paths with the server's.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2

PROTO = pathlib.Path(__file__).resolve().parent
FILE = PROTO / "openapi.json"
SOURCES = ("inference/grpc_service.proto", "inference/model_config.proto", "rapt/v1/attention.proto", "rapt/v1/cache.proto")

Field = descriptor_pb2.FieldDescriptorProto


# --- Messages -------------------------------------------------------------------------------------


class Messages:
    """The messages and enums of the protos, by full name, with the comments of their fields."""

    def __init__(self):
        self.messages, self.enums, self.comments = {}, {}, {}
        with tempfile.NamedTemporaryFile() as out:
            command = ["protoc", f"-I{PROTO}", f"--descriptor_set_out={out.name}", "--include_source_info", *SOURCES]
            subprocess.run(command, check=True)
            files = descriptor_pb2.FileDescriptorSet.FromString(out.read()).file
        for file in files:
            texts = {tuple(l.path): (l.leading_comments + " " + l.trailing_comments) for l in file.source_code_info.location}
            self._add(f".{file.package}", file.message_type, file.enum_type, (), texts, 4, 5)

    def _add(self, prefix, messages, enums, path, texts, of_messages, of_enums):
        for n, enum in enumerate(enums):
            self.enums[f"{prefix}.{enum.name}"] = enum
        for n, message in enumerate(messages):
            name, place = f"{prefix}.{message.name}", (*path, of_messages, n)
            self.messages[name] = message
            for k, _ in enumerate(message.field):
                self.comments[name, k] = " ".join(texts.get((*place, 2, k), "").split())
            self._add(name, message.nested_type, message.enum_type, place, texts, 3, 4)


class Schemas:
    """Schemas of messages: those of rapt.v1 in Protocol Buffers' JSON, the others as Triton writes them."""

    def __init__(self):
        self._protos = Messages()
        self.all = {}

    def of(self, name):
        """The reference to a message's schema."""
        key = name.removeprefix(".").removeprefix("rapt.v1.").removeprefix("inference.")
        if key not in self.all:
            self.all[key] = None  # a message may contain itself
            self.all[key] = self._message(name)
        return {"$ref": f"#/components/schemas/{key}"}

    def _message(self, name):
        if name == ".rapt.v1.Tensor":
            return TENSOR
        is_native = name.startswith(".rapt.v1.")
        properties = {}
        for n, field in enumerate(self._protos.messages[name].field):
            schema = self._value(field, is_native)
            if field.label == Field.LABEL_REPEATED and "additionalProperties" not in schema:
                schema = {"type": "array", "items": schema}
            if comment := self._protos.comments[name, n]:
                schema = {"description": comment, **schema}
            properties[field.json_name if is_native else field.name] = schema
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def _value(self, field, is_native):
        if field.type == Field.TYPE_MESSAGE:
            message = self._protos.messages[field.type_name]
            if not message.options.map_entry:
                return self.of(field.type_name)
            return {"type": "object", "additionalProperties": self._value(message.field[1], is_native)}
        if field.type == Field.TYPE_ENUM:
            return {"type": "string", "enum": [value.name for value in self._protos.enums[field.type_name].value]}
        if field.type in (Field.TYPE_INT64, Field.TYPE_UINT64):
            return {"type": ["string", "integer"] if is_native else "integer", "format": "int64"}
        if field.type in (Field.TYPE_INT32, Field.TYPE_UINT32):
            return {"type": "integer", "format": "int32"}
        if field.type in (Field.TYPE_DOUBLE, Field.TYPE_FLOAT):
            return {"oneOf": [{"type": "number"}, NOT_FINITE]}
        if field.type == Field.TYPE_BOOL:
            return {"type": "boolean"}
        return {"type": "string", **({"contentEncoding": "base64"} if field.type == Field.TYPE_BYTES else {})}


NOT_FINITE = {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}
DATATYPE = {"type": "string", "enum": ["FP32", "FP16", "BF16", "FP64", "BOOL", "INT64", "INT32"]}
SHAPE = {"type": "array", "items": {"type": "integer", "format": "int64"}}
NUMBERS = {
    "description": "Numbers in row-major order, in arrays of any nesting. Not finite: \"NaN\", \"Infinity\", \"-Infinity\".",
    "type": "array",
    "items": {"type": ["number", "boolean", "string", "array"]},
}
PARAMETERS = {"type": "object", "additionalProperties": {"type": ["boolean", "number", "string"]}}

TENSOR = {
    "description": "A tensor. With numbers in data it may have the fields of an input of /v2 instead: datatype, and a name, "
    "which means nothing.",
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "dtype": {"type": "string", "description": "FP32, FP16, BF16, FP64, BOOL, INT8, UINT8, INT32 or INT64"},
        "datatype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": ["string", "integer"], "format": "int64"}},
        "data": {
            "oneOf": [
                {"type": "string", "contentEncoding": "base64", "description": "Row-major, little endian. So in answers."},
                NUMBERS,
            ]
        },
        "sharedMemory": {"$ref": "#/components/schemas/SharedMemory"},
    },
    "additionalProperties": False,
}

OIP_TENSOR = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "shape": SHAPE, "datatype": DATATYPE, "parameters": PARAMETERS, "data": NUMBERS},
    "required": ["name", "shape", "datatype"],
}

HAND_WRITTEN = {
    "Error": {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
        "additionalProperties": False,
    },
    "Nothing": {"type": "object", "additionalProperties": False},
    "InferInput": {
        "description": "Has data, or the parameter binary_data_size, or a place in shared memory: parameters "
        "shared_memory_region, shared_memory_offset, shared_memory_byte_size.",
        **OIP_TENSOR,
    },
    "InferRequest": {
        "description": "Other properties mean nothing, also of inputs and outputs; clients add some.",
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "parameters": {
                "description": "Attributes under their ONNX names, priority, timeout in microseconds, sequence_id, "
                "sequence_start, sequence_end, binary_data_output.",
                **PARAMETERS,
            },
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/InferInput"}},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "parameters": PARAMETERS},
                    "required": ["name"],
                },
            },
        },
        "required": ["inputs"],
    },
    "InferOutput": {**OIP_TENSOR, "additionalProperties": False},
    "InferResponse": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/InferOutput"}},
        },
        "required": ["model_name", "model_version", "outputs"],
        "additionalProperties": False,
    },
    "RepositoryIndexRequest": {
        "type": "object",
        "properties": {"ready": {"type": "boolean", "description": "Only models that are ready."}},
    },
    "SystemRegion": {
        "type": "object",
        "properties": {
            "key": {"type": "string", "description": "The name of the POSIX shared memory object."},
            "offset": {"type": "integer", "format": "int64"},
            "byte_size": {"type": "integer", "format": "int64"},
        },
        "required": ["key", "byte_size"],
    },
    "CudaRegion": {
        "type": "object",
        "properties": {
            "raw_handle": {"type": "object", "properties": {"b64": {"type": "string", "contentEncoding": "base64"}}},
            "device_id": {"type": "integer"},
            "byte_size": {"type": "integer", "format": "int64"},
        },
        "required": ["raw_handle", "device_id", "byte_size"],
    },
}


# --- Paths ----------------------------------------------------------------------------------------

# The names in paths, with examples. The test replaces the examples in capitals.
IN_PATHS = {"model": "attention", "layer": "torch_block", "version": "1", "region": "example"}

TOKENS = [
    {"name": "Q", "datatype": "FP32", "shape": [1, 1, 1, 2], "data": [1, 0]},
    {"name": "K", "datatype": "FP32", "shape": [1, 1, 2, 2], "data": [[1, 0], [1, 0]]},
    {"name": "V", "datatype": "FP32", "shape": [1, 1, 2, 2], "data": [[1, 2], [3, "NaN"]]},
]
INFER = {"inputs": TOKENS, "outputs": [{"name": "Y"}, {"name": "lse"}], "parameters": {"is_causal": True}}
QKV = {tensor["name"].lower(): tensor for tensor in TOKENS}
ROW = {"datatype": "FP32", "shape": [1, 1, 4], "data": [1, 2, 3, 4]}
IDS = {"caches": ["CACHE"]}


class Paths:
    def __init__(self, schemas):
        self.all = {}
        self._schemas = schemas

    def _schema(self, name):
        if name.startswith("."):
            return self._schemas.of(name)
        return {"$ref": f"#/components/schemas/{name}"}

    def add(self, method, paths, summary, answer, request=None, example=None, *, query=(), is_public=False, is_native=False):
        """`answer` and `request` name schemas: one of a proto begins with a dot; "[...]" is an array."""
        for path in paths.split():
            operation = {"summary": summary, "operationId": self._id(method, path)}
            parameters = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": IN_PATHS[name]}
                for name in re.findall(r"{(\w+)}", path)
            ]
            parameters += [{"name": n, "in": "query", "schema": schema, "example": e} for n, schema, e in query]
            if request and "infer" in path:
                parameters.append(
                    {
                        "name": "Inference-Header-Content-Length",
                        "in": "header",
                        "description": "The bytes of JSON in a body with binary data after it.",
                        "schema": {"type": "integer"},
                    }
                )
            if parameters:
                operation["parameters"] = parameters
            if request:
                content = {"application/json": {"schema": self._schema(request), "example": example}}
                if "infer" in path:
                    content["application/octet-stream"] = {}
                if is_native:
                    content["application/x-protobuf"] = {}
                operation["requestBody"] = {"content": content, "required": path != "/v2/repository/index"}
            schema = self._schema(answer.strip("[]"))
            if answer.startswith("["):
                schema = {"type": "array", "items": schema}
            content = {"application/json": {"schema": schema}}
            if "infer" in path:
                content["application/octet-stream"] = {}
            if is_native:
                content["application/x-protobuf"] = {}
            responses = {"200": {"description": "Success", "content": content}}
            responses["default"] = {"$ref": "#/components/responses/Error"}
            operation["responses"] = responses
            if is_public:
                operation["security"] = []
            self.all.setdefault(path, {})[method] = operation

    def _id(self, method, path):
        words = re.findall(r"\w+", path)
        return method + "".join(word[0].upper() + word[1:] for word in words)


def add_v2(paths):
    add = paths.add
    add("get", "/v2", "Name, version and extensions of the server", ".inference.ServerMetadataResponse")
    add("get", "/v2/health/live", "Whether the process runs", ".inference.ServerLiveResponse", is_public=True)
    add("get", "/v2/health/ready", "Whether the server computes and accepts calls", ".inference.ServerReadyResponse", is_public=True)
    model = "/v2/models/{model} /v2/models/{model}/versions/{version}"

    def of_model(suffix):
        return " ".join(path + suffix for path in model.split())

    add("get", model, "Inputs and outputs of a model", ".inference.ModelMetadataResponse")
    add("get", of_model("/config"), "A model's configuration, in Triton's form", ".inference.ModelConfig")
    add("get", of_model("/ready"), "Whether a model is ready", ".inference.ModelReadyResponse")
    add("get", "/v2/models/stats " + of_model("/stats"), "Statistics of calls, also over gRPC", ".inference.ModelStatisticsResponse")
    add("post", of_model("/infer"), "Inference", "InferResponse", "InferRequest", INFER)
    add("post", "/v2/repository/index", "The models", "[.inference.RepositoryIndexResponse.ModelIndex]", "RepositoryIndexRequest", {"ready": True})
    layer = "/v2/repository/models/{layer}"
    add("post", f"{layer}/load", "Loads a layer of --model_repository, or replaces it", "Nothing")
    add("post", f"{layer}/unload", "Unloads a layer", "Nothing")
    system, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    add("post", f"{system}/region/{{region}}/register", "Registers a region of shared memory", "Nothing", "SystemRegion",
        {"key": "/KEY", "offset": 0, "byte_size": 64})  # fmt: skip
    add("post", f"{cuda}/region/{{region}}/register", "Registers a region of a GPU's memory", "Nothing", "CudaRegion",
        {"raw_handle": {"b64": "HANDLE"}, "device_id": 0, "byte_size": 64})  # fmt: skip
    for kind, status in ((system, "System"), (cuda, "Cuda")):
        add("get", f"{kind}/status {kind}/region/{{region}}/status", "Registered regions",
            f"[.inference.{status}SharedMemoryStatusResponse.RegionStatus]")  # fmt: skip
        add("post", f"{kind}/region/{{region}}/unregister", "Removes a region", "Nothing")
        add("post", f"{kind}/unregister", "Removes all regions", "Nothing")
    for method in ("get", "post"):
        add(method, "/v2/trace/setting /v2/models/{model}/trace/setting", "There are no settings of traces", "Nothing")
        add(method, "/v2/logging", "There are no settings of the log", "Nothing")


def add_rapt(paths):
    def add(method, name, summary, answer, request=None, example=None, **more):
        request = request and f".rapt.v1.{request}"
        paths.add(method, f"/rapt/v1/{name}", summary, f".rapt.v1.{answer}", request, example, is_native=True, **more)

    add("get", "server", "Version, backends, limits", "GetServerInfoResponse")
    add("post", "attend", "Attention", "AttendResponse", "AttendRequest", {**QKV, "attention": {"causal": True}, "wantLse": True})
    add("post", "attend-backward", "Gradients of attention", "AttendBackwardResponse", "AttendBackwardRequest",
        {"call": QKV, "dy": QKV["q"]})  # fmt: skip
    add("post", "linear-attend", "Linear attention", "LinearAttendResponse", "LinearAttendRequest",
        {"query": ROW, "key": ROW, "value": ROW, "qNumHeads": 1, "kvNumHeads": 1, "updateRule": "UPDATE_LINEAR"})  # fmt: skip
    add("post", "lsh-attend", "Attention by locality-sensitive hashing", "LshAttendResponse", "LshAttendRequest",
        {"q": QKV["k"], "v": QKV["v"], "chunkLength": 4})  # fmt: skip
    add("post", "rotary-embed", "Rotary embedding of positions", "RotaryEmbedResponse", "RotaryEmbedRequest",
        {"x": QKV["q"], "ropeTheta": 10000})  # fmt: skip
    add("post", "encode-positions", "Positional encoding", "EncodePositionsResponse", "EncodePositionsRequest", {"x": ROW})
    add("post", "diagnose", "Analyzes a call whose result looks wrong", "DiagnoseResponse", "DiagnoseRequest", {"call": QKV})
    add("post", "estimate-memory", "The memory that attention takes", "EstimateMemoryResponse", "EstimateMemoryRequest",
        {"batch": 1, "queryHeads": 8, "lengths": [1024, 4096]})  # fmt: skip
    text = {"type": "string"}
    add("get", "caches", "The caller's caches, in pages", "Caches",
        query=(("pageSize", {"type": "integer"}, 100), ("pageToken", text, ""), ("namePrefix", text, "chat-")))  # fmt: skip
    add("post", "caches", "Makes a cache", "Cache", "CreateRequest",
        {"name": "chat-1", "shapes": [{"layers": 1, "kvHeads": 1, "headSize": 4}], "dtype": "FP32"})  # fmt: skip
    add("post", "caches/append", "Appends keys and values", "AppendResponse", "AppendRequest",
        {"parts": [{"cache": "CACHE", "at": 0, "generation": 1, "k": ROW, "v": ROW}]})  # fmt: skip
    add("post", "caches/attend", "Appends, and attends to a cache", "AttendCachedResponse", "AttendCachedRequest",
        {"items": [{"cache": "CACHE", "rows": 1, "newTokens": 1, "at": 1, "generation": 1}], "q": ROW, "k": ROW, "v": ROW})  # fmt: skip
    add("post", "caches/diagnose", "Analyzes a step whose result looks wrong", "DiagnoseResponse", "AttendCachedRequest",
        {"items": [{"cache": "CACHE", "rows": 1, "generation": 1}], "q": ROW})  # fmt: skip
    add("post", "caches/fork", "Makes a cache with the first tokens of another", "Cache", "ForkRequest",
        {"cache": "CACHE", "length": 1, "generation": 1})  # fmt: skip
    add("post", "caches/get", "What caches are", "Caches", "Ids", IDS)
    add("post", "caches/renew", "Renews the leases of caches", "Caches", "Ids", IDS)
    add("post", "caches/truncate", "Keeps the first tokens", "Cache", "TruncateRequest", {"cache": "CACHE", "length": 1, "generation": 1})
    add("post", "caches/update", "Forks, truncates and ends caches", "UpdateResponse", "UpdateRequest",
        {"forks": [{"cache": "CACHE", "length": 1, "generation": 1, "name": "beam-2"}], "closes": ["CACHE"]})  # fmt: skip
    add("post", "caches/close", "Ends caches", "Caches", "Ids", IDS)


def document():
    schemas = Schemas()
    paths = Paths(schemas)
    add_v2(paths)
    add_rapt(paths)
    paths.all["/openapi.json"] = {
        "get": {
            "summary": "This document",
            "operationId": "getOpenapi",
            "responses": {"200": {"description": "Success", "content": {"application/json": {"schema": {"type": "object"}}}}},
            "security": [],
        }
    }
    version = re.search(r"project\(rapt VERSION ([\d.]+)", (PROTO.parent / "CMakeLists.txt").read_text())[1]
    schemas.of(".rapt.v1.SharedMemory")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rapt",
            "summary": "Attention as a service",
            "description": "The Open Inference Protocol (/v2), and rapt.v1 in Protocol Buffers' JSON (/rapt/v1): names in "
            "camelCase, 64-bit integers as strings. docs/rest.md describes limits, deadlines and connections.",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:8000"}],
        "security": [{}, {"token": []}],
        "paths": paths.all,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Error": {
                    "description": "Why the request failed",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
            "schemas": dict(sorted({**HAND_WRITTEN, **schemas.all}.items())),
        },
    }


def main():
    text = json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text)
    elif sys.argv[1:] != ["--check"]:
        sys.exit(__doc__)
    elif FILE.read_text() != text:
        sys.exit("proto/openapi.json is not up to date: python3 proto/openapi.py --write")


if __name__ == "__main__":
    main()
