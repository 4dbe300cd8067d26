"""ModelInfer of the Open Inference Protocol with Python's grpcio and PyTorch: a simple hand-written service.

    python bench/peers/grpcio_server.py --threads 2     # prints its address when it is ready

Without avoidable overhead: tensors are read in place, several workers handle requests while PyTorch computes
without the GIL, and messages may have the protocol's maximum size.
"""

import argparse
import concurrent.futures
import warnings

import grpc
import torch
from torch_attention import attend, from_bytes, to_bytes
from tritonclient.grpc import service_pb2, service_pb2_grpc

warnings.filterwarnings("ignore", message="The given buffer is not writable")


class Attention(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerMetadata(self, request, context):
        return service_pb2.ServerMetadataResponse(name="grpcio", version=grpc.__version__)

    def ModelInfer(self, request, context):
        q, k, v = (
            from_bytes(data, tensor.datatype, tensor.shape)
            for tensor, data in zip(request.inputs, request.raw_input_contents)
        )
        first = request.inputs[0]
        y = service_pb2.ModelInferResponse.InferOutputTensor(
            name="Y", datatype=first.datatype, shape=first.shape
        )
        return service_pb2.ModelInferResponse(
            model_name="attention", outputs=[y], raw_output_contents=[to_bytes(attend(q, k, v))]
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True, help="threads with which PyTorch computes one request")
    parser.add_argument("--workers", type=int, default=4, help="threads that handle requests")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(options.workers),
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Attention(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
