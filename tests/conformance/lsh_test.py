"""The model lsh_attention against numpy, over a running server."""

import numpy as np
import pytest
import tritonclient.grpc as triton
from attention_client import to_input
from lsh_oracle import lsh_attention


def infer(client, arrays, outputs=("Y",), **parameters):
    result = client.infer(
        "lsh_attention",
        [to_input(name, array) for name, array in arrays.items()],
        outputs=[triton.InferRequestedOutput(name) for name in outputs],
        parameters=parameters,
    )
    return [result.as_numpy(name) for name in outputs]


def tensors(seed, tokens=96, heads=3, size=16, value_size=24, dtype=np.float32):
    random = np.random.default_rng(seed)
    qk = random.standard_normal((2, heads, tokens, size)).astype(dtype)
    v = random.standard_normal((2, heads, tokens, value_size)).astype(dtype)
    return {"Q": qk, "V": v}, random


def assert_close(got, want):
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}[str(got.dtype)]
    assert got.shape == want.shape
    assert np.abs(got.astype(np.float64) - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("lengths", (None, (96, 50), (0, 1)), ids=("full", "padded", "empty"))
@pytest.mark.parametrize("causal", (False, True), ids=("both", "causal"))
@pytest.mark.parametrize("rounds", (1, 4))
@pytest.mark.parametrize("heads", (1, 3), ids=("shared", "each"))
def test_reformer(backend_client, heads, rounds, causal, lengths):
    arrays, random = tensors(1)
    arrays["rotations"] = random.standard_normal((heads, 16, rounds, 4)).astype(np.float32)
    if lengths is not None:
        arrays["nonpad_kv_seqlen"] = np.array(lengths)
    y, buckets = infer(
        backend_client,
        arrays,
        ("Y", "buckets"),
        num_hashes=rounds,
        num_buckets=8,
        chunk_length=12,
        is_causal=causal,
    )
    want, want_buckets = lsh_attention(
        arrays["Q"], arrays["V"], arrays["rotations"], 12, is_causal=causal, lengths=lengths
    )
    np.testing.assert_array_equal(buckets, want_buckets)
    assert buckets.dtype == np.int32
    assert_close(y, want)


@pytest.mark.parametrize("lengths", (None, (96, 50)), ids=("full", "padded"))
@pytest.mark.parametrize("rounds", (1, 3))
def test_simple(backend_client, rounds, lengths):
    arrays, random = tensors(2)
    arrays["K"] = random.standard_normal(arrays["Q"].shape).astype(np.float32)
    arrays["rotations"] = random.standard_normal((1, 16, rounds, 16)).astype(np.float32)
    if lengths is not None:
        arrays["nonpad_kv_seqlen"] = np.array(lengths)
    y, buckets = infer(
        backend_client, arrays, ("Y", "buckets"), form="simple", num_hashes=rounds, chunk_length=16
    )
    want, want_buckets = lsh_attention(
        arrays["Q"], arrays["V"], arrays["rotations"], 16, k=arrays["K"], lengths=lengths
    )
    np.testing.assert_array_equal(buckets, want_buckets)
    assert_close(y, want)


@pytest.mark.parametrize(("before", "after"), ((0, 0), (2, 1), (1, 2)))
def test_neighbours(backend_client, before, after):
    arrays, random = tensors(3)
    arrays["rotations"] = random.standard_normal((1, 16, 2, 4)).astype(np.float32)
    parameters = {"num_hashes": 2, "num_buckets": 8, "chunk_length": 8, "scale": 0.4}
    (y,) = infer(backend_client, arrays, chunks_before=before, chunks_after=after, **parameters)
    want, _ = lsh_attention(
        arrays["Q"], arrays["V"], arrays["rotations"], 8, before=before, after=after, scale=0.4
    )
    assert_close(y, want)


def test_one_chunk_is_exact_attention_without_oneself(backend_client):
    arrays, _ = tensors(5, tokens=20)
    (y,) = infer(backend_client, arrays, chunk_length=32)
    assert_close(y, lsh_attention(arrays["Q"], arrays["V"], np.zeros((1, 16, 1, 1)), 32)[0])
