"""rapt for PyTorch: scaled_dot_product_attention as a custom operator, with gradients and torch.compile, and an attention
implementation for transformers.

    import rapt.torch

    y = rapt.torch.scaled_dot_product_attention(q, k, v, is_causal=True)

    rapt.torch.register_transformers()
    model = AutoModel.from_pretrained(..., attn_implementation="rapt")
"""

from ._operators import scaled_dot_product_attention
from ._transformers import register_transformers

__all__ = ["register_transformers", "scaled_dot_product_attention"]
