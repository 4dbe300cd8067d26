"""Arrays of NumPy, of PyTorch on the CPU, and of any library with DLPack, read and made without copies."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from . import capi

NAMES = {
    capi.FP32: "float32",
    capi.FP16: "float16",
    capi.BF16: "bfloat16",
    capi.FP64: "float64",
    capi.BOOL: "bool",
    capi.INT32: "int32",
    capi.INT64: "int64",
}
# What the library and the server call types.
DATATYPES = {
    capi.FP32: "FP32",
    capi.FP16: "FP16",
    capi.BF16: "BF16",
    capi.FP64: "FP64",
    capi.BOOL: "BOOL",
    capi.INT32: "INT32",
    capi.INT64: "INT64",
}
FLOATS = (capi.FP32, capi.FP16, capi.BF16, capi.FP64)
_SIZES = {capi.FP32: 4, capi.FP16: 2, capi.BF16: 2, capi.FP64: 8, capi.BOOL: 1, capi.INT32: 4, capi.INT64: 8}


class Array(Protocol):
    """A NumPy array, a PyTorch tensor or any other producer of DLPack."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


A = TypeVar("A", bound=Array)

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """What is known of an array without its numbers. `strides` count elements; None: row-major."""

    dtype: int
    shape: Shape
    strides: Shape | None


# An array's address and layout, and what has to live as long as the address is used, besides the array.
Reading = tuple[int, Layout, object]


def row_major(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_of(layout: Layout) -> Shape:
    return row_major(layout.shape) if layout.strides is None else layout.strides


@functools.lru_cache(1024)
def _extent(layout: Layout) -> tuple[int, int]:
    """Where an array's first byte is, and the one after its last, from its address on."""
    item = _SIZES[layout.dtype]
    if layout.strides is None or 0 in layout.shape:
        return 0, math.prod(layout.shape) * item
    steps = [(size - 1) * stride for size, stride in zip(layout.shape, layout.strides)]
    return sum(min(step, 0) for step in steps) * item, (sum(max(step, 0) for step in steps) + 1) * item


def bounds(address: int, layout: Layout) -> tuple[int, int]:
    """The first byte of an array, and the one after its last."""
    first, end = _extent(layout)
    return address + first, address + end


def _unknown_type(name: str, dtype: object) -> ValueError:
    return ValueError(f"{name} has type {dtype}; rapt computes in float32, float16, bfloat16 and float64")


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

# Where `data` is in the struct of NumPy's array interface, after 5 integers and the pointers to shape and strides.
_ADDRESS_IN_ARRAY_STRUCT = 40


class Numpy:
    """The kind of NumPy's arrays. bfloat16 is the type of ml_dtypes, which this module does not import."""

    _codes: dict[Any, int] = {np.dtype(name): code for code, name in NAMES.items() if code != capi.BF16}
    _types: dict[int, Any] = {code: dtype for dtype, code in _codes.items()}

    @classmethod
    def code(cls, name: str, dtype: np.dtype[Any]) -> int:
        code = cls._codes.get(dtype)
        if code is None:
            if dtype.name != "bfloat16":
                raise _unknown_type(name, dtype)
            code = cls._codes[dtype] = capi.BF16
        return code

    @classmethod
    def dtype(cls, code: int) -> Any:
        if code not in cls._types:
            import ml_dtypes

            cls._types[code] = np.dtype(ml_dtypes.bfloat16)
        return cls._types[code]

    @classmethod
    def read(cls, name: str, x: np.ndarray[Any, Any]) -> Reading:
        code = cls._codes.get(x.dtype) or cls.code(name, x.dtype)
        strides: Shape | None = None
        if not x.flags.c_contiguous:
            size = x.itemsize
            if any(stride % size for stride in x.strides):
                raise ValueError(f"{name} has strides {x.strides} in bytes; they must be multiples of {size}")
            strides = tuple(stride // size for stride in x.strides)
        return cls.address(x), Layout(code, x.shape, strides), None

    @staticmethod
    def address(x: np.ndarray[Any, Any]) -> int:
        # A fifth of the time of __array_interface__, which would be most of that of a tiny call.
        struct = x.__array_struct__
        return ctypes.c_void_p.from_address(_capsule_pointer(struct, None) + _ADDRESS_IN_ARRAY_STRUCT).value or 0

    @classmethod
    def empty(cls, like: Any, shape: Shape, code: int) -> Any:
        return np.empty(shape, cls.dtype(code))

    @classmethod
    def of_memory(cls, numbers: np.ndarray[Any, Any], code: int) -> Any:
        """An array in the memory of `numbers`, which have this type, or uint16 for bfloat16."""
        return numbers.view(cls.dtype(code))

    @staticmethod
    def check_writable(name: str, x: np.ndarray[Any, Any]) -> None:
        if not x.flags.writeable:
            raise ValueError(f"{name} is read-only")

    @staticmethod
    def finish(like: Any, result: Any) -> Any:
        return result


class Torch:
    """The kind of PyTorch's tensors, once the caller has imported PyTorch."""

    def __init__(self, torch: Any) -> None:
        self.tensor = torch.Tensor
        self._torch, self._strided = torch, torch.strided
        self._types = {code: getattr(torch, name) for code, name in NAMES.items()}
        self._codes = {dtype: code for code, dtype in self._types.items()}

    def read(self, name: str, x: Any) -> Reading:
        # The attributes that are read here are those that take PyTorch the least time.
        code = self._codes.get(x.dtype)
        if code is None or not x.is_cpu or x.layout is not self._strided or x.requires_grad or x.is_neg():
            self._check(name, x)
        return x.data_ptr(), Layout(code or 0, x.shape, None if x.is_contiguous() else x.stride()), None

    def _check(self, name: str, x: Any) -> None:
        if not x.is_cpu:
            raise ValueError(f"{name} is on {x.device}; rapt computes on the CPU: use {name}.cpu()")
        if x.layout is not self._strided:
            raise ValueError(f"{name} is {x.layout}; it must be strided: use {name}.to_dense()")
        if x.requires_grad and self._torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires a gradient, which this function would lose; use"
                " rapt.torch.scaled_dot_product_attention or torch.no_grad()"
            )
        if x.dtype not in self._codes:
            raise _unknown_type(name, x.dtype)
        if x.is_neg():
            raise ValueError(f"{name} is a negative view; use {name}.resolve_neg()")

    @staticmethod
    def address(x: Any) -> int:
        address: int = x.data_ptr()
        return address

    def empty(self, like: Any, shape: Shape, code: int) -> Any:
        return self._torch.empty(*shape, dtype=self._types[code])  # faster than with a tuple

    def of_memory(self, numbers: np.ndarray[Any, Any], code: int) -> Any:
        tensor = self._torch.from_numpy(numbers.view(np.int16) if code == capi.BF16 else numbers)
        return tensor.view(self._types[code])

    @staticmethod
    def check_writable(name: str, x: Any) -> None:
        """Every tensor is."""

    @staticmethod
    def finish(like: Any, result: Any) -> Any:
        return result


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLPack:
    """The kind of all other arrays. Results are NumPy's arrays, or those of the array's namespace if it has one."""

    _CPU, _PINNED = 1, 3  # device types
    # (code, bits) of DLPack's types
    _codes = {
        (2, 32): capi.FP32,
        (2, 16): capi.FP16,
        (4, 16): capi.BF16,
        (2, 64): capi.FP64,
        (6, 8): capi.BOOL,
        (0, 32): capi.INT32,
        (0, 64): capi.INT64,
    }

    @classmethod
    def read(cls, name: str, x: Any) -> Reading:
        device, number = x.__dlpack_device__()
        if device not in (cls._CPU, cls._PINNED):
            raise ValueError(f"{name} is on DLPack's device {int(device)}:{number}; rapt computes on the CPU, 1:0")
        capsule = x.__dlpack__()
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        code = cls._codes.get((tensor.code, tensor.bits))
        if code is None or tensor.lanes != 1:
            raise _unknown_type(name, f"{tensor.code} of {tensor.bits} bits and {tensor.lanes} lanes in DLPack")
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
        if strides and all(n == 1 or s == r for n, s, r in zip(shape, strides, row_major(shape))):
            strides = None
        return (tensor.data or 0) + tensor.byte_offset, Layout(code, shape, strides), capsule

    @staticmethod
    def empty(like: Any, shape: Shape, code: int) -> Any:
        return Numpy.empty(like, shape, code)

    address = Numpy.address  # of what empty() returns
    of_memory = Numpy.of_memory

    @staticmethod
    def check_writable(name: str, x: Any) -> None:
        raise ValueError(f"{name} is a {type(x).__name__}; it must be a NumPy array or a PyTorch tensor")

    @staticmethod
    def finish(like: Any, result: Any) -> Any:
        if not hasattr(like, "__array_namespace__"):
            return result
        namespace = like.__array_namespace__()
        # NumPy does not export bfloat16.
        return namespace.asarray(result) if result.dtype.name == "bfloat16" else namespace.from_dlpack(result)


_torch: Torch | None = None


def kind_of(name: str, x: Any) -> Any:
    """Numpy, a Torch or DLPack."""
    global _torch
    if isinstance(x, np.ndarray):
        return Numpy
    torch = sys.modules.get("torch")
    if torch is not None:
        if _torch is None:
            _torch = Torch(torch)
        if isinstance(x, _torch.tensor):
            return _torch
    if hasattr(x, "__dlpack__"):
        return DLPack
    raise TypeError(
        f"{name} is a {type(x).__name__}; it must be a NumPy array, a PyTorch tensor, or another array with __dlpack__"
    )


def view(name: str, x: Any) -> tuple[int, np.ndarray[Any, Any]]:
    """The type of the array, and a view of it; that of bfloat16 has type uint16."""
    if isinstance(x, np.ndarray):
        code = Numpy.code(name, x.dtype)
        return code, x.view(np.uint16) if code == capi.BF16 else x
    address, layout, owner = kind_of(name, x).read(name, x)
    dtype = np.dtype(np.uint16) if layout.dtype == capi.BF16 else Numpy.dtype(layout.dtype)
    first, end = bounds(address, layout)
    if first == end:
        return layout.dtype, np.empty(layout.shape, dtype)
    memory: Any = (ctypes.c_char * (end - first)).from_address(first)
    memory.owner = x, owner
    strides = tuple(stride * dtype.itemsize for stride in strides_of(layout))
    return layout.dtype, np.ndarray(layout.shape, dtype, memory, address - first, strides)


def as_numpy(name: str, x: Any) -> np.ndarray[Any, Any]:
    return view(name, x)[1]


def as_floats(name: str, x: Any) -> np.ndarray[Any, Any]:
    """The numbers in float32, or in float64 if they are; a copy of other types."""
    numbers = as_numpy(name, x)
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers if numbers.dtype in (np.float32, np.float64) else numbers.astype(np.float32)


def rounded(numbers: np.ndarray[Any, Any], code: int) -> np.ndarray[Any, Any]:
    """The numbers in a float type, to nearest even; bfloat16 as uint16."""
    if code != capi.BF16:
        return numbers.astype(Numpy.dtype(code))
    bits = numbers.astype(np.float32).view(np.uint32)
    halves = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), halves)


def _in_short(name: str, value: Any) -> str:
    if not hasattr(value, "__dlpack__"):
        return repr(value)
    layout = kind_of(name, value).read(name, value)[1]
    return f"<{NAMES[layout.dtype]} {list(layout.shape)}>"


def short_repr(result: Any) -> str:
    """Of a dataclass, with the types and shapes of arrays in place of their numbers, and without what is None."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    parts = [f"{name}={_in_short(name, value)}" for name, value in values.items() if value is not None]
    return f"{type(result).__name__}({', '.join(parts)})"
