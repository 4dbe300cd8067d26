"""The first call of docs/clients.md: attention over generated stubs. `first_call.py HOST:PORT` prints y."""

import sys

import grpc
import numpy as np
from rapt.v1 import attention_pb2, attention_pb2_grpc


def tensor(values):
    array = np.array(values, "<f4")
    return attention_pb2.Tensor(dtype="FP32", shape=array.shape, data=array.tobytes())


with grpc.insecure_channel(sys.argv[1], [("grpc.max_receive_message_length", 256 << 20)]) as channel:
    stub = attention_pb2_grpc.AttentionServiceStub(channel)
    q, k, v = tensor([[[[1, 0]]]]), tensor([[[[1, 0], [1, 0]]]]), tensor([[[[1, 2], [3, 4]]]])
    y = stub.Attend(attention_pb2.AttendRequest(q=q, k=k, v=v), timeout=10).y
print(list(y.shape), np.frombuffer(y.data, "<f4"))
