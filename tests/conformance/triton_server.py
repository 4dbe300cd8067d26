"""PyTriton's server with a model `attention` of Q, K, V, Y and lse, and with the same as a decoupled one, `streamed`.

    build/python-pytriton/bin/python tests/conformance/triton_server.py PORT

prints "ready" on gRPC's port, which HTTP's and that of metrics follow."""

import signal
import sys
import threading

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def attend(Q, K, V):
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    return {"Y": weights / total @ V, "lse": (most + np.log(total))[..., 0]}


def infer(requests):
    return [attend(**request.data) for request in requests]


def stream(requests):
    yield infer(requests)


def main():
    port = int(sys.argv[1])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    local = {"grpc_address": "127.0.0.1", "http_address": "127.0.0.1"}
    with Triton(config=TritonConfig(**local, grpc_port=port, http_port=port + 1, metrics_port=port + 2)) as triton:
        for name, function in (("attention", infer), ("streamed", stream)):
            triton.bind(
                model_name=name,
                infer_func=function,
                inputs=[Tensor(name=n, dtype=np.float32, shape=(-1,) * 4) for n in "QKV"],
                outputs=[Tensor(name=n, dtype=np.float32, shape=(-1,) * rank) for n, rank in (("Y", 4), ("lse", 3))],
                config=ModelConfig(batching=False, decoupled=function is stream),
            )
        triton.run()
        print("ready", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
