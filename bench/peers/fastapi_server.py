"""The Open Inference Protocol over HTTP with FastAPI, uvicorn and PyTorch: a simple hand-written service.

    python bench/peers/fastapi_server.py --threads 2     # prints its address when it is ready

Tensors are binary data, as tritonclient.http sends them. Without avoidable overhead: uvicorn runs on uvloop and
httptools, tensors are read in place, and threads handle requests while PyTorch computes without the GIL.
"""

import argparse
import json
import socket
import warnings

import fastapi
import torch
import uvicorn
from fastapi.concurrency import run_in_threadpool
from torch_attention import attend, from_bytes, to_bytes

warnings.filterwarnings("ignore", message="The given buffer is not writable")

JSON_LENGTH = "Inference-Header-Content-Length"
app = fastapi.FastAPI()


@app.get("/v2/health/live")
def live():
    return {}


@app.get("/v2")
def metadata():
    return {"name": "FastAPI", "version": fastapi.__version__}


def compute(body, json_bytes):
    view = memoryview(body)
    inputs, end = json.loads(bytes(view[:json_bytes]))["inputs"], json_bytes
    tensors = []
    for tensor in inputs:
        begin, end = end, end + tensor["parameters"]["binary_data_size"]
        tensors.append(from_bytes(view[begin:end], tensor["datatype"], tensor["shape"]))
    y = to_bytes(attend(*tensors))
    output = {"name": "Y", "datatype": inputs[0]["datatype"], "shape": inputs[0]["shape"]}
    output["parameters"] = {"binary_data_size": len(y)}
    head = json.dumps({"model_name": "attention", "outputs": [output]}).encode()
    return head, y


@app.post("/v2/models/attention/infer")
async def infer(request: fastapi.Request):
    head, y = await run_in_threadpool(compute, await request.body(), int(request.headers[JSON_LENGTH]))
    return fastapi.Response(head + y, media_type="application/octet-stream", headers={JSON_LENGTH: str(len(head))})


class Announcing(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print("ready http={}:{}".format(*sockets[0].getsockname()), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True, help="threads with which PyTorch computes one request")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools")
    Announcing(config).run([listening])


if __name__ == "__main__":
    main()
