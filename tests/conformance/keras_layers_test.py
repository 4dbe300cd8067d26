"""Layers with the random weights of Keras' attention layers against these layers, on Keras' backend for NumPy."""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

# The backend imports jax and scipy for convolutions, Fourier transforms and linear algebra. Attention calls none of them.
for absent in "jax jax.lax scipy scipy.linalg keras.src.backend.jax keras.src.backend.jax.math".split():
    sys.modules[absent] = mock.MagicMock()
os.environ["KERAS_BACKEND"] = "numpy"

import keras  # noqa: E402
import make_layers  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402
from attention_client import to_input  # noqa: E402
from rapt_server import RaptServer  # noqa: E402

RNG = np.random.default_rng(26)
BATCH, QUERIES, KEYS = 2, 7, 9
# max|got - want| <= t * max|want|
TOLERANCES = {np.float32: 1e-5, np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}


class Case(NamedTuple):
    """A folder of a model repository, and a layer that is called with query, key, value and the masks by which Keras hides
    keys: `of_pairs` [B, T, S], `of_keys` [B, S], `causal`. Returns Y and the weights, [B, H, T, S] or of one head."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    call: Callable
    sizes: tuple[int, int, int]  # of query, key and value


def randomize(layer):
    layer.set_weights([RNG.standard_normal(w.shape) / np.sqrt(w.shape[0] if w.shape else 1) for w in layer.get_weights()])


def of_heads(layer, config, sizes, tensors_of):
    """A layer with projections for each head, whose kernels are [E, H, D], of the output [H, D, E]."""
    layer.build((BATCH, QUERIES, sizes[0]), (BATCH, KEYS, sizes[2]), (BATCH, KEYS, sizes[1]))
    randomize(layer)
    stored = layer.get_weights()
    kernels = [kernel.reshape(size, -1).T for kernel, size in zip(stored[0:6:2], sizes)]
    kernels.append(stored[6].reshape(-1, stored[6].shape[-1]).T)
    biases = [bias.ravel() for bias in stored[1::2]]

    def call(query, key, value, of_pairs=None, of_keys=None, causal=False):
        masks = {"attention_mask": of_pairs, "value_mask": of_keys, "use_causal_mask": causal}
        return layer(query, value, key, return_attention_scores=True, **masks)

    return Case(config, tensors_of(kernels, biases), call, sizes)


def multihead():
    def tensors(kernels, biases):
        fused = {"in_proj_weight": np.concatenate(kernels[:3]), "in_proj_bias": np.concatenate(biases[:3])}
        return fused | {"out_proj.weight": kernels[3], "out_proj.bias": biases[3]}

    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)
    return of_heads(layer, {"num_attention_heads": 4}, (32, 32, 32), tensors)


def multihead_of_other_sizes():
    def tensors(kernels, biases):
        named = zip(("W_q", "W_k", "W_v", "W_o"), kernels, biases)
        return {k: v for name, kernel, bias in named for k, v in ((f"{name}.weight", kernel), (f"{name}.bias", bias))}

    layer = keras.layers.MultiHeadAttention(num_heads=3, key_dim=6, value_dim=10, output_shape=18)
    return of_heads(layer, {"num_attention_heads": 3}, (32, 20, 24), tensors)


def grouped_query():
    def tensors(kernels, biases):
        named = zip(("q_proj", "k_proj", "v_proj", "o_proj"), kernels, biases)
        return {k: v for name, kernel, bias in named for k, v in ((f"{name}.weight", kernel), (f"{name}.bias", bias))}

    config = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return of_heads(keras.layers.GroupQueryAttention(8, 6, 2), config, (32, 32, 32), tensors)


def of_states(layer, config, tensors, of_query=lambda x: x, of_key=lambda x: x, sizes=(16, 32, 32)):
    """A layer without projections, after others."""

    def call(query, key, value, of_keys=None, causal=False):
        inputs = [of_query(query), value, of_key(key)]
        mask = None if of_keys is None else [None, of_keys]
        y, weights = layer(inputs, mask=mask, return_attention_scores=True, use_causal_mask=causal)
        return y, weights[:, None]

    return Case(config, tensors, call, sizes)


def built(layer, *shape):
    layer.build(*shape)
    randomize(layer)
    return layer


def dense(units, size):
    return built(keras.layers.Dense(units, use_bias=False), (None, size))


def kernel_of(layer):
    return np.asarray(layer.kernel).T


def bahdanau():
    query, key = dense(20, 16), dense(20, 32)
    layer = built(keras.layers.AdditiveAttention(), [(BATCH, QUERIES, 20), (BATCH, KEYS, 20)])
    tensors = {"W1": kernel_of(key), "W2": kernel_of(query), "v": np.asarray(layer.scale)}
    return of_states(layer, {}, tensors, query, key)


def luong_dot():
    layer = built(keras.layers.Attention(use_scale=True), [(BATCH, QUERIES, 32), (BATCH, KEYS, 32)])
    config = {"hidden_size": 32, "rapt": {"naming": "plain", "scale": float(layer.scale)}}
    return of_states(layer, config, {}, sizes=(32, 32, 32))


def luong_general():
    query = dense(32, 16)
    return of_states(keras.layers.Attention(), {}, {"W": kernel_of(query).T}, query)


def luong_concat():
    query, key = dense(20, 16), dense(20, 32)
    layer = built(keras.layers.Attention(score_mode="concat"), [(BATCH, QUERIES, 20), (BATCH, KEYS, 20)])
    v = np.full(20, np.asarray(layer.concat_score_weight), np.float32)  # Keras has one number for all units
    tensors = {"W": np.concatenate([kernel_of(query), kernel_of(key)], axis=1), "v": v}
    return of_states(layer, {"hidden_size": 16}, tensors, query, key)


OF_HEADS = [multihead, multihead_of_other_sizes, grouped_query]
MAKERS = OF_HEADS + [bahdanau, luong_dot, luong_general, luong_concat]


def every(makers):
    return pytest.mark.parametrize("name", [make.__name__ for make in makers])


@pytest.fixture(scope="module")
def cases():
    return {make.__name__: make() for make in MAKERS}


@pytest.fixture(scope="module")
def client(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, case in cases.items():
        make_layers.write_layer(folder / name, case.config, case.tensors)
    with RaptServer(f"--model_repository={folder}") as server:
        with triton.InferenceServerClient(server.grpc_address) as connected:
            yield connected


def check(client, name, case, inputs, masks={}, extra={}, parameters=None):
    """Compares Y and the weights. `masks` go to Keras, `extra` tensors and `parameters` to the server."""
    dtype = inputs["query"].dtype.type
    want = case.call(*(inputs[tensor].astype(np.float32) for tensor in ("query", "key", "value")), **masks)
    result = client.infer(
        name,
        [to_input(tensor, array) for tensor, array in (inputs | extra).items()],
        outputs=[triton.InferRequestedOutput(output) for output in ("Y", "weights")],
        parameters=parameters,
    )
    for output, expected in zip(("Y", "weights"), want):
        got, expected = result.as_numpy(output), np.asarray(expected)
        assert got.shape == expected.shape and got.dtype == dtype
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= TOLERANCES[dtype], f"{output} is off by {error} of the largest number"


def random_inputs(case, queries=QUERIES, dtype=np.float32):
    lengths = queries, KEYS, KEYS
    return {
        tensor: RNG.standard_normal((BATCH, length, size)).astype(dtype)
        for tensor, length, size in zip(("query", "key", "value"), lengths, case.sizes)
    }


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: np.dtype(dtype).name)
@every(MAKERS)
def test_a_layer_is_that_of_keras(client, cases, name, dtype):
    check(client, name, cases[name], random_inputs(cases[name], dtype=dtype))


@every(MAKERS)
def test_a_causal_layer(client, cases, name):
    inputs = random_inputs(cases[name], queries=KEYS)
    check(client, name, cases[name], inputs, {"causal": True}, parameters={"is_causal": True})


@every(MAKERS)
def test_padding(client, cases, name):
    lengths = np.array([4, KEYS])
    masks = {"of_keys": np.arange(KEYS) < lengths[:, None]}
    check(client, name, cases[name], random_inputs(cases[name]), masks, {"nonpad_kv_seqlen": lengths})


@every(OF_HEADS)
def test_a_mask_of_pairs(client, cases, name):
    visible = RNG.random((BATCH, QUERIES, KEYS)) < 0.7
    visible[..., 0] = True
    masks, extra = {"of_pairs": visible}, {"attn_mask": visible[:, None]}
    check(client, name, cases[name], random_inputs(cases[name]), masks, extra)
