"""Gradients by the model `attention_backward` against reverse-mode differentiation by autograd, in float64, of a forward
pass that is written here from the definition in docs/variants.md and docs/gradients.md."""

import autograd
import autograd.numpy as anp
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from attention_client import to_input
from autograd.tracer import getval
from rapt_server import RaptServer

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, SIZE, VALUE_SIZE = 2, 4, 2, 5, 7, 8, 6

# --- The forward pass -----------------------------------------------------------------------------


def positions(x, parameters):
    """The position of each query among the keys, [B, Sq, 1], and of each key, [1, 1, T]."""
    past = x["past_key"].shape[2] if "past_key" in x else 0
    queries, keys = x["Q"].shape[2], past + x["K"].shape[2]
    offset = np.full(x["Q"].shape[0], past)
    if "nonpad_kv_seqlen" in x and not past:
        offset = x["nonpad_kv_seqlen"] - queries
    return np.arange(queries)[None, :, None] + offset[:, None, None], np.arange(keys)[None, None, :]


def repeat_blocks(mask, queries, keys, block_q, block_k):
    return np.repeat(np.repeat(mask, block_q, 2), block_k, 3)[:, :, :queries, :keys]


def visible(x, parameters):
    """[B, Hq, Sq, T]"""
    p, j = positions(x, parameters)
    batch, heads, queries, _ = x["Q"].shape
    keys = j.size
    near = np.ones((batch, queries, keys), bool)
    left, right = (parameters.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if left >= 0:
        near &= j >= p - left
    if right >= 0:
        near &= j <= p + right
    near |= j < parameters.get("prefix_keys", 0)
    if "global_mask" in x:
        near |= x["global_mask"][:, None, :]
        inside = (p >= 0) & (p < keys)
        near |= inside & np.take_along_axis(x["global_mask"], np.where(inside, p, 0)[:, :, 0], 1)[:, :, None]
    seen = np.broadcast_to(near[:, None], (batch, heads, queries, keys)).copy()
    if parameters.get("is_causal"):
        seen &= (j <= p)[:, None]
    if "nonpad_kv_seqlen" in x:
        seen &= (j < keys - x["K"].shape[2] + x["nonpad_kv_seqlen"][:, None, None])[:, None]
    mask = x.get("attn_mask")
    if mask is not None:
        seen &= mask if mask.dtype == bool else getval(mask) != -np.inf
    if "block_mask" in x:
        seen &= repeat_blocks(x["block_mask"], queries, keys, parameters["block_q"], parameters["block_k"])
    if "selected_indices" in x:
        selected = np.zeros((batch, KV_HEADS, queries, keys), bool)
        for b, h, i, n in np.ndindex(x["selected_indices"].shape):
            if (key := x["selected_indices"][b, h, i, n]) >= 0:
                selected[b, h, i, key] = True
        seen &= np.repeat(selected, heads // KV_HEADS, 1)
    return seen


def rotated(rows, angles, size, interleaved):
    """`angles`: [B or 1, S, size / 2]"""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (rows[..., 0:size:2], rows[..., 1:size:2]) if interleaved else (
        rows[..., : size // 2], rows[..., size // 2 : size])
    one, two = first * cos - second * sin, first * sin + second * cos
    joined = anp.stack([one, two], -1) if interleaved else anp.stack([one, two], -2)
    return anp.concatenate([anp.reshape(joined, (*rows.shape[:-1], size)), rows[..., size:]], -1)


def rotate(x, parameters, q, k):
    p, j = positions(x, parameters)
    size = parameters.get("rotary_embedding_dim", 0) or q.shape[-1]
    past = j.size - k.shape[2]
    if "rope_theta" in parameters:
        inverse = parameters["rope_theta"] ** (-2 * np.arange(size // 2) / size)
        of_queries, of_keys = p * inverse, j[:, :, past:].transpose(0, 2, 1) * inverse
    elif "cos_cache" in x:
        table = np.arctan2(x["sin_cache"], x["cos_cache"])
        of_queries = table[x["position_ids"] if "position_ids" in x else p[:, :, 0]]
        of_keys = table[x["key_position_ids"] if "key_position_ids" in x else j[:, 0, past:]]
    else:
        return q, k
    q = rotated(q, of_queries, size, parameters.get("interleaved", False))
    if parameters.get("rotary_keys", True):
        k = rotated(k, of_keys, size, parameters.get("interleaved", False))
    return q, k


def bucket(distance, count, bidirectional, most):
    """T5's bucket of j - p."""
    first = 0
    if bidirectional:
        count //= 2
        first = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    return first + min(count - 1, exact + int(np.log(distance / exact) / np.log(most / exact) * (count - exact)))


def relative(x, parameters):
    """What is added to the scores by distance, [B or 1, Hq, Sq, T]."""
    p, j = positions(x, parameters)
    distance = j - p
    if "alibi_slopes" in x:
        slopes = x["alibi_slopes"] if x["alibi_slopes"].ndim == 2 else x["alibi_slopes"][None]
        return -slopes[:, :, None, None] * np.abs(distance)[:, None]
    if "bias_table" in x:
        buckets = np.vectorize(bucket)(
            distance,
            x["bias_table"].shape[0],
            parameters.get("is_bidirectional", False),
            parameters.get("max_distance", 128),
        )
        return anp.transpose(x["bias_table"][buckets], (0, 3, 1, 2))
    if "relative_bias" in x:
        return anp.transpose(x["relative_bias"][:, clipped(x["relative_bias"], distance)], (1, 0, 2, 3))
    return 0.0


def clipped(table, distance):
    most = table.shape[1] // 2
    return most + np.clip(distance, -most, most)


def philox(seed, counter):
    """Four draws of Philox4x32-10."""
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def dropout(shape, parameters):
    probability = parameters.get("dropout_probability", 0)
    if not probability:
        return 1.0
    kept = np.zeros(shape)
    for b, h, i, j in np.ndindex(shape):
        draw = philox(parameters["dropout_seed"], [j // 4, i, h, b])[j % 4]
        kept[b, h, i, j] = draw >= probability * 2**32
    return kept / (1 - probability)


def entmax(scores, seen, alpha):
    """By bisection of the threshold, then one differentiable step of Newton's method, which has the threshold's exact
    derivative. `alpha`: [Hq, 1, 1] or a number; 1 is not allowed."""
    power = 1 / (alpha - 1)

    def weights_of(s, threshold):
        base = (alpha - 1) * s - threshold
        positive = seen & (getval(base) > 0)
        return anp.where(positive, anp.where(positive, base, 1.0) ** power, 0.0), positive, base

    values = np.where(seen, getval(scores), -1e30) * np.ones_like(power)
    high = ((alpha - 1) * values).max(-1, keepdims=True)
    low = high - 1
    for _ in range(100):
        middle = (low + high) / 2
        above = weights_of(values, middle)[0].sum(-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    weights, positive, base = weights_of(scores, low)
    slope = -np.where(positive, power * np.where(positive, getval(base), 1.0) ** (power - 1), 0).sum(-1, keepdims=True)
    threshold = low - (anp.sum(weights, -1, keepdims=True) - 1) / np.where(slope == 0, 1, slope)
    return weights_of(scores, threshold)[0]


def forward(x, parameters):
    """Y and lse."""
    q, k = rotate(x, parameters, x["Q"], x["K"])
    v = x["V"] if "V" in x else x["K"][..., : parameters["v_head_size"]]
    if "past_key" in x:
        k = anp.concatenate([x["past_key"], k], 2)
        v = anp.concatenate([x["past_value"], v], 2)
    group = q.shape[1] // k.shape[1]
    k, v = anp.repeat(k, group, 1), anp.repeat(v, group, 1)
    seen = visible(x, parameters)
    k_seen = anp.where(seen.any((0, 1, 2))[None, None, :, None], k, 0.0)
    p, j = positions(x, parameters)
    if "additive_weight" in x:
        t = anp.tanh(q[:, :, :, None] + k_seen[:, :, None])
        s = anp.sum(t * x["additive_weight"][None, :, None, None], -1) * parameters.get("scale", 1.0)
    else:
        s = anp.einsum("bhid,bhjd->bhij", q, k_seen)
        if "relative_keys" in x:
            rows = x["relative_keys"][:, clipped(x["relative_keys"], j - p)]  # [H, B, Sq, T, D]
            rows = rows * np.ones((q.shape[1], 1, 1, 1, 1))
            s = s + anp.einsum("bhid,hbijd->bhij", x.get("relative_query", q), rows * np.ones((1, q.shape[0], 1, 1, 1)))
        s = s * parameters.get("scale", q.shape[-1] ** -0.5)
    if parameters.get("softcap"):
        s = parameters["softcap"] * anp.tanh(s / parameters["softcap"])
    for name in ("attn_mask", "attention_bias"):
        if name in x and x[name].dtype != bool:
            s = s + anp.where(getval(x[name]) == -np.inf, 0.0, x[name])
    s = s + relative(x, parameters)
    if parameters.get("normalizer", "softmax") != "softmax":
        alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(parameters["normalizer"]) or x.get("head_alpha", parameters.get("alpha"))
        alpha = np.asarray(alpha).reshape(-1, 1, 1)
        weights, lse = entmax(s, seen, alpha), None
    else:
        most = np.where(seen, getval(s), -1e300).max(-1, keepdims=True)
        sink = None
        if "head_sink" in x:
            sink = x["head_sink"][None, :, None, None]
            most = np.maximum(most, getval(sink))
        e = anp.where(seen, anp.exp(anp.where(seen, s - most, 0.0)), 0.0)
        total = anp.sum(e, -1, keepdims=True)
        if sink is not None:
            total = total + anp.exp(sink - most)
        some = getval(total) > 0
        weights = e / anp.where(some, total, 1.0)
        lse = (anp.log(anp.where(some, total, 1.0)) + np.where(some, most, 0.0))[..., 0]
        lse = anp.where(some[..., 0], lse, 0.0)
    weights = weights * dropout(seen.shape, parameters)
    y = anp.einsum("bhij,bhjd->bhid", weights, anp.where(seen.any((0, 1, 2))[None, None, :, None], v, 0.0))
    if "relative_values" in x:
        rows = x["relative_values"][:, clipped(x["relative_values"], j - p)]
        rows = rows * np.ones((q.shape[1], q.shape[0], 1, 1, 1))
        y = y + anp.einsum("bhij,hbijd->bhid", weights, rows)
    return y, lse


# --- Cases ----------------------------------------------------------------------------------------

DIFFERENTIABLE = {name: f"d_{name}" for name in (
    "attn_mask", "past_key", "past_value", "attention_bias", "head_sink", "alibi_slopes", "bias_table",
    "relative_bias", "relative_keys", "relative_values", "relative_query", "additive_weight")}
DIFFERENTIABLE |= {"Q": "dQ", "K": "dK", "V": "dV"}


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


def bools(*shape):
    return np.random.default_rng(shape).random(shape) < 0.7


def with_minus_infinity(mask):
    return np.where(np.random.default_rng(1).random(mask.shape) < 0.2, -np.inf, mask)


def lower_angles(rows, size):
    angles = np.arange(rows)[:, None] * 10000.0 ** (-2.0 * np.arange(size // 2) / size)
    return {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}


PAST = {"past_key": normal(BATCH, KV_HEADS, 3, SIZE), "past_value": normal(BATCH, KV_HEADS, 3, VALUE_SIZE)}
LENGTHS = {"nonpad_kv_seqlen": np.array([6, 2])}
SELECTED = np.array([[[np.random.default_rng(i).permutation(KEYS)[:4] for i in range(QUERIES)]] * KV_HEADS] * BATCH)
SELECTED[:, :, 1, 2:] = -1

# name: inputs beside Q, K and V, and parameters. An input of None is not sent.
CASES = {
    "plain": ({}, {}),
    "scale": ({}, {"scale": 0.7}),
    "causal": ({}, {"is_causal": True}),
    "causal past": (PAST, {"is_causal": True}),
    "lengths": (LENGTHS, {}),
    "causal lengths": (LENGTHS, {"is_causal": True}),
    "past and lengths": (PAST | LENGTHS, {}),
    "window": ({}, {"left_window_size": 2, "right_window_size": 1}),
    "causal window": (PAST, {"left_window_size": 2, "is_causal": True}),
    "bool mask": ({"attn_mask": bools(BATCH, 1, QUERIES, KEYS)}, {}),
    "rows without keys": ({"attn_mask": np.zeros((BATCH, HEADS, QUERIES, KEYS), bool)}, {}),
    "float mask": ({"attn_mask": normal(BATCH, HEADS, QUERIES, KEYS)}, {}),
    "mask of -inf": ({"attn_mask": with_minus_infinity(normal(QUERIES, KEYS))}, {}),
    "mask by head": ({"attn_mask": normal(HEADS, 1, KEYS)}, {"is_causal": True}),
    "mask by row": ({"attn_mask": normal(BATCH, 1, QUERIES, 1)}, {}),
    "softcap": ({"attn_mask": normal(QUERIES, KEYS)}, {"softcap": 1.5}),
    "bias": ({"attention_bias": normal(1, HEADS, QUERIES, KEYS), "attn_mask": bools(QUERIES, KEYS)}, {}),
    "sink": ({"head_sink": normal(HEADS)}, {"is_causal": True}),
    "sink alone": ({"head_sink": normal(HEADS), "attn_mask": np.zeros((QUERIES, KEYS), bool)}, {}),
    "alibi": ({"alibi_slopes": normal(HEADS)}, {"is_causal": True}),
    "alibi by row": ({"alibi_slopes": normal(BATCH, HEADS)}, {}),
    "t5": ({"bias_table": normal(8, HEADS)}, {"max_distance": 6, "is_bidirectional": True}),
    "t5 causal": ({"bias_table": normal(6, HEADS)} | PAST, {"max_distance": 5, "is_causal": True}),
    "relative bias": ({"relative_bias": normal(HEADS, 5)}, {}),
    "relative bias of all heads": ({"relative_bias": normal(1, 7)} | LENGTHS, {"is_causal": True}),
    "relative keys": ({"relative_keys": normal(HEADS, 5, SIZE)}, {}),
    "relative keys and values": (
        {"relative_keys": normal(1, 7, SIZE), "relative_values": normal(HEADS, 5, VALUE_SIZE)}, {"is_causal": True}),
    "transformer-xl": (
        {"relative_keys": normal(HEADS, 9, SIZE), "relative_query": normal(BATCH, HEADS, QUERIES, SIZE)}, {}),
    "rope": ({}, {"rope_theta": 100.0}),
    "rope of a part, interleaved": (PAST, {"rope_theta": 50.0, "rotary_embedding_dim": 4, "interleaved": True}),
    "rotary caches": (lower_angles(KEYS, SIZE), {"is_causal": True}),
    "rotary queries": (lower_angles(KEYS, SIZE), {"rotary_keys": False}),
    "rotary positions": (
        lower_angles(20, SIZE)
        | {"position_ids": np.arange(BATCH * QUERIES).reshape(BATCH, QUERIES),
           "key_position_ids": 3 + np.arange(BATCH * KEYS).reshape(BATCH, KEYS)}, {}),
    "additive": ({"additive_weight": normal(HEADS, SIZE)}, {"score_function": "additive"}),
    "additive of all heads": (
        {"additive_weight": normal(1, SIZE), "attn_mask": normal(QUERIES, KEYS)},
        {"score_function": "additive", "scale": 0.5, "softcap": 2.0, "is_causal": True}),
    "sparsemax": ({"attn_mask": normal(QUERIES, KEYS)}, {"normalizer": "sparsemax"}),
    "entmax15": (PAST, {"normalizer": "entmax15", "is_causal": True}),
    "entmax": ({"relative_bias": normal(HEADS, 5)}, {"normalizer": "entmax", "alpha": 1.25}),
    "entmax by head": ({"head_alpha": np.array([1.2, 1.5, 2.0, 1.75])}, {"normalizer": "entmax"}),
    "entmax of relative vectors": ({"relative_keys": normal(HEADS, 5, SIZE)}, {"normalizer": "entmax15"}),
    "blocks": (
        {"block_mask": bools(BATCH, HEADS, 3, 3)}, {"block_q": 2, "block_k": 3}),
    "selected keys": ({"selected_indices": SELECTED.astype(np.int32)}, {}),
    "prefix": ({}, {"is_causal": True, "left_window_size": 1, "prefix_keys": 2}),
    "global keys": ({"global_mask": bools(BATCH, KEYS)}, {"left_window_size": 1, "right_window_size": 1}),
    "values in keys": ({"V": None}, {"v_head_size": VALUE_SIZE}),
    "dropout": ({}, {"dropout_probability": 0.3, "dropout_seed": 12345678901}),
    "dropout of entmax": ({}, {"dropout_probability": 0.3, "dropout_seed": 7, "normalizer": "entmax15"}),
    "all at once": (
        PAST | LENGTHS
        | {"attn_mask": with_minus_infinity(normal(HEADS, QUERIES, KEYS + 3)), "head_sink": normal(HEADS),
           "attention_bias": normal(BATCH, 1, 1, KEYS + 3), "relative_bias": normal(HEADS, 7)},
        {"softcap": 3.0, "rope_theta": 30.0, "left_window_size": 4, "is_causal": True,
         "dropout_probability": 0.2, "dropout_seed": 3}),
}


def inputs_of(name, dtype=np.float64):
    more, parameters = CASES[name]
    x = {
        "Q": normal(BATCH, HEADS, QUERIES, SIZE),
        "K": normal(BATCH, KV_HEADS, KEYS, SIZE) * 0.9,
        "V": normal(BATCH, KV_HEADS, KEYS, VALUE_SIZE),
    } | more
    x = {key: value for key, value in x.items() if value is not None}
    x = {key: value.astype(dtype) if value.dtype == np.float64 else value for key, value in x.items()}
    return x, parameters


def given_gradients(y_shape, has_lse, dtype=np.float64):
    dy = normal(*y_shape)[..., ::-1].astype(dtype)
    return {"dY": np.ascontiguousarray(dy)} | ({"dlse": normal(*y_shape[:3])} if has_lse else {})


def wanted(x):
    return {name: gradient for name, gradient in DIFFERENTIABLE.items() if name in x and x[name].dtype != bool}


def expected(x, parameters, given):
    """By autograd, of sum(Y dY) + sum(lse dlse)."""
    x = {key: value.astype(np.float64) if value.dtype.kind not in "bi" else value for key, value in x.items()}
    names = list(wanted(x))

    def loss(arrays):
        y, lse = forward(x | dict(zip(names, arrays)), parameters)
        total = anp.sum(y * given["dY"].astype(np.float64))
        return total + anp.sum(lse * given["dlse"]) if "dlse" in given else total

    gradients = autograd.grad(loss)([x[name] for name in names])
    return {DIFFERENTIABLE[name]: gradient for name, gradient in zip(names, gradients)}


def differentiate(client, inputs, parameters, gradients):
    result = client.infer(
        "attention_backward",
        [to_input(name, array) for name, array in inputs.items()],
        outputs=[triton.InferRequestedOutput(name) for name in gradients],
        parameters=parameters,
    )
    return {name: result.as_numpy(name) for name in gradients}


def attend(client, x, parameters):
    """Y and lse of the forward pass."""
    result = client.infer(
        "attention",
        [to_input(name, array) for name, array in x.items()],
        outputs=[triton.InferRequestedOutput(name) for name in ("Y", "lse")],
        parameters=parameters,
    )
    return {"Y": result.as_numpy("Y"), "lse": result.as_numpy("lse")}


def assert_gradients(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert got[name].shape == gradient.shape, name
        assert np.isfinite(got[name].astype(np.float64)).all(), name
        error = np.abs(got[name].astype(np.float64) - gradient).max()
        # Terms of about 1 cancel.
        assert error <= tolerance * max(np.abs(gradient).max(), 0.05 * VALUE_SIZE), f"{name}: {error}"


@pytest.fixture(scope="session", params=["auto", "reference"])
def gradient_client(request):
    """The backend auto is the CPU's kernels, and for vectors by distance the reference."""
    with RaptServer(f"--backend={request.param}") as running:
        with triton.InferenceServerClient(running.grpc_address) as connected:
            yield connected


# --- Tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(gradient_client, name):
    x, parameters = inputs_of(name)
    given = given_gradients((BATCH, HEADS, QUERIES, VALUE_SIZE), has_lse=False)
    want = expected(x, parameters, given)
    got = differentiate(gradient_client, x | given, parameters, list(want))
    assert_gradients(got, want, 1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if "normalizer" not in CASES[name][1]])
def test_equals_autograd_with_the_forward_pass_and_dlse(gradient_client, name):
    x, parameters = inputs_of(name)
    given = given_gradients((BATCH, HEADS, QUERIES, VALUE_SIZE), has_lse=True)
    want = expected(x, parameters, given)
    known = attend(gradient_client, x, parameters)
    got = differentiate(gradient_client, x | given | known, parameters, list(want))
    assert_gradients(got, want, 1e-12)
    recomputed = differentiate(gradient_client, x | given, parameters, list(want))
    assert_gradients(recomputed, {key: value.astype(np.float64) for key, value in got.items()}, 1e-12)


@pytest.mark.parametrize("name", ["plain", "causal", "causal lengths", "float mask", "softcap", "sink", "t5", "rope",
                                  "additive", "entmax15", "blocks", "dropout"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)],
    ids=["FP32", "FP16", "BF16"])
def test_other_types_are_as_exact_as_promised(gradient_client, name, dtype, tolerance):
    x, parameters = inputs_of(name, dtype)
    given = given_gradients((BATCH, HEADS, QUERIES, VALUE_SIZE), has_lse=False, dtype=dtype)
    want = expected(x, parameters, given)
    got = differentiate(gradient_client, x | given, parameters, list(want))
    rotations = 2 if "rope" in name else 1  # rotated rows are rounded to their type
    assert_gradients(got, want, rotations * tolerance)


def test_hidden_keys_and_queries_have_gradients_of_0(gradient_client):
    x, parameters = inputs_of("causal lengths")
    x["K"], x["V"] = x["K"].copy(), x["V"].copy()
    x["K"][1, :, 2:] = np.nan  # batch row 1 has two keys; its queries 0 to 2 see none
    x["V"][1, :, 2:] = np.inf
    given = given_gradients((BATCH, HEADS, QUERIES, VALUE_SIZE), has_lse=False)
    got = differentiate(gradient_client, x | given, parameters, ["dQ", "dK", "dV"])
    assert not got["dK"][1, :, 2:].any() and not got["dV"][1, :, 2:].any()
    assert not got["dQ"][1, :, :3].any()
    assert all(np.isfinite(gradient).all() for gradient in got.values())


def test_gradients_of_the_scores_of_a_row_sum_to_0(gradient_client):
    x, parameters = inputs_of("float mask")
    given = given_gradients((BATCH, HEADS, QUERIES, VALUE_SIZE), has_lse=False)
    got = differentiate(gradient_client, x | given, parameters, ["d_attn_mask"])
    np.testing.assert_allclose(got["d_attn_mask"].sum(-1), 0, atol=1e-13)


def test_equal_values_give_no_gradients_of_queries_and_keys(gradient_client):
    x, parameters = inputs_of("causal")
    x["V"] = np.broadcast_to(x["V"][:, :, :1], x["V"].shape).copy()
    given = given_gradients((BATCH, HEADS, QUERIES, VALUE_SIZE), has_lse=False)
    got = differentiate(gradient_client, x | given, parameters, ["dQ", "dK"])
    for gradient in got.values():
        np.testing.assert_allclose(gradient, 0, atol=1e-13)
