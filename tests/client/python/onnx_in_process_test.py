"""The ONNX operators' own backend tests for Attention, LinearAttention and RotaryEmbedding, in process."""

import numpy as np
import onnx
import pytest
import rapt
from attention_client import assert_close
from linear_test import CASES as LINEAR_CASES
from linear_test import INPUTS as LINEAR_INPUTS
from linear_test import assert_close as assert_linear_close
from onnx_test import CASES, INPUTS, OUTPUTS, ROTARY_CASES, ROTARY_INPUTS, by_name

ARGUMENTS = dict(zip(INPUTS, ("q", "k", "v", "mask", "past_key", "past_value", "key_lengths")))
STEPS = ("scores", "softcapped", "biased", "weights")
NOT_NARROWER = {"softmax_precision"}  # at least FP32 in any case; FP64 of FP64


def to_4d(name, x, heads):
    """ONNX's [B, S, H * D] as [B, S, H, D]."""
    return x.reshape(*x.shape[:2], heads, -1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_case(case):
    (node,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name not in NOT_NARROWER}
    options = {name: attributes[name] for name in ("scale", "softcap") if name in attributes}
    options["causal"] = attributes.get("is_causal", 0)
    options["alignment"] = "onnx"
    window = tuple(attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    options["window"] = tuple(None if keys < 0 else keys for keys in window)
    mode = attributes.get("qk_matmul_output_mode", 0)
    for inputs, outputs in case.data_sets:
        want = by_name(OUTPUTS, node.output, outputs)
        arrays = {ARGUMENTS[name]: x for name, x in by_name(INPUTS, node.input, inputs).items()}
        is_3d = arrays["q"].ndim == 3
        if is_3d:
            heads = {"q": "q_num_heads", "k": "kv_num_heads", "v": "kv_num_heads"}
            arrays |= {name: to_4d(name, arrays[name], attributes[count]) for name, count in heads.items()}
            options["layout"] = "BSHD"
        result = rapt.attend(
            **arrays,
            **options,
            scores=STEPS[mode] if "qk_matmul_output" in want else None,
            present="present_key" in want,
        )
        y = result.y.reshape(*result.y.shape[:2], -1) if is_3d else result.y
        got = dict(zip(OUTPUTS, (y, result.present_key, result.present_value, result.scores)))
        for name in want:
            assert got[name].dtype == want[name].dtype
            assert_close(name, got[name], want[name])


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_onnx_linear_case(case):
    (node,) = case.model.graph.node
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    options = {name: value.decode() if isinstance(value, bytes) else value for name, value in options.items()}
    options["query_heads"], options["kv_heads"] = options.pop("q_num_heads"), options.pop("kv_num_heads")
    for inputs, outputs in case.data_sets:
        arrays = by_name(LINEAR_INPUTS, node.input, inputs)
        result = rapt.linear_attention(**arrays, **options, present_state=True)
        for got, want in zip((result.output, result.present_state), outputs):
            assert got.dtype == want.dtype
            assert_linear_close(got, np.asarray(want))


@pytest.mark.parametrize("case", ROTARY_CASES, ids=lambda case: case.name)
def test_onnx_rotary_case(case):
    (node,) = case.model.graph.node
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, (want,) in case.data_sets:
        arrays = by_name(ROTARY_INPUTS, node.input, inputs)
        got = rapt.rotary_embedding(arrays.pop("X"), **arrays, **options)
        assert got.dtype == want.dtype
        assert_close("Y", got, want)
