"""The ONNX operators' own backend tests for Attention and RotaryEmbedding, each sent to a running server."""

import contextlib
import io
import warnings

import onnx
import pytest
from attention_client import assert_close, attend, to_input
from onnx.backend.test.case.node import collect_testcases

# The model's tensor names, in the operator's order.
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")

CASES_OF_ONNX_1_23 = 93


ROTARY_INPUTS = ("X", "cos_cache", "sin_cache", "position_ids")
ROTARY_CASES_OF_ONNX_1_23 = 8


def all_cases():
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # other operators' cases overflow on purpose
        # With an operator, it would remember the first one.
        return [case for case in collect_testcases(None) if "_expanded" not in case.name]


ALL_CASES = all_cases()
CASES = [case for case in ALL_CASES if case.name.startswith("test_attention_")]
ROTARY_CASES = [case for case in ALL_CASES if case.name.startswith("test_rotary_embedding")]


def by_name(formal_names, actual_names, arrays):
    """Pairs the arrays of a case with the model's names; an absent tensor has an empty name."""
    used = [formal for formal, actual in zip(formal_names, actual_names) if actual]
    assert len(used) == len(arrays)
    return dict(zip(used, arrays))


def test_every_case_exists():
    assert len(CASES) == CASES_OF_ONNX_1_23
    opsets = {case.model.opset_import[0].version for case in CASES}
    assert opsets == {23, 24, 25}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_case(backend_client, case):
    (node,) = case.model.graph.node
    parameters = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        want = by_name(OUTPUTS, node.output, outputs)
        got = attend(backend_client, by_name(INPUTS, node.input, inputs), want, parameters)
        for name in want:
            assert got[name].dtype == want[name].dtype
            assert_close(name, got[name], want[name])


def test_every_rotary_case_exists():
    assert len(ROTARY_CASES) == ROTARY_CASES_OF_ONNX_1_23


@pytest.mark.parametrize("case", ROTARY_CASES, ids=lambda case: case.name)
def test_onnx_rotary_case(backend_client, case):
    (node,) = case.model.graph.node
    parameters = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, (want,) in case.data_sets:
        arrays = by_name(ROTARY_INPUTS, node.input, inputs)
        got = backend_client.infer(
            "rotary_embedding",
            [to_input(name, array) for name, array in arrays.items()],
            parameters=parameters,
        )
        assert got.as_numpy("Y").dtype == want.dtype
        assert_close("Y", got.as_numpy("Y"), want)
        assert got.get_response().model_name == "rotary_embedding"
