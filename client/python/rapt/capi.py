"""The C interface of librapt_attention.so, for the rest of the package and for benchmarks. rapt/attention.h is its
reference; the test attention_python_structs compares the structs with it."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

FP32, FP16, BF16, FP64, BOOL, INT32, INT64 = 1, 2, 3, 4, 5, 8, 9

# The names of enumerations, by value.
SCORE_OUTPUTS = {"scores": 1, "softcapped": 2, "biased": 3, "weights": 4}
SCORE_FUNCTIONS = {"dot_product": 0, "additive": 1}
ALIGNMENTS = {"top_left": 0, "bottom_right": 1, "onnx": 2}
NORMALIZERS = {"softmax": 0, "sparsemax": 1, "entmax15": 2, "entmax": 3}

# The bits of rapt_gradient, in their order: the suffixes of the fields d_query, d_key, ... of rapt_arguments.
GRADIENTS = (
    "query key value mask past_key past_value bias head_sink alibi_slopes bias_table relative_bias relative_keys"
    " relative_values relative_query additive_weight"
).split()

_ERRORS = {3: ValueError, 8: MemoryError, 9: RuntimeError, 12: NotImplementedError}
MESSAGE_BYTES, MAX_RANK = 1024, 8  # RAPT_MESSAGE_BYTES, RAPT_MAX_RANK


class Tensor(ctypes.Structure):
    """rapt_input and rapt_output."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 4)]


_TYPES: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "char*": ctypes.c_char_p,
    "pointer": ctypes.c_void_p,
    "tensor": Tensor,
}


def _fields(text: str) -> list[tuple[str, Any]]:
    """The fields of a struct, given as lines of a type and names; name[4] is an array."""
    fields: list[tuple[str, Any]] = [("struct_size", ctypes.c_size_t)]
    for line in text.strip().splitlines():
        kind, *names = line.split()
        for name in names:
            bare, _, count = name.rstrip("]").partition("[")
            fields.append((bare, _TYPES[kind] * int(count) if count else _TYPES[kind]))
    return fields


class Sized(ctypes.Structure):
    """A struct that begins with its size; fields are set by name."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self))
        for name, value in fields.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no field {name}")
            setattr(self, name, value)


class ContextOptions(Sized):
    _fields_ = _fields("""
        int64_t threads
        char* backend isa
    """)


class Problem(Sized):
    _fields_ = _fields("""
        int32_t dtype causal
        int64_t batch query_heads kv_heads query_length key_length past_length head_size value_head_size
        double scale
        int32_t has_scale alignment
        double softcap
        int32_t has_left_window has_right_window
        int64_t left_window right_window
        int32_t mask_dtype has_key_lengths
        int64_t mask_shape[4]
        double dropout_probability
        uint64_t dropout_seed
        int32_t softmax_in_fp64 score_output wants_lse wants_present head_sink_dtype bias_dtype
        int64_t bias_shape[4]
        int32_t alibi alibi_slopes_dtype
        int64_t alibi_slopes_batch
        int32_t bias_table_dtype is_bidirectional
        int64_t bias_table_buckets max_distance
        int32_t has_max_distance relative_bias_dtype
        int64_t relative_bias_heads relative_bias_length
        int32_t values_in_keys relative_keys_dtype
        int64_t relative_keys_heads relative_keys_length relative_values_heads relative_values_length
        int32_t relative_values_dtype has_relative_query rotary_cache_dtype
        int64_t rotary_cache_batch rotary_cache_rows rotary_cache_pairs
        int32_t has_position_ids has_key_position_ids interleaved rotary_keys has_rotary_keys has_rope_theta
        double rope_theta
        int64_t rotary_embedding_dim
        int32_t score_function additive_weight_dtype
        int64_t additive_weight_heads
        int32_t normalizer has_alpha head_alpha_dtype
        double alpha
        int32_t has_block_mask
        int64_t block_mask_batch block_mask_heads block_q block_k selected_count selected_heads
        int32_t has_selected_indices has_global_mask
        int64_t prefix_keys
        uint64_t gradients
        int32_t has_forward has_lse_gradient
    """)


class Arguments(Sized):
    _fields_ = _fields("""
        tensor query key value mask past_key past_value
        pointer key_lengths
        tensor output lse scores present_key present_value
        tensor head_sink bias alibi_slopes bias_table relative_bias relative_keys relative_values relative_query
        tensor cos_cache sin_cache position_ids key_position_ids
        tensor additive_weight head_alpha block_mask selected_indices global_mask
        tensor output_gradient forward_output forward_lse lse_gradient
        tensor d_query d_key d_value d_mask d_past_key d_past_value d_bias d_head_sink d_alibi_slopes d_bias_table
        tensor d_relative_bias d_relative_keys d_relative_values d_relative_query d_additive_weight
    """)


class NamedTensor(ctypes.Structure):
    """rapt_tensor."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p)]


def tensors(addresses: Mapping[str, int | None]) -> ctypes.Array[NamedTensor]:
    """The tensors of a plan of a Call by their names."""
    return (NamedTensor * len(addresses))(*[NamedTensor(name.encode(), address) for name, address in addresses.items()])


def library_path() -> pathlib.Path:
    """$RAPT_LIBRARY, or the library in the package."""
    return pathlib.Path(os.environ.get("RAPT_LIBRARY") or pathlib.Path(__file__).with_name("librapt_attention.so"))


@functools.cache
def _library() -> ctypes.CDLL:
    """Loaded by the first call, as clients of servers do not need it."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise ImportError(
            f"{error}; RAPT_LIBRARY may name librapt_attention.so, which computes in this process; rapt.Client needs none"
        ) from error
    pointer, code, string = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    text = [ctypes.c_char_p, ctypes.c_size_t]
    run = [pointer, pointer, pointer]
    workspace = [pointer, ctypes.c_size_t]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "rapt_context_create": (code, [pointer, pointer, *text]),
        "rapt_context_destroy": (None, [pointer]),
        "rapt_plan_destroy": (None, [pointer]),
        "rapt_plan_workspace_bytes": (ctypes.c_size_t, [pointer]),
        "rapt_plan_description": (ctypes.c_char_p, [pointer]),
        "rapt_version": (ctypes.c_char_p, []),
        "rapt_plan_create": (code, [pointer, pointer, pointer, *text]),
        "rapt_run": (code, [*run, *workspace, *text]),
        "rapt_call_create": (code, [string, pointer, *text]),
        "rapt_call_destroy": (None, [pointer]),
        "rapt_call_set_input": (code, [pointer, string, ctypes.c_int32, ctypes.c_int32, pointer, *text]),
        "rapt_call_set_number": (code, [pointer, string, ctypes.c_double, *text]),
        "rapt_call_set_text": (code, [pointer, string, string, *text]),
        "rapt_call_want": (code, [pointer, string, *text]),
        "rapt_call_plan": (code, [pointer, pointer, pointer, *text]),
        "rapt_call_run": (code, [*run, ctypes.c_size_t, *workspace, *text]),
        "rapt_plan_output": (code, [pointer, string, pointer, pointer, pointer, *text]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Message(threading.local):
    """Where the library writes the text of an error."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(MESSAGE_BYTES)


_message = _Message()


def _error(code: int) -> Exception:
    return _ERRORS.get(code, RuntimeError)(_message.buffer.value.decode(errors="replace"))


def _check(function: Any, *arguments: Any) -> None:
    code = function(*arguments, _message.buffer, MESSAGE_BYTES)
    if code != 0:
        raise _error(code)


def _create(function: Any, *arguments: Any) -> int:
    handle = ctypes.c_void_p()
    _check(function, *arguments, ctypes.byref(handle))
    assert handle.value is not None
    return handle.value


def version() -> str:
    text: bytes = _library().rapt_version()
    return text.decode()


class Context:
    """Compute threads and a workspace, which end with the last reference. Thread-safe: one plan runs at a time, and
    others wait. Unusable in a child process made by fork, which has no copy of its threads."""

    def __init__(self, threads: int, backend: str | None = None, isa: str | None = None) -> None:
        self._pid = 0  # for __del__, if this fails
        options = ContextOptions(
            threads=threads, backend=backend.encode() if backend else None, isa=isa.encode() if isa else None
        )
        self.threads = threads
        library = _library()
        self.handle = _create(library.rapt_context_create, ctypes.byref(options))
        self._destroy, self._getpid = library.rapt_context_destroy, os.getpid  # modules may be gone in __del__
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid and self._pid == self._getpid():
            self._destroy(self.handle)


class Call:
    """A call of an operator by the names of rapt/attention.h. Not thread-safe. Raises ValueError with
    the library's message."""

    def __init__(self, operator: str) -> None:
        self.handle: int | None = None  # for __del__, if this fails
        self._library = _library()
        self._destroy = self._library.rapt_call_destroy
        self.handle = _create(self._library.rapt_call_create, operator.encode())

    def __del__(self) -> None:
        if self.handle is not None:
            self._destroy(self.handle)

    def set_input(self, name: str, dtype: int, shape: Sequence[int]) -> None:
        axes = (ctypes.c_int64 * len(shape))(*shape)
        _check(self._library.rapt_call_set_input, self.handle, name.encode(), dtype, len(shape), axes)

    def set_attribute(self, name: str, value: bool | int | float | str) -> None:
        if isinstance(value, float):
            _check(self._library.rapt_call_set_number, self.handle, name.encode(), value)
        else:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            _check(self._library.rapt_call_set_text, self.handle, name.encode(), text.encode())

    def want(self, output: str) -> None:
        _check(self._library.rapt_call_want, self.handle, output.encode())


class Plan:
    """How the context computes a problem or a call. Immutable. Raises ValueError, MemoryError, NotImplementedError, or
    RuntimeError for a backend or an instruction set that this machine lacks, with the library's message."""

    def __init__(self, context: Context, problem: Problem | Call) -> None:
        self._handle: int | None = None  # for __del__, if this fails
        self._library = library = _library()
        self._destroy = library.rapt_plan_destroy
        self._context = context
        if isinstance(problem, Call):
            self._run = library.rapt_call_run
            self._handle = _create(library.rapt_call_plan, context.handle, problem.handle)
        else:
            self._run = library.rapt_run
            self._handle = _create(library.rapt_plan_create, context.handle, ctypes.byref(problem))
        self.description: str = library.rapt_plan_description(self._handle).decode()
        self.workspace_bytes: int = library.rapt_plan_workspace_bytes(self._handle)

    def __del__(self) -> None:
        if self._handle is not None:
            self._destroy(self._handle)

    def output(self, name: str) -> tuple[tuple[int, ...], int]:
        """Shape and type of an output of a call."""
        dtype, rank, shape = ctypes.c_int32(), ctypes.c_int32(), (ctypes.c_int64 * MAX_RANK)()
        result = (ctypes.byref(dtype), ctypes.byref(rank), shape)
        _check(self._library.rapt_plan_output, self._handle, name.encode(), *result)
        return tuple(shape[: rank.value]), dtype.value

    def run(self, *arguments: Any) -> None:
        """Computes; blocks without the GIL. `arguments`: ctypes.byref() of rapt_arguments, or their address; of a call that of
        the tensors, and their number."""
        code = self._run(self._context.handle, self._handle, *arguments, None, 0, _message.buffer, MESSAGE_BYTES)
        if code != 0:
            raise _error(code)
