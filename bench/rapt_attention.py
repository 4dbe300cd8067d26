"""librapt_attention.so in Python through ctypes. The structs repeat rapt/attention.h, with which the test
attention_python_structs compares them."""

import ctypes

FP32, FP16, BF16, FP64, BOOL = 1, 2, 3, 4, 5
ADDITIVE = 1
SPARSEMAX, ENTMAX15 = 1, 2
MESSAGE_BYTES = 1024

_i32, _i64, _size, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


class Sized(ctypes.Structure):
    """A struct that begins with its size; fields are set by name."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)))
        for name, value in fields.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no field {name}")
            setattr(self, name, value)


class ContextOptions(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("threads", _i64),
        ("backend", ctypes.c_char_p),
        ("isa", ctypes.c_char_p),
    ]


class Problem(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("dtype", _i32),
        ("causal", _i32),
        ("batch", _i64),
        ("query_heads", _i64),
        ("kv_heads", _i64),
        ("query_length", _i64),
        ("key_length", _i64),
        ("past_length", _i64),
        ("head_size", _i64),
        ("value_head_size", _i64),
        ("scale", ctypes.c_double),
        ("has_scale", _i32),
        ("alignment", _i32),
        ("softcap", ctypes.c_double),
        ("has_left_window", _i32),
        ("has_right_window", _i32),
        ("left_window", _i64),
        ("right_window", _i64),
        ("mask_dtype", _i32),
        ("has_key_lengths", _i32),
        ("mask_shape", _i64 * 4),
        ("dropout_probability", ctypes.c_double),
        ("dropout_seed", ctypes.c_uint64),
        ("softmax_in_fp64", _i32),
        ("score_output", _i32),
        ("wants_lse", _i32),
        ("wants_present", _i32),
        ("head_sink_dtype", _i32),
        ("bias_dtype", _i32),
        ("bias_shape", _i64 * 4),
        ("alibi", _i32),
        ("alibi_slopes_dtype", _i32),
        ("alibi_slopes_batch", _i64),
        ("bias_table_dtype", _i32),
        ("is_bidirectional", _i32),
        ("bias_table_buckets", _i64),
        ("max_distance", _i64),
        ("has_max_distance", _i32),
        ("relative_bias_dtype", _i32),
        ("relative_bias_heads", _i64),
        ("relative_bias_length", _i64),
        ("values_in_keys", _i32),
        ("relative_keys_dtype", _i32),
        ("relative_keys_heads", _i64),
        ("relative_keys_length", _i64),
        ("relative_values_heads", _i64),
        ("relative_values_length", _i64),
        ("relative_values_dtype", _i32),
        ("has_relative_query", _i32),
        ("rotary_cache_dtype", _i32),
        ("rotary_cache_batch", _i64),
        ("rotary_cache_rows", _i64),
        ("rotary_cache_pairs", _i64),
        ("has_position_ids", _i32),
        ("has_key_position_ids", _i32),
        ("interleaved", _i32),
        ("rotary_keys", _i32),
        ("has_rotary_keys", _i32),
        ("has_rope_theta", _i32),
        ("rope_theta", ctypes.c_double),
        ("rotary_embedding_dim", _i64),
        ("score_function", _i32),
        ("additive_weight_dtype", _i32),
        ("additive_weight_heads", _i64),
        ("normalizer", _i32),
        ("has_alpha", _i32),
        ("head_alpha_dtype", _i32),
        ("alpha", ctypes.c_double),
        ("has_block_mask", _i32),
        ("block_mask_batch", _i64),
        ("block_mask_heads", _i64),
        ("block_q", _i64),
        ("block_k", _i64),
        ("selected_count", _i64),
        ("selected_heads", _i64),
        ("has_selected_indices", _i32),
        ("has_global_mask", _i32),
        ("prefix_keys", _i64),
        ("gradients", ctypes.c_uint64),
        ("has_forward", _i32),
        ("has_lse_gradient", _i32),
    ]


class Tensor(ctypes.Structure):
    """rapt_input and rapt_output."""

    _fields_ = [("data", _pointer), ("strides", _i64 * 4)]


class Arguments(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("query", Tensor),
        ("key", Tensor),
        ("value", Tensor),
        ("mask", Tensor),
        ("past_key", Tensor),
        ("past_value", Tensor),
        ("key_lengths", _pointer),
        ("output", Tensor),
        ("lse", Tensor),
        ("scores", Tensor),
        ("present_key", Tensor),
        ("present_value", Tensor),
        ("head_sink", Tensor),
        ("bias", Tensor),
        ("alibi_slopes", Tensor),
        ("bias_table", Tensor),
        ("relative_bias", Tensor),
        ("relative_keys", Tensor),
        ("relative_values", Tensor),
        ("relative_query", Tensor),
        ("cos_cache", Tensor),
        ("sin_cache", Tensor),
        ("position_ids", Tensor),
        ("key_position_ids", Tensor),
        ("additive_weight", Tensor),
        ("head_alpha", Tensor),
        ("block_mask", Tensor),
        ("selected_indices", Tensor),
        ("global_mask", Tensor),
        ("output_gradient", Tensor),
        ("forward_output", Tensor),
        ("forward_lse", Tensor),
        ("lse_gradient", Tensor),
        ("d_query", Tensor),
        ("d_key", Tensor),
        ("d_value", Tensor),
        ("d_mask", Tensor),
        ("d_past_key", Tensor),
        ("d_past_value", Tensor),
        ("d_bias", Tensor),
        ("d_head_sink", Tensor),
        ("d_alibi_slopes", Tensor),
        ("d_bias_table", Tensor),
        ("d_relative_bias", Tensor),
        ("d_relative_keys", Tensor),
        ("d_relative_values", Tensor),
        ("d_relative_query", Tensor),
        ("d_additive_weight", Tensor),
    ]


class LinearProblem(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("dtype", _i32),
        ("update_rule", _i32),
        ("batch", _i64),
        ("query_heads", _i64),
        ("kv_heads", _i64),
        ("tokens", _i64),
        ("key_size", _i64),
        ("value_size", _i64),
        ("scale", ctypes.c_double),
        ("decay_dtype", _i32),
        ("has_key_decays", _i32),
        ("beta_dtype", _i32),
        ("has_one_beta", _i32),
        ("past_dtype", _i32),
        ("state_dtype", _i32),
        ("wants_present_state", _i32),
        ("wants_present_normalizer", _i32),
        ("bidirectional", _i32),
        ("has_key_lengths", _i32),
        ("feature_map", _i32),
        ("normalize", _i32),
        ("projection_dtype", _i32),
        ("reserved", _i32),
        ("num_features", _i64),
        ("seed", ctypes.c_uint64),
        ("chunk_size", _i64),
        ("error_rows", _i64),
    ]


class LinearArguments(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("query", _pointer),
        ("key", _pointer),
        ("value", _pointer),
        ("past_state", _pointer),
        ("past_normalizer", _pointer),
        ("decay", _pointer),
        ("beta", _pointer),
        ("projection", _pointer),
        ("key_lengths", _pointer),
        ("output", _pointer),
        ("present_state", _pointer),
        ("present_normalizer", _pointer),
        ("relative_error", _pointer),
    ]


class LshProblem(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("dtype", _i32),
        ("form", _i32),
        ("batch", _i64),
        ("heads", _i64),
        ("length", _i64),
        ("head_size", _i64),
        ("value_head_size", _i64),
        ("scale", ctypes.c_double),
        ("num_hashes", _i64),
        ("num_buckets", _i64),
        ("chunk_length", _i64),
        ("chunks_before", _i64),
        ("chunks_after", _i64),
        ("seed", ctypes.c_uint64),
        ("has_chunks_before", _i32),
        ("causal", _i32),
        ("rotations_dtype", _i32),
        ("has_head_rotations", _i32),
        ("has_key_lengths", _i32),
        ("wants_buckets", _i32),
    ]


class LshArguments(Sized):
    _fields_ = [
        ("struct_size", _size),
        ("query", _pointer),
        ("key", _pointer),
        ("value", _pointer),
        ("rotations", _pointer),
        ("key_lengths", _pointer),
        ("output", _pointer),
        ("buckets", _pointer),
    ]


# The prefix of the functions of each kind of problem, and its arguments.
KINDS = {
    Problem: ("rapt_", Arguments),
    LinearProblem: ("rapt_linear_", LinearArguments),
    LshProblem: ("rapt_lsh_", LshArguments),
}


class RaptError(RuntimeError):
    pass


class Library:
    """The loaded library. Errors carry the library's message."""

    def __init__(self, path):
        self._c = ctypes.CDLL(path)
        text, pointer_to = [ctypes.c_char_p, _size], ctypes.POINTER
        signatures = {
            "rapt_context_create": (ctypes.c_int, [pointer_to(ContextOptions), pointer_to(_pointer), *text]),
            "rapt_context_destroy": (None, [_pointer]),
            "rapt_plan_destroy": (None, [_pointer]),
            "rapt_plan_workspace_bytes": (_size, [_pointer]),
            "rapt_plan_description": (ctypes.c_char_p, [_pointer]),
            "rapt_version": (ctypes.c_char_p, []),
        }
        for problem, (prefix, arguments) in KINDS.items():
            create = [_pointer, pointer_to(problem), pointer_to(_pointer), *text]
            run = [_pointer, _pointer, pointer_to(arguments), _pointer, _size, *text]
            signatures |= {prefix + "plan_create": (ctypes.c_int, create), prefix + "run": (ctypes.c_int, run)}
        for name, (result, arguments) in signatures.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments

    def version(self):
        return self._c.rapt_version().decode()

    def context(self, threads, isa=None):
        options = ContextOptions(threads=threads, isa=isa.encode() if isa else None)
        return Context(self._c, self._create("rapt_context_create", ctypes.byref(options)))

    def plan(self, context, problem):
        create = KINDS[type(problem)][0] + "plan_create"
        return Plan(self._c, self._create(create, context.handle, ctypes.byref(problem)))

    def _create(self, name, *arguments):
        handle, message = _pointer(), ctypes.create_string_buffer(MESSAGE_BYTES)
        if getattr(self._c, name)(*arguments, ctypes.byref(handle), message, MESSAGE_BYTES) != 0:
            raise RaptError(message.value.decode())
        return handle

    def runner(self, context, plan, arguments):
        """Returns a callable that computes the plan; `arguments` may change between calls."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        prefix = next(prefix for prefix, kind in KINDS.values() if kind is type(arguments))
        run, given = getattr(self._c, prefix + "run"), ctypes.byref(arguments)

        def call(context=context.handle, plan=plan.handle):
            if run(context, plan, given, None, 0, message, MESSAGE_BYTES) != 0:
                raise RaptError(message.value.decode())

        return call


class _Owned:
    """An object of the library, destroyed with its last reference."""

    def __init__(self, c, handle):
        self._c, self.handle = c, handle


class Context(_Owned):
    def __del__(self):
        self._c.rapt_context_destroy(self.handle)


class Plan(_Owned):
    def __del__(self):
        self._c.rapt_plan_destroy(self.handle)

    def workspace_bytes(self):
        return self._c.rapt_plan_workspace_bytes(self.handle)

    def description(self):
        return self._c.rapt_plan_description(self.handle).decode()
