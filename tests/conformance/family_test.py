"""Variants of attention as other operators define them, each expressed by fields of the model `attention`: ONNX's
FlexAttention by its own backend tests, and ONNX Runtime's GroupQueryAttention and SparseAttention."""

import contextlib
import io
import math
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from attention_client import assert_close, attend
from onnx import TensorProto, helper
from onnx.backend.test.case.node import collect_testcases

RNG = np.random.default_rng(2026)

# --- FlexAttention --------------------------------------------------------------------------------

# The graphs that modify scores, as inputs and parameters. The server takes no graphs.
MODIFIERS = {
    "test_flexattention_score_mod": lambda sq, sk: ({"attention_bias": np.full((1, 1, 1, 1), 0.5, np.float32)}, {}),
    "test_flexattention_causal_mask": lambda sq, sk: ({}, {"is_causal": 1}),
    "test_flexattention_soft_cap": lambda sq, sk: ({}, {"softcap": 20.0}),
    # i - j, as a table over j - i
    "test_flexattention_relative_positional": lambda sq, sk: (
        {"relative_bias": -np.arange(-max(sq, sk), max(sq, sk) + 1, dtype=np.float32)[None]},
        {},
    ),
}
WITHOUT_A_FIELD = {"test_flexattention_prob_mod"}  # the weights times 0.5
CASES_OF_ONNX_1_23 = 11


def flex_cases():
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # other operators' cases overflow on purpose
        cases = collect_testcases(None)
    return [c for c in cases if c.name.startswith("test_flexattention") and "_expanded" not in c.name]


FLEX_CASES = flex_cases()


def test_every_flexattention_case_has_a_row_or_a_reason():
    assert len(FLEX_CASES) == CASES_OF_ONNX_1_23
    with_graph = {case.name for case in FLEX_CASES if any(a.HasField("g") for a in case.model.graph.node[0].attribute)}
    assert with_graph == set(MODIFIERS) | WITHOUT_A_FIELD


@pytest.mark.parametrize(
    "case", [case for case in FLEX_CASES if case.name not in WITHOUT_A_FIELD], ids=lambda case: case.name
)
def test_flexattention_case(backend_client, case):
    (node,) = case.model.graph.node
    parameters = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.HasField("g")}
    for (q, k, v), (want,) in case.data_sets:
        inputs = {"Q": q, "K": k, "V": v}
        if case.name in MODIFIERS:
            more_inputs, more_parameters = MODIFIERS[case.name](q.shape[2], k.shape[2])
            inputs |= more_inputs
            parameters |= more_parameters
        got = attend(backend_client, inputs, ["Y"], parameters)["Y"]
        assert got.dtype == want.dtype
        assert_close("Y", got, want)


# --- ONNX Runtime ---------------------------------------------------------------------------------

TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
TYPES[np.dtype(np.int64)] = TensorProto.INT64


def run_onnxruntime(op, inputs, outputs, in_place=(), **attributes):
    """Runs one operator of ONNX Runtime. `inputs`: (name, array or None) in the operator's order. `in_place`: pairs of
    an input and the output that overwrites it."""
    given = [(name, array) for name, array in inputs if array is not None]
    names = [name if array is not None else "" for name, array in inputs]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, TYPES[array.dtype], array.shape) for name, array in given],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding, values = session.io_binding(), {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in given}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    overwritten = {output: values[name] for name, output in in_place}
    for name in outputs:
        if name in overwritten:
            binding.bind_ortvalue_output(name, overwritten[name])
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    return dict(zip(outputs, binding.copy_outputs_to_cpu()))


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def heads_last(x):
    """[B, H, S, D] as [B, S, H * D]."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)


BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 6, 2, 12, 16


def caches(positions, size):
    angles = np.arange(positions)[:, None] * 10000.0 ** (-2.0 * np.arange(size // 2) / size)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# name: inputs of both operators, attributes of GroupQueryAttention, parameters of the model
GROUP_QUERY_FEATURES = {
    "plain": ({}, {}, {}),
    "softcap": ({}, {"softcap": 3.0}, {"softcap": 3.0}),
    "window": ({}, {"local_window_size": 5}, {"left_window_size": 4}),
    "sink": ({"head_sink": normal(HEADS)}, {"smooth_softmax": 0}, {}),
    "bias": ({"attention_bias": normal(BATCH, HEADS, LENGTH, LENGTH)}, {}, {}),
    "rotary": (dict(zip(("cos_cache", "sin_cache"), caches(LENGTH, SIZE))), {"do_rotary": 1}, {}),
    "interleaved rotary": (
        dict(zip(("cos_cache", "sin_cache"), caches(LENGTH, SIZE))),
        {"do_rotary": 1, "rotary_interleaved": 1},
        {"interleaved": 1},
    ),
}


@pytest.mark.parametrize("feature", GROUP_QUERY_FEATURES)
def test_group_query_attention(backend_client, feature):
    more, attributes, parameters = GROUP_QUERY_FEATURES[feature]
    q, k, v = normal(BATCH, HEADS, LENGTH, SIZE), *normal(2, BATCH, KV_HEADS, LENGTH, SIZE)
    inputs = [
        ("query", heads_last(q)),
        ("key", heads_last(k)),
        ("value", heads_last(v)),
        ("past_key", None),
        ("past_value", None),
        ("seqlens_k", np.full(BATCH, LENGTH - 1, np.int32)),
        ("total_sequence_length", np.array([LENGTH], np.int32)),
        ("cos_cache", more.get("cos_cache")),
        ("sin_cache", more.get("sin_cache")),
        ("position_ids", None),
        ("attention_bias", more.get("attention_bias")),
        ("head_sink", more.get("head_sink")),
    ]
    outputs = ["output", "present_key", "present_value"]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
    want = run_onnxruntime("GroupQueryAttention", inputs, outputs, **attributes)
    got = attend(
        backend_client,
        {"Q": q, "K": k, "V": v, **more},
        ["Y", "present_key"],
        {"is_causal": 1, **parameters},
    )
    assert_close("Y", heads_last(got["Y"]), want["output"])
    assert_close("present_key", got["present_key"], want["present_key"])


def test_sparse_attention(backend_client):
    block, blocks = 16, 4
    length = block * blocks
    q, k, v = normal(1, HEADS, length, SIZE), *normal(2, 1, KV_HEADS, length, SIZE)
    shown = np.tril(RNG.random((2, blocks, blocks)) < 0.5) | np.eye(blocks, dtype=bool)
    rows = np.cumsum(np.pad(shown.sum(-1), ((0, 0), (1, 0))), -1).astype(np.int32)
    most = int(rows[:, -1].max())
    columns = np.full((2, most), -1, np.int32)
    for layout, of_layout in zip(columns, shown):
        layout[: of_layout.sum()] = np.argwhere(of_layout)[:, 1]
    past = np.zeros((1, KV_HEADS, length, SIZE), np.float32)
    inputs = [
        ("query", heads_last(q)),
        ("key", heads_last(k)),
        ("value", heads_last(v)),
        ("past_key", past),
        ("past_value", past.copy()),
        ("block_row_indices", rows),
        ("block_col_indices", columns),
        ("total_sequence_length", np.array([length], np.int32)),
        ("key_total_sequence_lengths", np.array([length], np.int32)),
    ]
    outputs = ["output", "present_key", "present_value"]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "sparse_block_size": block}
    in_place = [("past_key", "present_key"), ("past_value", "present_value")]
    want = run_onnxruntime("SparseAttention", inputs, outputs, in_place, **attributes)["output"]
    # Heads take turns with the layouts.
    block_mask = shown[np.arange(HEADS) % 2][None]
    parameters = {"is_causal": 1, "block_q": block, "block_k": block}
    got = attend(backend_client, {"Q": q, "K": k, "V": v, "block_mask": block_mask}, ["Y"], parameters)["Y"]
    assert_close("Y", heads_last(got), want)


def test_sparsemax_by_hand(backend_client):
    """The weights of scores 1, 0.5 and 0 are 0.75, 0.25 and 0."""
    k = np.array([1, 0.5, 0], np.float32).reshape(1, 1, 3, 1)
    v = np.array([1, 10, math.nan], np.float32).reshape(1, 1, 3, 1)
    q = np.ones((1, 1, 1, 1), np.float32)
    got = attend(backend_client, {"Q": q, "K": k, "V": v}, ["Y"], {"scale": 1.0, "normalizer": "sparsemax"})
    assert_close("Y", got["Y"], np.full((1, 1, 1, 1), 3.25, np.float32))
