"""The computation of every peer: PyTorch's scaled_dot_product_attention over raw bytes."""

import torch

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP64": torch.float64}

torch.set_grad_enabled(False)


def attend(q, k, v):
    """Takes tensors [B, Hq, Sq, D], [B, Hkv, Sk, D] and [B, Hkv, Sk, D]."""
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def from_bytes(data, datatype, shape):
    """Without a copy; the tensor is only read."""
    return torch.frombuffer(bytearray(data) if not data else data, dtype=DTYPES[datatype]).view(*shape)


def to_bytes(tensor):
    """One copy for every type; NumPy has no bfloat16."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
