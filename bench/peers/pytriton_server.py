"""NVIDIA's PyTriton around PyTorch.

    RAPT_TORCH_SITE=build/python-torch/lib/python3.11/site-packages \\
      build/python-pytriton/bin/python bench/peers/pytriton_server.py --threads 2 --port 8101

prints its address when it is ready.

Batching is off, because a request already is a batch. PyTriton passes tensors as NumPy arrays, which do not
support bfloat16, so this peer does not either.
"""

import argparse
import os
import signal
import sys
import threading

import numpy

sys.path.append(os.environ["RAPT_TORCH_SITE"])  # PyTorch only; the other packages are in this environment
import torch  # noqa: E402
from pytriton.model_config import ModelConfig, Tensor  # noqa: E402
from pytriton.triton import Triton, TritonConfig  # noqa: E402
from torch_attention import attend  # noqa: E402


def infer(requests):
    return [
        {"Y": attend(*(torch.from_numpy(request.data[name]) for name in "QKV")).numpy()}
        for request in requests
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True, help="threads with which PyTorch computes one request")
    parser.add_argument("--port", type=int, required=True, help="gRPC port; the next two are used as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    config = TritonConfig(
        grpc_address="127.0.0.1",
        grpc_port=options.port,
        http_port=options.port + 1,
        metrics_port=options.port + 2,
        log_verbose=0,
    )
    tensor = {"dtype": numpy.float32, "shape": (-1, -1, -1, -1)}
    with Triton(config=config) as triton:
        triton.bind(
            model_name="attention",
            infer_func=infer,
            inputs=[Tensor(name=name, **tensor) for name in "QKV"],
            outputs=[Tensor(name="Y", **tensor)],
            config=ModelConfig(batching=False),
        )
        triton.run()
        print(f"ready grpc=127.0.0.1:{options.port}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
