"""Operators other than attention. onnx_in_process_test.py has the ONNX operator's cases."""

import ml_dtypes
import numpy as np
import pytest
import rapt
from linear_test import RULES, Call, assert_close, features
from lsh_oracle import lsh_attention


def linear(call, **options):
    """The call in process."""
    arrays = call.arrays | {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    parameters = dict(call.parameters)
    heads = {"query_heads": parameters.pop("q_num_heads"), "kv_heads": parameters.pop("kv_num_heads")}
    return rapt.linear_attention(**arrays, **heads, **(parameters | options))


@pytest.mark.parametrize("per_key", (False, True), ids=("head", "key"))
@pytest.mark.parametrize("rule", RULES)
def test_linear_equals_onnxruntime(rule, per_key):
    call = Call(rule, 65, per_key=per_key, past=True)
    output, state = call.onnxruntime()
    result = linear(call, present_state=True)
    assert_close(result.output, output)
    assert_close(result.present_state, state)
    assert result.plan and result.present_normalizer is None and result.relative_error is None
    np.testing.assert_array_equal(linear(call).output, result.output)


def test_linear_continues_from_its_state():
    call = Call("linear", 40, heads=(2, 2))
    options = {"feature_map": "elu1", "normalize": True}
    want = linear(call, **options).output
    parts, past = [], {}
    for begin, end in ((0, 10), (10, 11), (11, 40)):
        step = Call("linear", 40, heads=(2, 2))
        step.arrays = {name: np.ascontiguousarray(x[:, begin:end]) for name, x in call.arrays.items()}
        result = linear(step, **options, **past, present_state=True, present_normalizer=True)
        parts.append(result.output)
        past = {"past_state": result.present_state, "past_normalizer": result.present_normalizer}
    assert_close(np.concatenate(parts, 1), want)


def test_favor_with_a_projection_and_with_a_seed():
    call = Call("linear", 64, heads=(2, 2))
    projection = np.random.default_rng(3).standard_normal((50, 24)).astype(np.float32)
    q, k, v = (call.arrays[n].astype(np.float64).reshape(2, 64, 2, -1) for n in ("query", "key", "value"))
    q, k = features(q, "favor", projection), features(k, "favor", projection)
    weights = np.einsum("bihf,bjhf->bhij", q, k)
    want = np.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdims=True), v).reshape(2, 64, -1)
    assert_close(linear(call, feature_map="favor", projection=projection, causal=False).output, want)
    first = linear(call, feature_map="favor", num_features=512, seed=5, error_rows=100)
    assert 0 < first.relative_error < linear(call, feature_map="favor", num_features=16, seed=5, error_rows=100).relative_error
    usual = linear(call, feature_map="favor", seed=5, present_state=True)  # floor(24 ln 24) features
    assert usual.present_state.shape == (2, 2, 76, 40)


@pytest.mark.parametrize("dtype", (np.float64, np.float16, ml_dtypes.bfloat16))
def test_linear_types(dtype):
    call = Call("gated_delta", 70)
    call.arrays = {name: array.astype(dtype) for name, array in call.arrays.items()}
    exact = Call("gated_delta", 70)
    exact.arrays = {name: array.astype(np.float64) for name, array in call.arrays.items()}
    want = linear(exact, present_state=True)
    got = linear(call, present_state=True, state_type="float32")
    assert got.output.dtype == dtype and got.present_state.dtype == np.float32
    assert_close(got.output, want.output)


def test_linear_padding():
    call = Call("gated_delta", 40)
    result = linear(call, key_lengths=[0, 25], present_state=True)
    assert not result.output[0].any() and not result.present_state[0].any() and not result.output[1, 25:].any()


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


QUERY = normal(2, 6, 24)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    (
        ({"query_heads": 5}, ValueError, r"query_heads is 5; with query \[2, 6, 24\] it must be from 1 to 65536 and divide 24"),
        ({"query_heads": 0}, ValueError, "query_heads is 0; with query"),
        ({"query_heads": 2, "kv_heads": 4}, ValueError, "key has heads of 6; they must be as query's, 12"),
        ({"key": normal(2, 5, 24)}, ValueError, r"key has shape \[2, 5, 24\]"),
        ({"key": normal(2, 6, 24, dtype=np.float64)}, ValueError, "key has type float64; it must be query's, float32"),
        ({"query": QUERY[0]}, ValueError, r"query has shape \[6, 24\]; it must be \[B, T, H \* d\]"),
        ({"query": normal(6, 2, 24).swapaxes(0, 1)}, ValueError, "query is not contiguous"),
        ({"update_rule": "gated", "decay": normal(2, 6, 5)}, ValueError, "decay has shape"),
        ({"update_rule": "delta", "beta": normal(2, 6, 3)}, ValueError, "beta has shape"),
        ({"past_state": normal(2, 4, 6, 5)}, ValueError, "past_state has shape"),
        ({"past_normalizer": normal(2, 4, 6)}, ValueError, "past_normalizer is given; it needs normalize or feature_map favor"),
        ({"past_state": normal(2, 4, 6, 6), "normalize": True}, ValueError, "past_state and past_normalizer must be given both or neither"),
        ({"update_rule": "fast"}, ValueError, "update_rule is 'fast'; it must be one of gated_delta, linear"),
        ({"feature_map": "relu2"}, ValueError, "feature_map is 'relu2'"),
        ({"state_type": "int8"}, ValueError, "state_type is 'int8'"),
        ({"feature_map": "favor", "num_features": 0}, ValueError, "num_features is 0"),
        ({"seed": -1}, ValueError, "seed is -1; it must be from 0 to 18446744073709551615"),
        ({"key_lengths": [6, 7]}, ValueError, "7"),
        ({"query": normal(*[1] * 9)}, ValueError, "query has rank 9; it must be from 0 to 8"),
        ({"scale": np.nan}, ValueError, "scale is nan; it must be finite"),
        ({"chunk_size": 2**63}, ValueError, "chunk_size is 9223372036854775808; it must be from"),
    ),
)
def test_linear_errors_name_the_argument(change, error, message):
    arguments = {"query": QUERY, "key": QUERY, "value": QUERY, "query_heads": 4, "kv_heads": 4, "update_rule": "linear"}
    with pytest.raises(error, match=message):
        rapt.linear_attention(**arguments | change)


@pytest.mark.parametrize("heads", (1, 3), ids=("shared", "each"))
def test_reformer(heads):
    q, v = normal(2, 3, 96, 16), normal(2, 3, 96, 24)
    rotations = normal(heads, 16, 4, 4)
    result = rapt.lsh_attention(
        q, v, rotations=rotations, num_hashes=4, num_buckets=8, chunk_length=12, causal=True, key_lengths=[96, 50], buckets=True
    )
    want, buckets = lsh_attention(q, v, rotations, 12, is_causal=True, lengths=(96, 50))
    np.testing.assert_array_equal(result.buckets, buckets)
    assert result.buckets.dtype == np.int32
    assert_close(result.y, want)


def test_the_simple_form():
    q, k, v = normal(2, 3, 96, 16), normal(2, 3, 48, 32).reshape(2, 3, 96, 16), normal(2, 3, 96, 24)
    rotations = normal(1, 16, 3, 16)
    result = rapt.lsh_attention(q, v, k=k, rotations=rotations, num_hashes=3, chunk_length=16, buckets=True)
    want, buckets = lsh_attention(q, v, rotations, 16, k=k)
    np.testing.assert_array_equal(result.buckets, buckets)
    assert_close(result.y, want)


def test_a_seed_draws_the_same_rotations():
    q, v = normal(1, 2, 64, 16), normal(1, 2, 64, 8)
    first, again, other = (rapt.lsh_attention(q, v, chunk_length=16, seed=seed).y for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"chunk_length": 7}, "chunk_length is 7"),
        ({"num_buckets": 5}, "num_buckets is 5"),
        ({"num_hashes": 0}, "num_hashes is 0"),
        ({"rotations": normal(1, 16, 1, 4)}, "rotations and seed are both set"),
        ({"seed": None}, "rotations is missing; it or seed must be given"),
        ({"rotations": normal(1, 16, 1, 3), "seed": None, "num_buckets": 8}, r"rotations has shape \[1, 16, 1, 3\]; it must be"),
        ({"v": normal(1, 2, 60, 8)}, r"v has shape \[1, 2, 60, 8\]"),
        ({"q": normal(2, 64, 16), "k": normal(2, 64, 16)}, r"q has shape \[2, 64, 16\]"),
        ({"k": normal(1, 2, 64, 8)}, "k is float32 .* it must be as q, float32"),
        ({"k": normal(1, 2, 64, 16), "causal": True}, "causal is true"),
        ({"q": normal(2, 64, 16)}, r"q has shape \[2, 64, 16\]; it must be \[B, H, S, D\]"),
    ),
)
def test_lsh_errors_name_the_argument(change, message):
    arguments = {"q": normal(1, 2, 64, 16), "v": normal(1, 2, 64, 8), "chunk_length": 16, "seed": 1}
    with pytest.raises(ValueError, match=message):
        rapt.lsh_attention(**arguments | change)


@pytest.mark.parametrize("options", ({}, {"interleaved": True, "rotary_embedding_dim": 8}), ids=("halves", "neighbours"))
def test_rotary_embedding_by_angles_or_caches(options):
    x, pairs = normal(2, 3, 10, 16), options.get("rotary_embedding_dim", 16) // 2
    angles = np.arange(10)[:, None] * 100.0 ** (-np.arange(pairs) / pairs)
    caches = {"cos_cache": np.cos(angles).astype("f4"), "sin_cache": np.sin(angles).astype("f4")}
    by_angles = rapt.rotary_embedding(x, rope_theta=100, **options)
    assert_close(by_angles, rapt.rotary_embedding(x, **caches, **options))
    np.testing.assert_array_equal(by_angles[:, :, 0], x[:, :, 0])
    flat = np.ascontiguousarray(x.swapaxes(1, 2)).reshape(2, 10, 48)
    want = by_angles.swapaxes(1, 2).reshape(2, 10, 48)
    np.testing.assert_array_equal(rapt.rotary_embedding(flat, rope_theta=100, num_heads=3, **options), want)


def test_positional_encoding():
    x = normal(2, 7, 6)
    angles = np.arange(7)[:, None] * 50.0 ** (-np.arange(0, 6, 2) / 6)
    encoding = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(7, 6)
    assert_close(rapt.positional_encoding(x, base=50), x + encoding)
    table = normal(9, 6)
    assert_close(rapt.positional_encoding(x, table=table), x + table[:7])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda: rapt.rotary_embedding(QUERY, rope_theta=1), ValueError, "num_heads"),
        (lambda: rapt.rotary_embedding(QUERY[None], cos_cache=normal(6, 12)), ValueError, "sin_cache"),
        (lambda: rapt.rotary_embedding(QUERY, heads=4), TypeError, "there is no option heads; did you mean num_heads"),
        (lambda: rapt.positional_encoding(QUERY, base=0), ValueError, "base is 0; it must be positive and finite"),
        (lambda: rapt.positional_encoding(QUERY[0, 0]), ValueError, r"x has shape \[24\]"),
        (lambda: rapt.positional_encoding(QUERY.astype(int)), ValueError, "x has type int64; it must be float32, float16"),
    ),
)
def test_errors_of_positions_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


class Strided:
    """An array whose producer tells the strides of DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_dlpack_with_strides_is_row_major():
    x = normal(1, 2, 5, 8)
    got = np.from_dlpack(rapt.rotary_embedding(Strided(x), rope_theta=100))
    np.testing.assert_array_equal(got, rapt.rotary_embedding(x, rope_theta=100))


def test_the_order_of_options_does_not_matter():
    q = QUERY
    options = {"query_heads": 4, "kv_heads": 4, "update_rule": "linear"}
    calls = [rapt._operators.linear_call(q, q, q, dict(order)) for order in (options.items(), reversed(options.items()))]
    assert [*calls[0].options.items()] == [*calls[1].options.items()]


def test_no_rows_have_no_error():
    x = np.zeros((0, 9, 8), np.float32)
    options = {"update_rule": "linear", "feature_map": "favor", "error_rows": 4}
    assert rapt.linear_attention(x, x, x, query_heads=2, kv_heads=2, **options).relative_error == 0
