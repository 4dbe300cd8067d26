"""Exact attention in process, for NumPy, PyTorch on the CPU and every library with DLPack.

    import numpy as np
    import rapt

    x = np.random.default_rng(0).standard_normal((1, 8, 128, 64), np.float32)  # [B, H, S, D]
    y = rapt.attention(x, x, x, causal=True)

rapt.Client and rapt.AsyncClient call a server; they do not need the library librapt_attention.so, which the functions do.
docs/python.md is the guide.
"""

import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

# rapt.v1 is the package of modules that protoc generates from proto/rapt/v1, in other folders of sys.path.
__path__ = pkgutil.extend_path(__path__, __name__)

from ._attention import AttendResult, Options, attend, attend_backward, attention, merge
from ._operators import (
    LinearOptions,
    LinearResult,
    LshOptions,
    LshResult,
    PositionalOptions,
    RotaryOptions,
    linear_attention,
    lsh_attention,
    positional_encoding,
    rotary_embedding,
)
from ._plot import Figure, plot
from ._run import get_num_threads, set_num_threads
from ._version import VERSION as __version__

if TYPE_CHECKING:
    from . import errors
    from ._async_client import AsyncCache, AsyncClient
    from ._caches import Cache, CacheItem, StepOptions, StepResult
    from ._client import Client
    from ._http import Retry
    from ._reports import LayerShape

# Modules of the clients and of PyTorch, which take most of the time of an import, by what they define.
_LATER = {
    "AsyncCache": "_async_client",
    "AsyncClient": "_async_client",
    "Cache": "_caches",
    "CacheItem": "_caches",
    "Client": "_client",
    "LayerShape": "_reports",
    "Retry": "_http",
    "StepOptions": "_caches",
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
    "PositionalOptions",
    "Retry",
    "RotaryOptions",
    "StepOptions",
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
    "positional_encoding",
    "rotary_embedding",
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
