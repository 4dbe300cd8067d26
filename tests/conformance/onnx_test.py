"""The ONNX operator's own backend tests for Attention, each sent to a running server."""

import contextlib
import io
import warnings

import onnx
import pytest
from attention_client import assert_close, attend
from onnx.backend.test.case.node import collect_testcases

# The model's tensor names, in the operator's order.
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")

CASES_OF_ONNX_1_23 = 93


def attention_cases():
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # other operators' cases overflow on purpose
        cases = collect_testcases("Attention")
    return [c for c in cases if c.name.startswith("test_attention_") and "_expanded" not in c.name]


CASES = attention_cases()


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
