"""rapt.attention, attend, attend_backward and merge against the definition in float64 of gradients_test, which shares no
code with the library."""

import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import rapt
from attention_client import assert_close
from gradients_test import CASES, DIFFERENTIABLE, assert_gradients, expected, forward, given_gradients, inputs_of

TYPES = {"FP64": np.float64, "FP32": np.float32, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}
# Beyond the tolerance of the type of lse.
LSE_SLACK = {np.float64: 0, np.float32: 1e-5, np.float16: 1e-5, ml_dtypes.bfloat16: 1e-5}
GRADIENT_TOLERANCES = {"FP64": 1e-12, "FP32": 1e-5, "FP16": 4e-3, "BF16": 3e-2}

# The names of the Open Inference Protocol -> those of the package.
TENSORS = {"Q": "q", "K": "k", "V": "v", "attn_mask": "mask", "nonpad_kv_seqlen": "key_lengths"}
SCALARS = {"is_causal": "causal"}
ROTATES = ("rope", "rotary")


def call_of(name, dtype=np.float64):
    """The case's arrays and parameters, and the same as arguments of rapt.attention."""
    x, parameters = inputs_of(name, dtype)
    options = {TENSORS.get(key, key): value for key, value in x.items()}
    scalars = {SCALARS.get(key, key): value for key, value in parameters.items()}
    left, right = scalars.pop("left_window_size", None), scalars.pop("right_window_size", None)
    if left is not None or right is not None:
        scalars["window"] = (left, right)
    if "key_lengths" in options:
        scalars["alignment"] = "onnx"
    if "dropout_probability" in scalars:
        scalars["dropout"] = scalars.pop("dropout_probability"), scalars.pop("dropout_seed")
    return x, parameters, options | scalars


def definition(x, parameters):
    """y and lse in float64."""
    exact = {key: value.astype(np.float64) if value.dtype.kind not in "bi" else value for key, value in x.items()}
    with np.errstate(all="ignore"):
        return forward(exact, parameters)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_variant_equals_the_definition(name, dtype):
    x, parameters, arguments = call_of(name, dtype)
    y = rapt.attention(**arguments)
    assert y.dtype == dtype
    want, _ = definition(x, parameters)
    if dtype in (np.float64, np.float32) or not any(word in name for word in ROTATES):  # rotated rows are rounded
        assert_close("y", y, np.asarray(want), slack=1e-5 if dtype == np.float32 else 0)
    if "normalizer" not in parameters:
        result = rapt.attend(**arguments, lse=True)
        np.testing.assert_array_equal(result.y, y)
        assert result.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        assert result.lse.shape == y.shape[:3]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_variant_equal_autograd(name):
    x, parameters, arguments = call_of(name)
    given = given_gradients(definition(x, parameters)[0].shape, has_lse=False)
    want = expected(x, parameters, given)
    names = {gradient: "d_mask" if key == "attn_mask" else gradient.replace("dQ", "dq").replace("dK", "dk").replace(
        "dV", "dv") for key, gradient in DIFFERENTIABLE.items()}
    v = arguments.pop("v", None)
    got = rapt.attend_backward(
        arguments.pop("q"), arguments.pop("k"), v, given["dY"], gradients=[names[key] for key in want], **arguments
    )
    assert_gradients({key: got[names[key]] for key in want}, want, 1e-12)


@pytest.mark.parametrize("dtype", TYPES, ids=TYPES)
def test_gradients_with_the_forward_pass_and_by_lse(dtype):
    x, parameters, arguments = call_of("causal lengths", TYPES[dtype])
    shape = definition(x, parameters)[0].shape
    given = given_gradients(shape, has_lse=True, dtype=TYPES[dtype])
    if dtype != "FP64":
        given["dlse"] = given["dlse"].astype(np.float32)
    result = rapt.attend(**arguments, lse=True)
    q, k, v = (arguments.pop(name) for name in "qkv")
    known = {"y": result.y, "lse": result.lse}
    got = rapt.attend_backward(q, k, v, given["dY"], dlse=given["dlse"], **known, **arguments)
    want = expected(x, parameters, {key: value.astype(np.float64) for key, value in given.items()})
    assert_gradients({f"d{key[1].upper()}": value for key, value in got.items()}, want, GRADIENT_TOLERANCES[dtype])


# --- The hand-computed example, and more outputs --------------------------------------------------

X = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], np.float32)[None, None]
WEIGHTS = np.array([[0.50648, 0.18632, 0.30720], [0.18632, 0.50648, 0.30720], [0.27407, 0.27407, 0.45186]])
Y = np.array([[0.8137, 0.4935, 0.5065, 0.1863], [0.4935, 0.8137, 0.1863, 0.5065], [0.7259, 0.7259, 0.2741, 0.2741]])


def test_the_example_of_tutorials():
    result = rapt.attend(X, X, X, scores="weights")
    np.testing.assert_allclose(result.scores[0, 0], WEIGHTS, atol=1e-5)
    np.testing.assert_allclose(result.y[0, 0], Y, atol=5e-5)
    np.testing.assert_array_equal(rapt.attention(X, X, X), result.y)
    assert result.lse is None and result.present_key is None and result.plan.startswith("cpu/")


def test_scores_of_each_step():
    steps = {name: rapt.attend(X, X, X, softcap=0.5, causal=True, scores=name).scores[0, 0]
             for name in ("scores", "softcapped", "biased", "weights")}
    products = X[0, 0] @ X[0, 0].T / 2
    np.testing.assert_allclose(steps["scores"], products, atol=1e-6)
    np.testing.assert_allclose(steps["softcapped"], 0.5 * np.tanh(products / 0.5), atol=1e-6)
    np.testing.assert_array_equal(np.isneginf(steps["biased"]), np.triu(np.ones((3, 3), bool), 1))
    np.testing.assert_allclose(steps["weights"].sum(-1), 1, atol=1e-6)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def test_present_is_the_past_of_the_next_call():
    q, k, v = normal(1, 4, 6, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 5)
    want = rapt.attention(q, k, v, causal=True)
    first = rapt.attend(q[:, :, :4], k[:, :, :4], v[:, :, :4], causal=True, present=True)
    past = {"past_key": first.present_key, "past_value": first.present_value}
    second = rapt.attend(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], causal=True, present=True, **past)
    assert_close("y", np.concatenate([first.y, second.y], 2), want)
    np.testing.assert_array_equal(second.present_key, k)
    np.testing.assert_array_equal(second.present_value, v)


def test_alignment_bottom_right_shows_the_last_query_all_keys():
    q, k, v = normal(1, 1, 2, 8), normal(1, 1, 5, 8), normal(1, 1, 5, 8)
    weights = rapt.attend(q, k, v, causal=True, alignment="bottom_right", scores="weights").scores[0, 0]
    np.testing.assert_array_equal(weights > 0, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
@pytest.mark.parametrize("option", ({"causal": True}, {"window": (2, 1)}, {"alibi": True}, {"rope_theta": 100}), ids=str)
def test_a_padded_row_equals_the_row_alone(option, alignment):
    x, y = normal(2, 4, 9, 8), normal(2, 4, 2, 8)
    options = option | {"alignment": alignment}
    padded = rapt.attention(x, x, x, key_lengths=[9, 5], **options)
    alone = x[1:, :, :5]
    assert_close("y", padded[1:, :, :5], rapt.attention(alone, alone, alone, **options))
    decoded = rapt.attention(y, x, x, key_lengths=[9, 5], **options)
    assert_close("y", decoded[1:], rapt.attention(y[1:], alone, alone, **options))


def test_numbers_may_be_arrays():
    number = np.array(0.5)
    for value in (0.5, 3.0):
        number[()] = value
        for options in ({"scale": number}, {"softcap": number}):
            want = rapt.attention(X, X, X, **dict.fromkeys(options, value))
            np.testing.assert_array_equal(rapt.attention(X, X, X, **options), want)
    keys = np.array(0)
    rapt.attention(X, X, X, window=(keys, 0))
    keys[()] = 2
    np.testing.assert_array_equal(rapt.attention(X, X, X, window=(keys, 0)), rapt.attention(X, X, X, window=(2, 0)))


def test_one_causal_query_over_five_keys():
    """It is the first of them, or the last with bottom_right; a call with 4 keys in the past computes the same."""
    q, k, v = normal(1, 1, 1, 8), normal(1, 1, 5, 8), normal(1, 1, 5, 8)
    np.testing.assert_array_equal(rapt.attention(q, k, v, causal=True), v[:, :, :1])
    last = rapt.attention(q, k, v, causal=True, alignment="bottom_right")
    assert_close("y", last, rapt.attention(q, k, v))
    past = {"past_key": k[:, :, :4], "past_value": v[:, :, :4]}
    assert_close("y", rapt.attention(q, k[:, :, 4:], v[:, :, 4:], causal=True, **past), last)


# --- Axes ------------------------------------------------------------------------------------------


def heads_last(x):
    """[B, H, S, D] as [B, S, H * D]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


@pytest.mark.parametrize("layout", (None, "BSE"))
def test_heads_in_the_last_axis(layout):
    q, k, v, dy = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 6), normal(2, 4, 3, 6)
    past = {"past_key": normal(2, 2, 3, 8), "past_value": normal(2, 2, 3, 6)}
    options = {"causal": True, "alignment": "bottom_right", "mask": np.arange(8) > 1, **past}
    want = rapt.attend(q, k, v, scores="weights", lse=True, present=True, **options)
    rows = [heads_last(x) for x in (q, k, v)]
    heads = {"query_heads": 4, "kv_heads": 2, "layout": layout}
    got = rapt.attend(*rows, scores="weights", lse=True, present=True, **options, **heads)
    np.testing.assert_array_equal(got.y, heads_last(want.y))
    for name in ("scores", "lse", "present_key", "present_value"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    out = np.zeros((2, 3, 30), np.float32)[:, :, 3:27]
    assert rapt.attention(*rows, out=out, **options, **heads) is out
    assert_close("out", out, got.y)
    wide = [np.concatenate([x, x], 2)[:, :, : x.shape[2]] for x in rows]  # rows with gaps between them
    assert_close("y", rapt.attention(*wide, **options, **heads), got.y)
    gradients = rapt.attend_backward(q, k, v, dy, **options)
    of_rows = rapt.attend_backward(*rows, heads_last(dy), **options, **heads)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(of_rows[name], heads_last(gradient))


def test_one_head():
    """[S, D], and [B, S, D] without head counts, whose masks of 3 axes are [B, Sq, T]."""
    q, k, v = normal(3, 8), normal(5, 8), normal(5, 6)
    mask = np.tri(3, 5, 1, bool)
    want = rapt.attend(q[None, None], k[None, None], v[None, None], lse=True, mask=mask)
    got = rapt.attend(q, k, v, lse=True, mask=mask)
    np.testing.assert_array_equal(got.y, want.y[0, 0])
    np.testing.assert_array_equal(got.lse, want.lse)
    dy = normal(3, 6)
    gradients = rapt.attend_backward(q[None, None], k[None, None], v[None, None], dy[None, None], mask=mask)
    for name, gradient in rapt.attend_backward(q, k, v, dy, mask=mask).items():
        np.testing.assert_array_equal(gradient, gradients[name][0, 0])
    masks = np.stack([mask, ~mask])
    both = rapt.attention(*(np.stack([x, x]) for x in (q, k, v)), mask=masks)
    np.testing.assert_array_equal(both, [rapt.attention(q, k, v, mask=one) for one in masks])


def test_errors_of_heads_in_the_last_axis():
    q, k = normal(2, 3, 8), normal(2, 5, 6)
    with pytest.raises(ValueError, match=r"k has shape \[2, 5, 6\]; its last axis must be a multiple of kv_heads, 4"):
        rapt.attention(q, k, k, query_heads=4)
    with pytest.raises(ValueError, match="query_heads is 0; it must be from 1"):
        rapt.attention(q, k, k, query_heads=0)
    with pytest.raises(ValueError, match=r"out has type float32 and shape \[2, 4, 3, 2\]; it must have float32 and \[2, 3, 8\]"):
        rapt.attention(q, q, q, query_heads=4, out=np.zeros((2, 4, 3, 2), np.float32))


def test_a_seed_of_dropout_repeats_the_call():
    q = normal(1, 2, 16, 8)
    first, again, other = (rapt.attention(q, q, q, dropout=(0.5, seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_key_lengths_may_be_a_sequence():
    q, k, v = normal(2, 1, 3, 8), normal(2, 1, 5, 8), normal(2, 1, 5, 8)
    want = rapt.attention(q, k, v, key_lengths=np.array([5, 2]))
    np.testing.assert_array_equal(rapt.attention(q, k, v, key_lengths=[5, 2]), want)
    np.testing.assert_array_equal(rapt.attention(q[1:], k[1:, :, :2], v[1:, :, :2]), want[1:])


# --- Merging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("BHSD", "BSHD"))
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_parts_merge_to_the_whole(dtype, layout):
    shape = (2, 4, 6, 8) if layout == "BHSD" else (2, 6, 4, 8)
    keys = (2, 2, 9, 8) if layout == "BHSD" else (2, 9, 2, 8)
    q, k, v = normal(*shape, dtype=dtype), normal(*keys, dtype=dtype), normal(*keys[::-1], dtype=dtype).reshape(keys)
    lengths = np.array([9, 4])
    whole = rapt.attend(q, k, v, lse=True, layout=layout, key_lengths=lengths)
    parts = []
    for begin, end in ((0, 4), (4, 6), (6, 9)):
        at = (slice(None),) * (2 if layout == "BHSD" else 1) + (slice(begin, end),)
        part_lengths = np.clip(lengths - begin, 0, end - begin)
        parts.append(rapt.attend(q, k[at], v[at], lse=True, layout=layout, key_lengths=part_lengths))
    for merged in (
        rapt.merge(parts, layout=layout),
        rapt.merge([(part.y, part.lse) for part in parts], layout=layout),
        rapt.merge([rapt.merge(parts[:2], layout=layout), parts[2]], layout=layout),
    ):
        assert merged.y.dtype == dtype and merged.lse.dtype == whole.lse.dtype
        exact = rapt.attention(*(x.astype(np.float64) for x in (q, k, v)), layout=layout, key_lengths=lengths)
        slack = 2 * float(ml_dtypes.finfo(dtype).eps)  # parts are rounded to their type
        assert_close("y", merged.y, exact, slack=slack)
        assert_close("lse", merged.lse, whole.lse, slack=LSE_SLACK[dtype])


def test_a_part_without_keys_changes_nothing():
    q = normal(1, 2, 3, 8)
    part = rapt.attend(q, q, q, lse=True)
    nothing = rapt.attend(q, q, q, lse=True, key_lengths=[0])
    assert np.isneginf(nothing.lse).all() and not nothing.y.any()
    for parts in ([part, nothing], [nothing, part]):
        merged = rapt.merge(parts)
        assert_close("y", merged.y, part.y)
    both = rapt.merge([nothing, nothing])
    assert np.isneginf(both.lse).all() and not both.y.any()


def test_merge_names_what_is_missing():
    q = normal(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"parts\[1\] has no lse"):
        rapt.merge([rapt.attend(q, q, q, lse=True), rapt.attend(q, q, q)])
    with pytest.raises(ValueError, match="parts is empty"):
        rapt.merge([])
    with pytest.raises(ValueError, match="layout is 'bshd'; it must be one of BHSD, BSHD"):
        rapt.merge([rapt.attend(q, q, q, lse=True)], layout="bshd")
    with pytest.raises(ValueError, match=r"parts\[1\] has y of shape \[1, 2, 2, 8\]"):
        rapt.merge([rapt.attend(q, q, q, lse=True), rapt.attend(q[:, :, :2], q, q, lse=True)])


# --- Errors ----------------------------------------------------------------------------------------

Q = normal(2, 4, 3, 8)
K = normal(2, 2, 5, 8)
BAD = [
    ({"q": [[1.0]]}, TypeError, "q is a list; it must be a NumPy array"),
    ({"k": None}, TypeError, "k is a NoneType"),
    ({"v": None}, ValueError, "v is missing; without it, v_head_size"),
    ({"q": Q[0]}, ValueError, r"k has shape \[2, 2, 5, 8\]; it must have 3 axes, as q has"),
    ({"k": K[0]}, ValueError, r"k has shape \[2, 5, 8\]; it must be \[B, Hkv, Sk, D\]"),
    ({"q": Q[None]}, ValueError, "q has 5 axes; it must have 2 to 4"),
    ({"query_heads": 4}, ValueError, r"query_heads is given, but q has shape \[2, 4, 3, 8\], not \[B, S, E\]"),
    ({"k": normal(2, 2, 5, 7)}, ValueError, r"k has shape \[2, 2, 5, 7\], \[B, Hkv, Sk, D\]; D must be 8, as in q"),
    ({"v": normal(2, 2, 4, 8)}, ValueError, "Sk must be 5, as in k"),
    ({"k": normal(2, 3, 5, 8), "v": normal(2, 3, 5, 8)}, ValueError, "query has 4 heads, key and value have 3"),
    ({"k": K.astype(np.float64)}, ValueError, "k has type float64; it must be float32"),
    ({"q": Q.astype(np.int32)}, ValueError, "q has type int32; it must be float32 or float16"),
    ({"q": Q.astype(np.complex64)}, ValueError, "q has type complex64; rapt computes in float32"),
    ({"q": Q.astype(">f4")}, ValueError, "q has type >f4"),
    ({"q": Q[..., ::2], "k": K[..., :4]}, ValueError, "q is not contiguous: its last axis has stride 2; use numpy.asc"),
    ({"q": Q[:, :, ::-1]}, ValueError, "q has a negative stride"),
    ({"mask": np.ones((3, 5), np.int64)}, ValueError, "mask has type int64; it must be bool or float32.*mask != 0"),
    ({"mask": np.ones((3, 6), bool)}, ValueError, "mask"),
    ({"mask": np.ones((1, 1, 1, 3, 5), bool)}, ValueError, "its rank must be from 1 to 4"),
    ({"mask": np.broadcast_to(np.float32(0), (2, 4, 3, 5))}, ValueError, "mask is one number that is broadcast"),
    ({"attention_bias": np.ones((3, 5), bool)}, ValueError, "attention_bias has type bool"),
    ({"key_lengths": [5]}, ValueError, r"key_lengths has shape \[1\], \[B\]; B must be 2"),
    ({"key_lengths": [5, 6]}, ValueError, "6"),
    ({"key_lengths": [5, 2.5]}, TypeError, "key_lengths is 2.5; it must be an integer"),
    ({"key_lengths": np.array([5, 2], np.int32)}, ValueError, "key_lengths has type int32; it must be int64"),
    ({"past_key": K}, ValueError, "past_key and past_value belong together"),
    ({"past_value": K}, ValueError, "past_key and past_value belong together"),
    ({"scale": "half"}, TypeError, "scale is 'half'; it must be a number"),
    ({"scale": float("nan")}, ValueError, "scale"),
    ({"scale": np.ones(2)}, ValueError, r"scale has shape \[2\]; it must be one number"),
    ({"softcap": -1}, ValueError, "softcap"),
    ({"window": 3}, TypeError, r"window is 3; it must be \(left, right\)"),
    ({"window": (-1, 0)}, ValueError, "window's left is -1; it must be at least 0, or None for no bound"),
    ({"alignment": "left"}, ValueError, "alignment is 'left'; it must be one of top_left, bottom_right"),
    ({"layout": "BDHS"}, ValueError, "layout is 'BDHS'; it must be one of BHSD, BSHD, BSE"),
    ({"layout": "BSE"}, ValueError, "layout is BSE, which has 3 axes; q has 4"),
    ({"causal": 2}, ValueError, "causal is 2; it must be True or False"),
    ({"causal": "yes"}, TypeError, "causal is 'yes'; it must be True or False"),
    ({"causal": 1.0}, TypeError, "causal is 1.0; it must be True or False"),
    ({"dropout": 0.1}, TypeError, "dropout is 0.1; it must be"),
    ({"dropout": (1.0, 1)}, ValueError, "dropout_probability"),
    ({"dropout": (0.5, -1)}, ValueError, "dropout's seed is -1"),
    ({"max_distance": 2**70}, ValueError, "max_distance is"),
    ({"head_sink": normal(3)}, ValueError, r"head_sink has shape \[3\], \[Hq\]; Hq must be 4, as in q"),
    ({"head_sink": normal(4).astype(np.float16)}, ValueError, "head_sink has type float16; it must be float32"),
    ({"relative_bias": normal(4, 4)}, ValueError, "relative_bias"),
    ({"bias_table": normal(4, 3)}, ValueError, "Hq must be 4"),
    ({"cos_cache": normal(9, 4)}, ValueError, "sin_cache"),
    ({"cos_cache": normal(9, 4), "sin_cache": normal(8, 4)}, ValueError, "rotary_cache_rows must be 9, as in cos_cache"),
    ({"block_mask": np.ones((1, 1, 2, 2), bool)}, ValueError, "block_mask is given without block_q"),
    ({"block_mask": np.ones((1, 1, 2, 2), bool), "block_q": 2, "block_k": 2}, ValueError, "T/block_k must be 3"),
    ({"global_mask": np.ones((2, 4), bool)}, ValueError, "T must be 5"),
    ({"normalizer": "max"}, ValueError, "normalizer is 'max'; it must be one of softmax, sparsemax, entmax15, entmax"),
    ({"normalizer": "entmax"}, ValueError, "alpha"),
    ({"v_head_size": 4}, ValueError, "v and v_head_size are given"),
    ({"is_causal": True}, TypeError, r"there is no option is_causal; did you mean causal\? The options are additive_weight, alibi"),
    ({"atn_mask": None}, TypeError, r"there is no option atn_mask; did you mean mask\? "),
    ({"dropout_p": None}, TypeError, r"there is no option dropout_p; did you mean dropout\? "),
    ({"zzz": None}, TypeError, "there is no option zzz; the options are additive_weight, alibi"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[f"{n} {'+'.join(c)}" for n, (c, _, _) in enumerate(BAD)])
def test_errors_name_the_argument(change, error, message):
    arguments = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(error, match=message):
        rapt.attention(**arguments)


def test_errors_of_more_outputs():
    with pytest.raises(ValueError, match="scores is 'probabilities'; it must be one of scores, softcapped"):
        rapt.attend(Q, K, K, scores="probabilities")
    with pytest.raises((ValueError, NotImplementedError), match="lse"):
        rapt.attend(Q, K, K, normalizer="sparsemax", lse=True)
    with pytest.raises(ValueError, match="y and lse belong together"):
        rapt.attend_backward(Q, K, K, Q, y=Q)
    with pytest.raises(ValueError, match="gradients has 'dx'; the gradients are dq, dk, dv, d_past_key"):
        rapt.attend_backward(Q, K, K, Q, gradients=["dx"])
    with pytest.raises(TypeError, match="gradients is 'dq'; it must be a sequence of names"):
        rapt.attend_backward(Q, K, K, Q, gradients="dq")
    with pytest.raises(TypeError, match="lse is 'yes'; it must be True or False"):
        rapt.attend(Q, K, K, lse="yes")
    with pytest.raises(ValueError, match="gradients has d_mask, but there is no mask"):
        rapt.attend_backward(Q, K, K, Q, gradients=["d_mask"])
    with pytest.raises(ValueError, match="only a float type has a gradient"):
        rapt.attend_backward(Q, K, K, Q, gradients=["d_mask"], mask=np.ones((3, 5), bool))


def test_too_large_is_a_memory_error_or_a_value_error():
    huge = np.lib.stride_tricks.as_strided(Q, (1, 1, 2**40, 8), (0, 0, 0, 4))
    with pytest.raises((MemoryError, ValueError)):
        rapt.attention(huge, huge, huge)


# --- Sizes of 0 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ("batch", "heads", "queries"))
def test_an_empty_output(axis):
    b, h, s = (0 if name == axis else n for name, n in (("batch", 2), ("heads", 2), ("queries", 3)))
    q, k = np.zeros((b, h, s, 8), np.float32), np.zeros((b, 2 if axis != "heads" else 1, 5, 8), np.float32)
    result = rapt.attend(q, k, k, lse=True, scores="weights")
    assert result.y.shape == (b, h, s, 8) and result.lse.shape == (b, h, s) and result.scores.shape == (b, h, s, 5)


def test_no_keys_give_zeros():
    none = np.zeros((2, 2, 0, 8), np.float32)
    result = rapt.attend(Q, none, none, lse=True)
    assert not result.y.any() and np.isneginf(result.lse).all()


def test_a_head_size_of_0_is_an_error():
    empty = np.zeros((1, 1, 3, 0), np.float32)
    with pytest.raises(ValueError, match="head size of query and key is 0"):
        rapt.attention(empty, empty, empty)


def test_results_are_short_texts():
    q = normal(1, 2, 3, 8)
    result = rapt.attend(q, q, q, lse=True)
    assert repr(result) == f"AttendResult(y=<float32 [1, 2, 3, 8]>, lse=<float32 [1, 2, 3]>, plan={result.plan!r})"


def test_every_option_may_be_none():
    options = dict.fromkeys(rapt.Options.__annotations__)
    np.testing.assert_array_equal(rapt.attention(Q, K, K, **options), rapt.attention(Q, K, K))


NUMBERS = {-0.1: "-0.1", -1e-7: "-1e-07", -1234567.0: "-1.23457e+06", -0.000123456789: "-0.000123457", -1e300: "-1e+300"}


def messages_of_numbers():
    x = np.zeros((1, 1, 1, 1), np.float32)
    for number, text in NUMBERS.items():
        with pytest.raises(ValueError, match=rf"softcap is {re.escape(text)};"):
            rapt.attention(x, x, x, softcap=number)


def test_numbers_in_messages():
    messages_of_numbers()


def test_numbers_in_messages_do_not_depend_on_the_locale(tmp_path):
    """In a process of its own: German has a decimal comma."""
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"], capture_output=True)
    if made.returncode != 0:
        pytest.skip("Debian's package locales is missing")
    code = "import locale, attention_test as t; locale.setlocale(locale.LC_ALL, 'de_DE.UTF-8'); t.messages_of_numbers()"
    code += "; assert locale.str(0.5) == '0,5'"
    folder = pathlib.Path(__file__).parent
    subprocess.run(
        [sys.executable, "-B", "-c", code], check=True, cwd=folder, env=os.environ | {"LOCPATH": str(tmp_path), "LC_ALL": ""}
    )
