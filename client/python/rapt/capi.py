"""The C interface of librapt_attention.so, for the rest of the package and for benchmarks. rapt/attention.h is its
reference; the test attention_python_structs compares the structs with it."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import threading
from typing import Any

FP32, FP16, BF16, FP64, BOOL = 1, 2, 3, 4, 5

# The names of enumerations, by value.
SCORE_OUTPUTS = {"scores": 1, "softcapped": 2, "biased": 3, "weights": 4}
SCORE_FUNCTIONS = {"dot_product": 0, "additive": 1}
ALIGNMENTS = {"top_left": 0, "bottom_right": 1, "onnx": 2}
NORMALIZERS = {"softmax": 0, "sparsemax": 1, "entmax15": 2, "entmax": 3}
UPDATE_RULES = {"gated_delta": 0, "linear": 1, "gated": 2, "delta": 3}
FEATURE_MAPS = {"none": 0, "elu1": 1, "relu": 2, "favor": 3}
LSH_FORMS = {"reformer": 0, "simple": 1}

# The bits of rapt_gradient, in their order: the suffixes of the fields d_query, d_key, ... of rapt_arguments.
GRADIENTS = (
    "query key value mask past_key past_value bias head_sink alibi_slopes bias_table relative_bias relative_keys"
    " relative_values relative_query additive_weight"
).split()

_ERRORS = {3: ValueError, 8: MemoryError, 9: RuntimeError, 12: NotImplementedError}
_MESSAGE_BYTES = 1024


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


class LinearProblem(Sized):
    _fields_ = _fields("""
        int32_t dtype update_rule
        int64_t batch query_heads kv_heads tokens key_size value_size
        double scale
        int32_t decay_dtype has_key_decays beta_dtype has_one_beta past_dtype state_dtype
        int32_t wants_present_state wants_present_normalizer bidirectional has_key_lengths feature_map normalize
        int32_t projection_dtype reserved
        int64_t num_features
        uint64_t seed
        int64_t chunk_size error_rows
    """)


class LinearArguments(Sized):
    _fields_ = _fields("""
        pointer query key value past_state past_normalizer decay beta projection key_lengths
        pointer output present_state present_normalizer relative_error
    """)


class LshProblem(Sized):
    _fields_ = _fields("""
        int32_t dtype form
        int64_t batch heads length head_size value_head_size
        double scale
        int64_t num_hashes num_buckets chunk_length chunks_before chunks_after
        uint64_t seed
        int32_t has_chunks_before causal rotations_dtype has_head_rotations has_key_lengths wants_buckets
    """)


class LshArguments(Sized):
    _fields_ = _fields("""
        pointer query key value rotations key_lengths output buckets
    """)


# The prefix of the functions of each kind of problem, and its arguments.
KINDS: dict[type[Sized], tuple[str, type[Sized]]] = {
    Problem: ("rapt_", Arguments),
    LinearProblem: ("rapt_linear_", LinearArguments),
    LshProblem: ("rapt_lsh_", LshArguments),
}


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
    pointer, code = ctypes.c_void_p, ctypes.c_int
    text = [ctypes.c_char_p, ctypes.c_size_t]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "rapt_context_create": (code, [pointer, pointer, *text]),
        "rapt_context_destroy": (None, [pointer]),
        "rapt_plan_destroy": (None, [pointer]),
        "rapt_plan_workspace_bytes": (ctypes.c_size_t, [pointer]),
        "rapt_plan_description": (ctypes.c_char_p, [pointer]),
        "rapt_version": (ctypes.c_char_p, []),
    }
    for prefix, _ in KINDS.values():
        signatures[prefix + "plan_create"] = (code, [pointer, pointer, pointer, *text])
        signatures[prefix + "run"] = (code, [pointer, pointer, pointer, pointer, ctypes.c_size_t, *text])
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Message(threading.local):
    """Where the library writes the text of an error."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)


_message = _Message()


def _error(code: int) -> Exception:
    return _ERRORS.get(code, RuntimeError)(_message.buffer.value.decode(errors="replace"))


def _create(function: Any, *arguments: Any) -> int:
    handle = ctypes.c_void_p()
    code = function(*arguments, ctypes.byref(handle), _message.buffer, _MESSAGE_BYTES)
    if code != 0:
        raise _error(code)
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


class Plan:
    """How the context computes a problem. Immutable. Raises ValueError, MemoryError, NotImplementedError, or
    RuntimeError for a backend or an instruction set that this machine lacks, with the library's message."""

    def __init__(self, context: Context, problem: Sized) -> None:
        prefix, self.arguments_type = KINDS[type(problem)]
        library = _library()
        self._destroy = library.rapt_plan_destroy
        self._handle: int | None = None  # for __del__, if this fails
        self._context = context
        self._run = getattr(library, prefix + "run")
        self._handle = _create(getattr(library, prefix + "plan_create"), context.handle, ctypes.byref(problem))
        self.description: str = library.rapt_plan_description(self._handle).decode()
        self.workspace_bytes: int = library.rapt_plan_workspace_bytes(self._handle)

    def __del__(self) -> None:
        if self._handle is not None:
            self._destroy(self._handle)

    def run(self, arguments: Any) -> None:
        """Computes; blocks without the GIL. `arguments`: ctypes.byref() of the plan's arguments, or their address."""
        code = self._run(self._context.handle, self._handle, arguments, None, 0, _message.buffer, _MESSAGE_BYTES)
        if code != 0:
            raise _error(code)
