"""Triton's client, grpcurl and `rapt` with TLS and tokens; files are created as in docs/security.md."""

import hashlib
import json
import os
import pathlib
import socket
import ssl
import subprocess
import time

import numpy as np
import pytest
import tritonclient.grpc as triton
from rapt_server import RaptServer

CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
TOKEN = "a-token-that-is-known"
ROOT = pathlib.Path(__file__).resolve().parents[2]


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    openssl(folder, "req", "-x509", *CURVE, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    for name in ("server", "alice"):
        openssl(folder, "req", *CURVE, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (folder / "names").write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1")
        openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-extfile", "names", "-out", f"{name}.crt",
        )  # fmt: skip
    (folder / "tokens").write_text(f"alice {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    (folder / "alice.token").write_text(f"{TOKEN}\n")
    (folder / "wrong.token").write_text("a-token-that-nobody-has\n")
    return folder


@pytest.fixture(scope="module")
def server(files):
    flags = ("cert=server.crt", "key=server.key", "client_ca=ca.crt")
    with RaptServer(*(f"--tls_{f.replace('=', f'={files}/')}" for f in flags), f"--token_file={files}/tokens") as running:
        yield running


def infer(server, files, token):
    with triton.InferenceServerClient(
        server.grpc_address,
        ssl=True,
        root_certificates=str(files / "ca.crt"),
        certificate_chain=str(files / "alice.crt"),
        private_key=str(files / "alice.key"),
    ) as client:
        inputs = [triton.InferInput(name, [1, 1, 2, 4], "FP32") for name in "QKV"]
        for tensor in inputs:
            tensor.set_data_from_numpy(np.ones((1, 1, 2, 4), "f4"))
        return client.infer("attention", inputs, headers={"authorization": f"Bearer {token}"}).as_numpy("Y")


def test_tritons_client_sends_its_certificate_and_token(server, files):
    np.testing.assert_allclose(infer(server, files, TOKEN), np.ones((1, 1, 2, 4)), atol=1e-6)
    with pytest.raises(triton.InferenceServerException, match="UNAUTHENTICATED"):
        infer(server, files, "wrong")


def test_grpcurl_sends_its_certificate_and_token(server, files):
    command = [os.environ["RAPT_TOOLS"] + "/grpcurl", "-cacert=ca.crt", "-cert=alice.crt", "-key=alice.key"]
    for token, code in ((TOKEN, 0), ("wrong", 64 + 16)):
        ran = subprocess.run(
            [*command, "-H", f"authorization: Bearer {token}", server.grpc_address, "inference.GRPCInferenceService/ServerLive"],
            cwd=files, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == code, ran
        assert ('"live": true' in ran.stdout) == (code == 0), ran


TLS = ("--tls-ca=ca.crt", "--tls-cert=alice.crt", "--tls-key=alice.key")


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("demo", *TLS, "--token-file=alice.token"), 0, "cat"),
        (("info", *TLS, "--token-file=alice.token", "--tls-name=alice"), 3, "certificates that both sides trust"),
        (("info", *TLS, "--token-file=alice.token", "--tls-name=server"), 0, "rapt-server"),
        (("info", *TLS, "--token-file=wrong.token"), 1, "UNAUTHENTICATED"),
        (("info", *TLS), 1, "UNAUTHENTICATED"),
        (("health", *TLS), 0, "SERVING"),
        (("health", "--tls-ca=ca.crt"), 3, "certificates that both sides trust"),
        (("health",), 3, "speaks TLS"),
        (("info",), 3, "speaks TLS"),
        (("info", "--token-file=alice.token"), 2, "never sent in plain text"),
        (("info", *TLS, "--token-file=none"), 2, "none"),
        (("info", "--tls-ca=none"), 2, "none"),
        (("info", *TLS[:2]), 2, "must be set together"),
    ],
)
def test_the_command_line_reports_errors(server, files, arguments, code, message):
    ran = subprocess.run(
        [os.environ["RAPT"], *arguments, f"--address={server.grpc_address}"],
        cwd=files, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran
    assert message in ran.stdout + ran.stderr, ran
    assert TOKEN not in ran.stdout + ran.stderr


@pytest.mark.parametrize("command", ["health", "info"])
def test_tls_against_plain_text_is_told(files, command):
    with RaptServer() as plain:
        ran = subprocess.run(
            [os.environ["RAPT"], command, "--tls-ca=ca.crt", f"--address={plain.grpc_address}"],
            cwd=files, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert ran.returncode == 3, ran
    assert ran.stderr.count("\n") == 1 and "speaks plain text; leave out --tls" in ran.stderr, "nothing of gRPC's own"


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("--token-file=alice.token",), 0, "0 wrong"),
        (("--token-file=alice.token", "--protocol=oip"), 0, "0 wrong"),
        (("--token-file=wrong.token",), 1, "UNAUTHENTICATED"),
        (("--token-file=none",), 2, "none"),
        (("--token-file=alice.token", "--tls-name=alice"), 3, "over TLS"),
    ],
)
def test_the_load_tester_reports_errors(server, files, arguments, code, message):
    ran = subprocess.run(
        [os.environ["RAPT_LOAD"], *TLS, *arguments, f"--address={server.grpc_address}"]
        + ["--shape=1x1x4x8", "--connections=2", "-c", "2", "-d", "0.2", "--warmup", "0"],
        cwd=files, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran
    assert message in ran.stdout + ran.stderr, ran
    assert TOKEN not in ran.stdout + ran.stderr


def curl(files, server, *arguments, path="/v2"):
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", f"{files}/ca.crt", *arguments]
    return subprocess.run([*command, f"https://{server.http_address}{path}"], capture_output=True, text=True, check=False).stdout


def test_http_needs_a_certificate_and_a_token(files, server):
    certificate = ("--cert", f"{files}/alice.crt", "--key", f"{files}/alice.key")
    assert curl(files, server, *certificate, "-H", f"Authorization: Bearer {TOKEN}") == "200"
    assert curl(files, server, *certificate, "-H", "Authorization: Bearer another") == "401"
    assert curl(files, server, *certificate) == "401"
    assert curl(files, server, "-H", f"Authorization: Bearer {TOKEN}") == "000"


def test_over_http_only_what_openapi_says_needs_no_token(files, server):
    document = json.loads((ROOT / "proto" / "openapi.json").read_text())
    certificate = ("--cert", f"{files}/alice.crt", "--key", f"{files}/alice.key")
    public = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            sent = ("-X", method.upper(), "-d", "{}") if method == "post" else ()
            status = curl(files, server, *certificate, *sent, path=path.replace("{", "").replace("}", ""))
            assert status == ("200" if operation.get("security") == [] else "401"), (method, path, status)
            public |= {path} if status == "200" else set()
    assert public == {"/v2/health/live", "/v2/health/ready", "/openapi.json"}


def test_over_http_a_holder_of_a_token_is_one_caller(files):
    """A call that has begun counts for its token, and for no other one."""
    tokens = files / "two.tokens"
    tokens.write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in ("alice", "bob")))
    flags = (f"--tls_cert={files}/server.crt", f"--tls_key={files}/server.key", f"--token_file={tokens}")
    with RaptServer(*flags, "--max_calls_per_caller=1") as server:
        host, port = server.http_address.split(":")
        context = ssl.create_default_context(cafile=files / "ca.crt")
        with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname="server") as connection:
            head = "POST /v2/models/attention/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            connection.sendall(f"{head}Authorization: Bearer alice\r\n\r\n".encode())
            while server.read_gauge("rapt_open_calls") < 1:
                time.sleep(0.01)
            path, body = "/v2/models/attention/infer", ("-d", "{}")
            assert curl(files, server, *body, "-H", "Authorization: Bearer alice", path=path) == "429"
            assert curl(files, server, *body, "-H", "Authorization: Bearer bob", path=path) == "400"
