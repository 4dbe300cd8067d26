import pathlib
import sys

import pytest
import tritonclient.grpc as triton
from rapt_server import RaptServer

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "client/examples"))  # make_layers


@pytest.fixture(scope="session")
def server():
    with RaptServer() as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


@pytest.fixture(scope="session", params=["cpu", "reference"])
def backend_client(request):
    with RaptServer(f"--backend={request.param}") as running:
        with triton.InferenceServerClient(running.grpc_address) as connected:
            yield connected
