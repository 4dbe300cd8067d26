"""rapt for PyTorch: attention as a custom operator, with gradients and torch.compile, and an attention implementation for
transformers.

    import rapt.torch

    y = rapt.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = rapt.torch.attention(q, k, v, causal=True, window=(255, None), head_sink=sinks)

    rapt.torch.register_transformers()
    model = AutoModel.from_pretrained(..., attn_implementation="rapt")
"""

from ._operators import attention, scaled_dot_product_attention
from ._transformers import register_transformers

__all__ = ["attention", "register_transformers", "scaled_dot_product_attention"]
