"""Exact attention in process, for NumPy, PyTorch on the CPU and every library with DLPack.

    import numpy as np
    import rapt

    x = np.random.default_rng(0).standard_normal((1, 8, 128, 64), np.float32)  # [B, H, S, D]
    y = rapt.attention(x, x, x, causal=True)

docs/python.md is the guide.
"""

from . import capi as _capi
from ._attention import AttendResult, Options, attend, attend_backward, attention, merge
from ._operators import LinearResult, LshResult, linear_attention, lsh_attention
from ._plot import Figure, plot
from ._run import get_num_threads, set_num_threads

__version__ = _capi.version()

__all__ = [
    "AttendResult",
    "Figure",
    "LinearResult",
    "LshResult",
    "Options",
    "attend",
    "attend_backward",
    "attention",
    "get_num_threads",
    "linear_attention",
    "lsh_attention",
    "merge",
    "plot",
    "set_num_threads",
]
