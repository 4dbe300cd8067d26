"""Where arrays may lie, and of which libraries they may be. PyTorch's tensors are in torch_cases.py."""

import ml_dtypes
import numpy as np
import pytest
import rapt

TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


Q, K, V = normal(2, 4, 6, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 5)


# --- Strides ---------------------------------------------------------------------------------------


def test_transposed_views_need_no_copy():
    """Arrays [B, S, H, D] as views of [B, H, S, D], and by their layout."""
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K, V))
    want = rapt.attention(Q, K, V, causal=True)
    np.testing.assert_array_equal(rapt.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True), want)
    got = rapt.attention(q, k, v, causal=True, layout="BSHD")
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, want.swapaxes(1, 2))


def test_both_layouts_have_the_same_gradients():
    dy = normal(2, 4, 6, 5)
    want = rapt.attend_backward(Q, K, V, dy)
    swapped = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K, V, dy))
    for name, gradient in rapt.attend_backward(*swapped, layout="BSHD").items():
        np.testing.assert_array_equal(gradient, want[name].swapaxes(1, 2))


def spread(x, axes):
    """The same array with unused elements between those of the axes."""
    shape = [2 * size if axis in axes else size for axis, size in enumerate(x.shape)]
    wide = np.full(shape, np.nan if x.dtype.kind not in "bi" else 1, x.dtype)
    view = wide[tuple(slice(None, None, 2) if axis in axes else slice(None) for axis in range(x.ndim))]
    view[...] = x
    assert not view.flags.c_contiguous
    return view


STRIDED = {
    "q": (Q, (1, 2)),
    "k": (K, (0, 2)),
    "v": (V, (1,)),
    "mask": (normal(2, 4, 6, 12), (0, 1, 2, 3)),
    "attention_bias": (normal(4, 6, 12), (0, 2)),
    "past_key": (normal(2, 2, 3, 8), (1, 2)),
    "past_value": (normal(2, 2, 3, 5), (2,)),
    "head_sink": (normal(4), (0,)),
    "relative_keys": (normal(4, 7, 8), (0, 1)),
    "relative_values": (normal(4, 7, 5), (0, 1)),
    "relative_bias": (normal(4, 7), (0, 1)),
    "cos_cache": (normal(40, 4), (0, 1)),
    "sin_cache": (normal(40, 4), (0, 1)),
    "position_ids": (np.random.default_rng(1).integers(0, 40, (2, 6)), (0, 1)),
    "key_position_ids": (np.random.default_rng(2).integers(0, 40, (2, 9)), (0, 1)),
    "block_mask": (np.ones((2, 4, 3, 6), bool), (0, 1, 2, 3)),
    "global_mask": (np.ones((2, 12), bool), (0, 1)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_every_input_may_have_strides(name):
    arguments = {key: array for key, (array, _) in STRIDED.items()} | {"block_q": 2, "block_k": 2}
    want = rapt.attention(**arguments)
    array, axes = STRIDED[name]
    np.testing.assert_array_equal(rapt.attention(**arguments | {name: spread(array, axes)}), want)


@pytest.mark.parametrize(
    ("name", "array", "more"),
    (
        ("alibi_slopes", np.abs(normal(4)), {}),
        ("alibi_slopes", np.abs(normal(2, 4)), {}),
        ("bias_table", normal(8, 4), {}),
        ("additive_weight", normal(4, 8), {"score_function": "additive"}),
        ("head_alpha", np.array([1.2, 1.5, 2, 1.7], np.float32), {"normalizer": "entmax"}),
        ("relative_query", normal(2, 4, 6, 8), {"relative_keys": normal(1, 7, 8)}),
    ),
)
def test_tables_may_have_strides(name, array, more):
    want = rapt.attention(Q, K, V, **{name: array}, **more)
    axes = tuple(range(array.ndim))[: 3 if array.ndim == 4 else None]
    np.testing.assert_array_equal(rapt.attention(Q, K, V, **{name: spread(array, axes)}, **more), want)


def test_selected_indices_may_have_strides():
    chosen = np.argsort(normal(2, 2, 6, 9), -1)[..., :4].astype(np.int32)
    want = rapt.attention(Q, K, V, selected_indices=chosen)
    np.testing.assert_array_equal(rapt.attention(Q, K, V, selected_indices=spread(chosen, (0, 1, 2))), want)


def test_masks_broadcast_as_in_numpy():
    mask = np.random.default_rng(5).random((2, 4, 6, 9)) < 0.6
    for shape in ((9,), (6, 9), (4, 1, 9), (2, 1, 1, 9), (1, 4, 6, 1), (2, 1, 6, 9)):
        part = mask[tuple(slice(0, size) for size in (1,) * (4 - len(shape)) + shape)].reshape(shape)
        want = rapt.attention(Q, K, V, mask=np.ascontiguousarray(np.broadcast_to(part, mask.shape)))
        np.testing.assert_array_equal(rapt.attention(Q, K, V, mask=part), want)
        np.testing.assert_array_equal(rapt.attention(Q, K, V, mask=np.broadcast_to(part, mask.shape)), want)


def test_keys_of_one_head_broadcast_without_a_copy():
    one = normal(2, 1, 9, 8)
    many = np.broadcast_to(one, (2, 4, 9, 8))
    np.testing.assert_allclose(rapt.attention(Q, many, many), rapt.attention(Q, one, one), atol=2e-6)


def test_unaligned_memory():
    raw = np.zeros(Q.nbytes + 1, np.uint8)
    shifted = raw[1:].view(np.float32).reshape(Q.shape)
    shifted[...] = Q
    np.testing.assert_array_equal(rapt.attention(shifted, K, V), rapt.attention(Q, K, V))


def test_strides_within_an_element_are_an_error():
    records = np.zeros((2, 4, 6, 8), np.dtype([("x", np.float32), ("y", np.uint8)]))
    with pytest.raises(ValueError, match="q has strides .* in bytes; they must be multiples of 4"):
        rapt.attention(records["x"], K, V)


# --- out -------------------------------------------------------------------------------------------


def test_out_receives_the_result():
    want, out = rapt.attention(Q, K, V), np.full((2, 4, 6, 5), np.nan, np.float32)
    assert rapt.attention(Q, K, V, out=out) is out
    np.testing.assert_array_equal(out, want)
    wide = np.full((2, 6, 4, 10), 7, np.float32)
    view = wide.swapaxes(1, 2)[..., :5]
    assert rapt.attention(Q, K, V, out=view) is view
    np.testing.assert_array_equal(view, want)
    assert (wide[..., 5:] == 7).all()
    swapped = np.empty((2, 6, 4, 5), np.float32)
    arguments = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K, V))
    rapt.attention(*arguments, layout="BSHD", out=swapped)
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), want)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    (
        (np.empty((2, 4, 6, 8), np.float32), ValueError, r"out has .* shape \[2, 4, 6, 8\]; it must have float32 and \[2, 4, 6, 5\]"),
        (np.empty((2, 4, 6, 5), np.float64), ValueError, "out has type float64"),
        (np.empty((2, 4, 5, 6), np.float32).swapaxes(2, 3), ValueError, "out is not contiguous"),
        (np.broadcast_to(np.float32(0), (2, 4, 6, 5)), ValueError, "out is read-only"),
        (np.lib.stride_tricks.as_strided(np.empty(5, np.float32), (2, 4, 6, 5), (0, 0, 0, 4)), ValueError, "stride of 0"),
        ([0.0], TypeError, "out is a list"),
    ),
)
def test_an_out_that_does_not_fit_is_an_error(out, error, message):
    with pytest.raises(error, match=message):
        rapt.attention(Q, K, V, out=out)


def test_out_may_not_overlap_an_input():
    x = normal(1, 2, 6, 8)
    with pytest.raises(ValueError, match="out overlaps q"):
        rapt.attention(x, x.copy(), x.copy(), out=x)
    memory = np.zeros((1, 2, 7, 8), np.float32)
    with pytest.raises(ValueError, match="out overlaps v"):
        rapt.attention(x, x.copy(), memory[:, :, 1:], out=memory[:, :, :-1])


# --- DLPack ----------------------------------------------------------------------------------------


class Producer:
    """An array of another library."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class Namespace:
    """A library of the array API."""

    @staticmethod
    def from_dlpack(array):
        return InNamespace(array)


class InNamespace(Producer):
    def __array_namespace__(self):
        return Namespace


@pytest.mark.parametrize("dtype", (np.float32, np.float16, np.float64))
def test_any_producer_of_dlpack(dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    want = rapt.attention(q, k, v)
    got = rapt.attention(Producer(q), Producer(k), Producer(v))
    assert type(got) is np.ndarray and got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(rapt.attention(q, Producer(k), v), want)


def test_strides_of_dlpack():
    swapped = [Producer(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)) for x in (Q, K, V)]
    np.testing.assert_array_equal(rapt.attention(*swapped), rapt.attention(Q, K, V))
    with pytest.raises(ValueError, match="q is not contiguous"):
        rapt.attention(Producer(normal(2, 4, 8, 6).swapaxes(2, 3)), K, V)


def test_results_are_of_the_callers_library():
    result = rapt.attend(InNamespace(Q), K, V, lse=True)
    assert isinstance(result.y, InNamespace) and isinstance(result.lse, InNamespace)
    np.testing.assert_array_equal(result.y.array, rapt.attention(Q, K, V))
    merged = rapt.merge([result, result])
    assert isinstance(merged.y, InNamespace)


def test_other_devices_are_an_error():
    with pytest.raises(ValueError, match="k is on DLPack's device 2:1; rapt computes on the CPU, 1:0"):
        rapt.attention(Q, Producer(K, device=(2, 1)), V)


def test_other_types_of_dlpack_are_an_error():
    with pytest.raises(ValueError, match="q has type 0 of 16 bits and 1 lanes in DLPack"):
        rapt.attention(Producer(Q.astype(np.int16)), K, V)


@pytest.mark.parametrize("x", (1.0, "q", [[1.0]], object(), np.float32(1)))
def test_what_is_no_array_is_a_type_error(x):
    with pytest.raises(TypeError, match=f"q is a {type(x).__name__}; it must be a NumPy array"):
        rapt.attention(x, K, V)


@pytest.mark.parametrize("dtype", TYPES)
def test_inputs_are_not_changed(dtype):
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    copies = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    rapt.attention(*arrays, causal=True)
    for x, copy in zip(arrays, copies):
        np.testing.assert_array_equal(x, copy)
