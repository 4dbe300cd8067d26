"""Exact attention in process, for NumPy, PyTorch on the CPU and every library with DLPack.

    import numpy as np
    import rapt

    x = np.random.default_rng(0).standard_normal((1, 8, 128, 64), np.float32)  # [B, H, S, D]
    y = rapt.attention(x, x, x, causal=True)

rapt.Client and rapt.AsyncClient call a server. docs/python.md is the guide.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from . import capi as _capi
from ._attention import AttendResult, Options, attend, attend_backward, attention, merge
from ._operators import LinearOptions, LinearResult, LshOptions, LshResult, linear_attention, lsh_attention
from ._plot import Figure, plot
from ._run import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from . import errors
    from ._async_client import AsyncCache, AsyncClient
    from ._caches import Cache, CacheItem, StepResult
    from ._client import Client
    from ._http import Retry
    from ._reports import LayerShape

__version__ = _capi.version()

# Modules of the clients and of PyTorch, which take most of the time of an import, by what they define.
_LATER = {
    "AsyncCache": "_async_client",
    "AsyncClient": "_async_client",
    "Cache": "_caches",
    "CacheItem": "_caches",
    "Client": "_client",
    "LayerShape": "_reports",
    "Retry": "_http",
    "StepResult": "_caches",
    "errors": "errors",
    "torch": "torch",
}

__all__ = [
    "AsyncCache",
    "AsyncClient",
    "AttendResult",
    "Cache",
    "CacheItem",
    "Client",
    "Figure",
    "LayerShape",
    "LinearOptions",
    "LinearResult",
    "LshOptions",
    "LshResult",
    "Options",
    "Retry",
    "StepResult",
    "attend",
    "attend_backward",
    "attention",
    "errors",
    "get_num_threads",
    "linear_attention",
    "lsh_attention",
    "merge",
    "plot",
    "set_num_threads",
]


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'rapt' has no attribute {name!r}")
    if name == "torch" and not _has_torch():
        raise AttributeError("rapt.torch needs PyTorch, which is not installed")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    found = globals()[name] = module if name == _LATER[name] else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__, *(["torch"] if _has_torch() else [])])
