"""The model linear_attention against ONNX's cases, ONNX Runtime's kernel and numpy, over a running server."""

import contextlib
import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton
from attention_client import to_input
from onnx import TensorProto, helper
from onnx.backend.test.case.node import collect_testcases
from tritonclient.utils import InferenceServerException

MODEL = "linear_attention"
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")
OUTPUTS = ("output", "present_state")
CASES_OF_ONNX_1_23 = 14
RULES = ("linear", "gated", "delta", "gated_delta")
# max |got - want| <= t * max |want|
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def all_cases():
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # other operators' cases overflow on purpose
        return [
            case
            for case in collect_testcases(None)
            if case.name.startswith("test_linear_attention") and "_expanded" not in case.name
        ]


CASES = all_cases()


def infer(client, arrays, outputs, **parameters):
    result = client.infer(
        MODEL,
        [to_input(name, array) for name, array in arrays.items()],
        outputs=[triton.InferRequestedOutput(name) for name in outputs],
        parameters=parameters,
    )
    return [result.as_numpy(name) for name in outputs]


def assert_close(got, want, tolerance=None):
    assert got.shape == want.shape
    tolerance = tolerance or TOLERANCES[str(got.dtype)]
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def test_every_case_exists():
    assert len(CASES) == CASES_OF_ONNX_1_23


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx_case(backend_client, case):
    (node,) = case.model.graph.node
    parameters = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    parameters = {n: v.decode() if isinstance(v, bytes) else v for n, v in parameters.items()}
    for inputs, outputs in case.data_sets:
        names = [formal for formal, actual in zip(INPUTS, node.input) if actual]
        got = infer(backend_client, dict(zip(names, inputs)), OUTPUTS[: len(outputs)], **parameters)
        for tensor, want in zip(got, outputs):
            assert tensor.dtype == want.dtype
            assert_close(tensor, want)


class Call:
    """Random tensors of a rule, with keys of norm 1 at most. `grows`: with decays above 0 and betas up to 2."""

    def __init__(
        self, rule, tokens, *, heads=(4, 2), key_size=24, value_size=40, per_key=False, past=False, grows=False, seed=1
    ):
        random = np.random.default_rng(seed)
        query_heads, kv_heads = heads
        batch = 2
        key = random.standard_normal((batch, tokens, kv_heads, key_size))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        self.arrays = {
            "query": random.standard_normal((batch, tokens, query_heads * key_size)),
            "key": key.reshape(batch, tokens, -1),
            "value": random.standard_normal((batch, tokens, kv_heads * value_size)),
        }
        if past:
            self.arrays["past_state"] = random.standard_normal((batch, kv_heads, key_size, value_size))
        if rule.startswith("gated"):
            width = kv_heads * (key_size if per_key else 1)
            decay = -np.exp(random.uniform(-6, 0.5, (batch, tokens, width)))
            self.arrays["decay"] = random.uniform(-0.02, 0.03, decay.shape) if grows else decay
        if rule.endswith("delta"):
            self.arrays["beta"] = random.random((batch, tokens, kv_heads)) * (2 if grows else 1)
        self.arrays = {name: array.astype(np.float32) for name, array in self.arrays.items()}
        self.parameters = {"q_num_heads": query_heads, "kv_num_heads": kv_heads, "update_rule": rule}

    def answer(self, client, arrays=None, outputs=OUTPUTS, **parameters):
        return infer(client, arrays or self.arrays, outputs, **{**self.parameters, **parameters})

    def onnxruntime(self):
        """The result of the contrib operator."""
        names = [name if name in self.arrays else "" for name in INPUTS]
        node = helper.make_node("LinearAttention", names, OUTPUTS, domain="com.microsoft", **self.parameters)
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in [*self.arrays, *OUTPUTS]]
        graph = helper.make_graph([node], "linear", values[:-2], values[-2:])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return onnxruntime.InferenceSession(model.SerializeToString()).run(None, self.arrays)


@pytest.mark.parametrize("past", (False, True), ids=("first", "past"))
@pytest.mark.parametrize("per_key", (False, True), ids=("head", "key"))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", (1, 7, 64, 200))
def test_equals_onnxruntime(backend_client, tokens, rule, per_key, past):
    call = Call(rule, tokens, per_key=per_key, past=past)
    for got, want in zip(call.answer(backend_client), call.onnxruntime()):
        assert_close(got, want)


@pytest.mark.parametrize("per_key", (False, True), ids=("head", "key"))
@pytest.mark.parametrize("rule", RULES[1:])
def test_states_that_grow_equal_onnxruntime(backend_client, rule, per_key):
    call = Call(rule, 200, per_key=per_key, past=True, grows=True)
    for got, want in zip(call.answer(backend_client), call.onnxruntime()):
        assert_close(got, want)


def features(x, call, projection=None):
    """The feature map of [B, T, H, d]."""
    if call == "elu1":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    if call == "relu":
        return np.maximum(x, 0)
    x = x * x.shape[-1] ** -0.25
    logs = x @ projection.T - (x**2).sum(-1, keepdims=True) / 2
    return np.exp(logs) / np.sqrt(len(projection))


@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
@pytest.mark.parametrize("feature_map", ("elu1", "relu", "favor"))
def test_feature_maps(backend_client, feature_map, causal):
    call = Call("linear", 90, heads=(3, 3))
    arrays, parameters = dict(call.arrays), {"feature_map": feature_map, "is_causal": causal}
    projection = None
    if feature_map == "favor":
        projection = np.random.default_rng(3).standard_normal((50, 24)).astype(np.float32)
        arrays["projection"] = projection
    else:
        parameters["normalize"] = True
    q, k, v = (call.arrays[n].astype(np.float64).reshape(2, 90, 3, -1) for n in ("query", "key", "value"))
    weights = np.einsum(
        "bihf,bjhf->bhij", features(q, feature_map, projection), features(k, feature_map, projection)
    )
    if causal:
        weights = np.tril(weights)
    want = np.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdims=True), v)
    (got,) = call.answer(backend_client, arrays, ["output"], **parameters)
    assert_close(got, want.reshape(got.shape))


def test_favor_estimates_softmax(backend_client):
    call = Call("linear", 64, heads=(2, 2))
    q, k, v = (call.arrays[n].astype(np.float64).reshape(2, 64, 2, -1) for n in ("query", "key", "value"))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(24)
    weights = np.tril(np.exp(scores))
    exact = np.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdims=True), v).reshape(2, 64, -1)
    errors = {}
    for count in (32, 512):
        got, error = call.answer(
            backend_client,
            outputs=["output", "relative_error"],
            feature_map="favor",
            num_features=count,
            seed=5,
            error_rows=1000,
        )
        errors[count] = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        np.testing.assert_allclose(error, [errors[count]], rtol=1e-4)
    assert errors[512] < errors[32] / 2


def test_padding_leaves_the_state_alone(backend_client):
    call = Call("gated_delta", 40)
    lengths = np.array([0, 25])
    arrays = {**call.arrays, "nonpad_kv_seqlen": lengths}
    output, state = call.answer(backend_client, arrays)
    assert not output[0].any() and not state[0].any() and not output[1, 25:].any()
    short = {name: array[1:, :25] for name, array in call.arrays.items()}
    want, want_state = call.answer(backend_client, short)
    assert_close(output[1:, :25], want)
    assert_close(state[1:], want_state)


@pytest.mark.parametrize(
    ("change", "parameters", "message"),
    (
        ({"decay": None}, {}, "decay is missing; update_rule is gated_delta, which needs it"),
        ({}, {"update_rule": "delta"}, "decay is given; update_rule is delta, which does not take it"),
        ({}, {"window": 3}, "unknown request parameter window"),
        ({"nonpad_kv_seqlen": np.array([3, 9])}, {}, "nonpad_kv_seqlen[1] is 9; it must be from 0 to the length 5"),
    ),
)
def test_errors_name_the_field(backend_client, change, parameters, message):
    call = Call("gated_delta", 5)
    arrays = {name: array for name, array in {**call.arrays, **change}.items() if array is not None}
    with pytest.raises(InferenceServerException) as error:
        call.answer(backend_client, arrays, **parameters)
    assert message in str(error.value)


def test_an_error_needs_error_rows(backend_client):
    call = Call("linear", 5)
    with pytest.raises(InferenceServerException) as error:
        call.answer(backend_client, outputs=["relative_error"], feature_map="favor")
    assert "output relative_error is requested; it needs error_rows" in str(error.value)
