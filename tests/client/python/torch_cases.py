"""PyTorch's tensors, rapt.torch and models of transformers with random weights. `./dev test torch` runs it."""

import inspect
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import rapt
import rapt.torch
import torch
import transformers
from rapt.torch._operators import Problem
from rapt_server import RaptServer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

F = torch.nn.functional
ATTENTION = rapt.torch.scaled_dot_product_attention
TYPES = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def normal(*shape, dtype=torch.float32, requires_grad=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return x.requires_grad_(requires_grad)


# --- Tensors in rapt's own functions ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_results_are_tensors(dtype):
    q, k = normal(2, 4, 6, 8, dtype=dtype), normal(2, 2, 9, 8, dtype=dtype)
    result = rapt.attend(q, k, k, lse=True, scores="weights", present=True)
    assert all(isinstance(x, torch.Tensor) for x in (result.y, result.lse, result.scores, result.present_key))
    assert result.y.dtype == dtype and result.scores.dtype == dtype
    want = F.scaled_dot_product_attention(q.double(), k.double(), k.double(), enable_gqa=True)
    torch.testing.assert_close(result.y.double(), want, rtol=TYPES[dtype], atol=TYPES[dtype])
    out = torch.empty_like(result.y)
    assert rapt.attention(q, k, k, out=out) is out
    torch.testing.assert_close(out, rapt.attention(q, k, k), rtol=0, atol=0)
    torch.testing.assert_close(rapt.merge([result, result]).y, result.y)


def test_transposed_tensors_need_no_copy():
    x = normal(2, 6, 4, 8)
    want = rapt.attention(*(x.transpose(1, 2).contiguous(),) * 3)
    torch.testing.assert_close(rapt.attention(*(x.transpose(1, 2),) * 3), want, rtol=0, atol=0)
    torch.testing.assert_close(rapt.attention(x, x, x, layout="BSHD").transpose(1, 2), want, rtol=0, atol=0)


def test_kinds_may_mix():
    q = normal(1, 2, 5, 8)
    mask = np.tril(np.ones((5, 5), bool))
    torch.testing.assert_close(rapt.attention(q, q.numpy(), q, mask=mask), rapt.attention(q, q, q, causal=True))
    assert isinstance(rapt.attention(q.numpy(), q, q), np.ndarray)


@pytest.mark.parametrize(
    ("q", "error", "message"),
    (
        (normal(1, 2, 5, 8).requires_grad_(), RuntimeError, "q requires a gradient.*rapt.torch.scaled_dot_product_attention"),
        (torch.empty(1, 2, 5, 8, device="meta"), ValueError, r"q is on meta; rapt computes on the CPU: use q.cpu\(\)"),
        (torch.zeros(1, 2, 5, 8).to_sparse(), ValueError, "q is torch.sparse_coo; it must be strided"),
        (torch.zeros(1, 2, 5, 8, dtype=torch.int64), ValueError, "q has type int64; it must be float32"),
        (torch.zeros(1, 2, 5, 8, dtype=torch.complex64), ValueError, "q has type torch.complex64"),
        (torch.zeros(1, 2, 5, 8, dtype=torch.complex64).conj().imag, ValueError, "q is not contiguous|q is a negative view"),
        (normal(1, 2, 8, 5).transpose(2, 3), ValueError, r"q is not contiguous.* or contiguous\(\) of a PyTorch tensor"),
    ),
    ids=str,
)
def test_errors(q, error, message):
    k = normal(1, 2, 5, 8)
    with pytest.raises(error, match=message):
        rapt.attention(q, k, k)


def test_without_gradients_a_parameter_may_be_used():
    q = normal(1, 2, 5, 8).requires_grad_()
    with torch.no_grad():
        assert not rapt.attention(q, q, q).requires_grad


# --- scaled_dot_product_attention ------------------------------------------------------------------

CASES = {
    "plain": ((2, 4, 7, 8), (2, 4, 9, 8), {}),
    "causal": ((2, 4, 7, 8), (2, 4, 9, 8), {"is_causal": True}),
    "scale": ((2, 4, 7, 8), (2, 4, 9, 8), {"scale": 0.3}),
    "GQA": ((2, 4, 7, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    "two axes": ((7, 8), (9, 8), {}),
    "three axes": ((3, 7, 8), (3, 9, 8), {"is_causal": True}),
    "five axes": ((2, 3, 4, 7, 8), (2, 3, 4, 9, 8), {}),
    "batch broadcast": ((2, 4, 7, 8), (1, 4, 9, 8), {}),
    "bool mask": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": torch.ones(7, 9, dtype=torch.bool).tril()}),
    "bool mask of three axes": ((3, 7, 8), (3, 9, 8), {"attn_mask": torch.ones(3, 7, 9, dtype=torch.bool).tril()}),
    "mask of a batch": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": normal(2, 1, 7, 9)}),
    "mask of heads": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": normal(4, 7, 9)}),
    "expanded mask": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": normal(1).expand(2, 4, 7, 9)}),
    "five axes and a mask": ((2, 3, 4, 7, 8), (2, 3, 4, 9, 8), {"attn_mask": normal(2, 3, 1, 7, 9)}),
}


def gradients(attention, leaves, options):
    y = attention(*leaves, **options)
    dy = normal(*y.shape, dtype=y.dtype)
    return y, *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("name", CASES)
def test_equals_pytorch(name, dtype):
    query, key, options = CASES[name]
    options = {n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    leaves = [normal(*shape, dtype=dtype, requires_grad=True) for shape in (query, key, (*key[:-1], 5))]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    want = gradients(F.scaled_dot_product_attention, exact, wide)
    for got, expected in zip(gradients(ATTENTION, leaves, options), want):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=TYPES[dtype], atol=4 * TYPES[dtype])


def test_a_float_mask_has_a_gradient():
    q, mask = normal(2, 4, 7, 8, requires_grad=True), normal(2, 1, 7, 7, requires_grad=True)
    got, want = (f(q, q, q, attn_mask=mask).square().sum() for f in (ATTENTION, F.scaled_dot_product_attention))
    for ours, theirs in zip(torch.autograd.grad(got, [q, mask]), torch.autograd.grad(want, [q, mask])):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradcheck():
    leaves = [normal(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), leaves)


def test_strided_tensors_are_read():
    x = normal(2, 4, 8, 7).transpose(2, 3)
    torch.testing.assert_close(ATTENTION(x, x, x), F.scaled_dot_product_attention(x, x, x))


def test_sum_has_a_gradient():
    x = normal(2, 4, 7, 8, requires_grad=True)
    got, want = (torch.autograd.grad(f(x, x, x).sum(), x)[0] for f in (ATTENTION, F.scaled_dot_product_attention))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_dropout_follows_the_seed_of_pytorch():
    x = normal(1, 2, 32, 8, requires_grad=True)

    def run(seed):
        torch.manual_seed(seed)
        y = ATTENTION(x, x, x, dropout_p=0.5)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"query": normal(2, 3, 8)}, "key has 4 axes, query 3"),
        ({"key": normal(1, 1, 9, 8)[:, :, 0]}, "key has 3 axes, query 4"),
        ({"attn_mask": torch.ones(7, 9, dtype=torch.bool), "is_causal": True}, "attn_mask and is_causal are given"),
        ({"query": normal(2, 8, 7, 8)}, "query has 8 heads, key 4; enable_gqa=True"),
        ({"value": normal(2, 4, 8, 8)}, "Sk must be 9, as in k"),
    ),
)
def test_what_does_not_fit_is_an_error(arguments, message):
    tensors = {"query": normal(2, 4, 7, 8), "key": normal(2, 4, 9, 8), "value": normal(2, 4, 9, 8)}
    with pytest.raises(ValueError, match=message):
        ATTENTION(**tensors | arguments)


def test_another_device_is_an_error():
    x = torch.empty(1, 2, 3, 4)
    with pytest.raises((NotImplementedError, RuntimeError)):
        rapt.torch.attention(x.to_sparse(), x, x)


def test_the_operators_are_as_pytorch_expects():
    q, k = normal(2, 4, 7, 8, requires_grad=True), normal(2, 2, 9, 8, requires_grad=True)
    mask, bias = normal(2, 1, 7, 9, requires_grad=True), normal(1, 4, 7, 9, requires_grad=True)
    sink = normal(4, requires_grad=True)
    selected, lengths = torch.tensor([[[[0, 3, -1]] * 7]] * 2, dtype=torch.int32), torch.tensor([9, 8])
    table, seen = normal(4, 9, requires_grad=True), torch.tensor([[[[True, False, True, True, False], [True] * 5]]])
    plain = Problem(q, k, k, causal=True, scale=0.5)
    full = plain._replace(mask=mask, attention_bias=bias, head_sink=sink, selected_indices=selected, key_lengths=lengths)
    full = full._replace(softcap=3.0, window_left=4, window_right=0, bottom_right=True)
    blocks = plain._replace(relative_bias=table, block_mask=seen, block_q=4, block_k=2, window_left=3, prefix_keys=2)
    for problem in (plain, full, blocks):
        torch.library.opcheck(torch.ops.rapt.attention.default, (*problem, False))
        dropped = (*problem._replace(dropout=0.5, seed=torch.tensor(7)), True)
        torch.library.opcheck(torch.ops.rapt.attention.default, dropped)
    with torch.no_grad():
        y, lse, _ = torch.ops.rapt.attention.default(*full, False)
        for dlse in (None, lse):
            arguments = (y, dlse, y, lse, *(x.detach() if isinstance(x, torch.Tensor) else x for x in full), ["mask", "head_sink"])
            torch.library.opcheck(torch.ops.rapt.attention_backward.default, arguments)


def test_what_records_operators_gets_them():
    x, other = normal(1, 2, 4, 8), normal(1, 2, 4, 8) + 1
    assert "rapt.attention" in make_fx(lambda q: ATTENTION(q, q, q))(x).code
    traced = torch.jit.trace(lambda q: ATTENTION(q, q, q), x)
    torch.testing.assert_close(traced(other), ATTENTION(other, other, other))
    assert ATTENTION(*(x.to("meta"),) * 3).shape == x.shape
    with torch.profiler.profile() as profile:
        ATTENTION(x, x, x)
    assert "rapt::attention" in {event.key for event in profile.key_averages()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = normal(1, 2, 4, 8, requires_grad=True)
        y = ATTENTION(q, q, q)
    assert type(torch.autograd.grad(y.sum(), q)[0]) is FakeTensor
    torch.testing.assert_close(ATTENTION(torch._efficientzerotensor(x.shape), x, x), ATTENTION(x * 0, x, x))


def test_second_derivatives_are_refused():
    q = normal(1, 2, 4, 8, requires_grad=True)
    loss = ATTENTION(q, q, q).sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        (loss + gradient.square().sum()).backward()


def test_derivatives_of_forward_mode_are_refused():
    x = normal(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="no derivatives of forward mode"):
        torch.func.jvp(lambda q: ATTENTION(q, x, x), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(ATTENTION(x, x, x), F.scaled_dot_product_attention(x, x, x))
        with pytest.raises(NotImplementedError, match="no derivatives of forward mode"):
            ATTENTION(torch.autograd.forward_ad.make_dual(x, x), x, x)


def test_numbers_may_be_tensors():
    x = normal(1, 2, 4, 8, requires_grad=True)
    for function, name, numbers in (
        (ATTENTION, "scale", (0.5, 3.0)),
        (ATTENTION, "is_causal", (False, True)),
        (rapt.torch.flex_attention, "scale", (0.5, 3.0)),
        (rapt.torch.attention, "softcap", (0.5, 3.0)),
    ):
        number = torch.tensor(numbers[0])
        for value in numbers:
            number.fill_(value)
            want = function(x, x, x, **{name: value})
            for given in (number, number.numpy()):
                torch.testing.assert_close(function(x, x, x, **{name: given}), want, rtol=0, atol=0)
    left = torch.tensor(0)
    rapt.torch.attention(x, x, x, window=(left, 0))
    left.fill_(2)
    got, want = (rapt.torch.attention(x, x, x, window=(keys, 0)) for keys in (left, 2))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for function in (ATTENTION, rapt.torch.attention, rapt.torch.flex_attention):
        with pytest.raises(ValueError, match=r"scale requires a gradient; .* use detach\(\)"):
            function(x, x, x, scale=torch.tensor(0.5, requires_grad=True))
        with pytest.raises(ValueError, match=r"scale has shape \[2\]; it must be one number"):
            function(x, x, x, scale=torch.ones(2))


def test_y_is_as_query_is():
    """In the order of its axes, and no view, which may not be changed in place."""
    x = normal(2, 7, 4, 8, requires_grad=True)
    for q in (x, x.transpose(1, 2)):
        y, want = (f(q, q, q) for f in (ATTENTION, F.scaled_dot_product_attention))
        assert y.stride() == want.stride()
        y += 1
        torch.testing.assert_close(y, want + 1)


def test_compiled_functions_have_no_graph_break():
    q, k = normal(2, 4, 7, 8, requires_grad=True), normal(2, 2, 9, 8, requires_grad=True)

    def loss(attention):
        return attention(q * 2, k, k, enable_gqa=True).sin().sum()

    compiled = torch.compile(lambda: loss(ATTENTION), fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(loss(F.scaled_dot_product_attention), [q, k])
    for got, expected in zip(torch.autograd.grad(compiled(), [q, k]), want):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# --- attention -------------------------------------------------------------------------------------

QUERIES, KEYS = 6, 9
POSITION, KEY = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
LATE = POSITION + KEYS - QUERIES  # with alignment="bottom_right"
LENGTHS = torch.tensor([9, 7])
SELECTED = torch.tensor([[0, 2, -1], [1, 0, 3], [2, -1, -1], [3, 0, 8], [4, 1, 0], [7, 5, 2]]).expand(2, 1, QUERIES, 3)
HIDDEN = torch.zeros(2, 1, QUERIES, KEYS, dtype=torch.bool)
CHOSEN = HIDDEN.int().scatter_add(3, SELECTED.clamp(min=0), (SELECTED >= 0).int()) > 0
BIAS = normal(1, 4, QUERIES, KEYS)
SHOWN = torch.tensor([[[[True, False, True, True, False], [False, True, True, False, True]]]])  # of blocks of 4 queries and 2 keys
SINK = normal(4)

# Options -> the keys that a query sees, and what is added to the scores.
ATTENTION_CASES = {
    "none": ({}, HIDDEN | True, {}),
    "causal": ({"causal": True}, KEY <= POSITION, {}),
    "causal at the end": ({"causal": True, "alignment": "bottom_right"}, KEY <= LATE, {}),
    "window": ({"window": (2, 1)}, (KEY >= POSITION - 2) & (KEY <= POSITION + 1), {}),
    "causal window": (
        {"causal": True, "window": (2, None), "alignment": "bottom_right"},
        (KEY >= LATE - 2) & (KEY <= LATE),
        {},
    ),
    "key lengths": ({"key_lengths": LENGTHS}, KEY < LENGTHS[:, None, None, None], {}),
    "key lengths of a list": ({"key_lengths": [9, 7]}, KEY < LENGTHS[:, None, None, None], {}),
    "causal before the end": (
        {"key_lengths": LENGTHS, "causal": True, "alignment": "bottom_right"},
        KEY <= POSITION + LENGTHS[:, None, None, None] - QUERIES,
        {},
    ),
    "softcap": ({"softcap": 0.7}, HIDDEN | True, {}),
    "bias": ({}, HIDDEN | True, {"attention_bias": BIAS}),
    "mask and bias": ({}, HIDDEN | True, {"attention_bias": BIAS, "mask": normal(2, 1, QUERIES, KEYS)}),
    "sinks": ({}, HIDDEN | True, {"head_sink": SINK}),
    "selected": ({"selected_indices": SELECTED}, CHOSEN, {}),
    "blocks": (
        {"block_mask": SHOWN, "block_q": 4, "block_k": 2},
        SHOWN[:, :, POSITION // 4, KEY // 2],
        {},
    ),
    "a window and a prefix": (
        {"causal": True, "window": (1, None), "prefix_keys": 2},
        (KEY <= POSITION) & ((KEY >= POSITION - 1) | (KEY < 2)),
        {},
    ),
    "relative bias": ({}, HIDDEN | True, {"relative_bias": normal(4, 5)}),
    "all": (
        {"causal": True, "selected_indices": SELECTED, "softcap": 2.0},
        CHOSEN & (KEY <= POSITION),
        {"attention_bias": BIAS, "head_sink": SINK},
    ),
}


def by_hand(q, k, v, seen, softcap=0.0, mask=None, attention_bias=None, head_sink=None, relative_bias=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for added in (mask, attention_bias):
        scores = scores if added is None else scores + added
    if relative_bias is not None:
        scores = scores + relative_bias[:, (KEY - POSITION).clamp(-2, 2) + 2]
    scores = scores.masked_fill(~seen, -torch.inf)
    if head_sink is not None:
        sinks = head_sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], 3).softmax(3)[..., :-1] @ v
    return scores.softmax(3) @ v


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_equals_the_formula(name):
    options, seen, added = ATTENTION_CASES[name]
    shapes = ((2, 4, QUERIES, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 5))
    leaves = [normal(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    added = {n: x.double().requires_grad_() for n, x in added.items()}
    got = rapt.torch.attention(*leaves, **options, **added)
    want = by_hand(*leaves, seen, options.get("softcap", 0.0), **added)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves += added.values()
    dy = normal(*got.shape, dtype=torch.float64)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy)):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_attention_compiles(backend):
    q, k = normal(2, 4, 6, 8, requires_grad=True), normal(2, 2, 9, 8, requires_grad=True)
    sink, bias = normal(4, requires_grad=True), normal(1, 4, 6, 9, requires_grad=True)

    def loss(window):
        options = {"causal": True, "alignment": "bottom_right", "window": window, "softcap": 3.0}
        y = rapt.torch.attention(q, k, k, head_sink=sink, attention_bias=bias, key_lengths=LENGTHS, **options)
        return y.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    leaves = [q, k, sink, bias]
    for got, want in zip(torch.autograd.grad(compiled((3, None)), leaves), torch.autograd.grad(loss((3, None)), leaves)):
        torch.testing.assert_close(got, want)


def test_ragged_attention_is_that_of_each_sequence():
    q, k, v = (normal(12, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    sink = normal(4, dtype=torch.float64, requires_grad=True)
    starts, options = torch.tensor([0, 5, 5, 12]), {"causal": True, "head_sink": sink, "window": (3, None)}
    got = rapt.torch.ragged_attention(q, k, v, starts, **options)
    rows = [[x[n:m].transpose(0, 1)[None] for x in (q, k, v)] for n, m in ((0, 5), (5, 12))]
    want = torch.cat([rapt.torch.attention(*row, **options)[0].transpose(0, 1) for row in rows])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    leaves, dy = [q, k, v, sink], normal(*got.shape, dtype=torch.float64)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy)):
        torch.testing.assert_close(ours, theirs)
    others = rapt.torch.ragged_attention(q[:2], k, v, torch.tensor([0, 1, 2]), torch.tensor([0, 7, 12]))
    torch.testing.assert_close(others[1:], rapt.torch.ragged_attention(q[1:2], k[7:], v[7:], torch.tensor([0, 1]), torch.tensor([0, 5])))


@pytest.mark.parametrize(
    ("starts", "options", "message"),
    (
        ([0, 5, 11], {}, r"cu_seq_q is \[0, 5, 11\]; it must rise from 0 to the number of tokens, 12"),
        ([0, 7, 5, 12], {}, "must rise from 0"),
        ([0, 5, 12], {"cu_seq_k": torch.tensor([0, 12])}, "2 sequences of 12 queries, 1 of 12 keys"),
        ([0, 5, 12], {"key_lengths": [3, 4], "mask": None}, "key_lengths is given"),
        (12, {}, "cu_seq_q is 12; it must rise from 0"),
    ),
)
def test_ragged_attention_names_what_does_not_fit(starts, options, message):
    x = normal(12, 2, 8)
    with pytest.raises(ValueError, match=message):
        rapt.torch.ragged_attention(x, x, x, starts, **options)


def test_attention_names_what_does_not_fit():
    x = normal(1, 2, 3, 8)
    for options, message in (
        ({"alignment": "onnx"}, "alignment is 'onnx'; it must be 'top_left' or 'bottom_right'"),
        ({"key_lengths": [4]}, "key_lengths"),
        ({"head_sink": normal(3)}, "head_sink has shape"),
        ({"window": (-1, 0)}, "window's left is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            rapt.torch.attention(x, x, x, **options)


def test_types(tmp_path):
    package = pathlib.Path(rapt.__file__).parent
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--cache-dir", tmp_path, package]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("Success: no issues found")


# --- transformers ----------------------------------------------------------------------------------

SIZES = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN_SIZES = SIZES | {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
WINDOW = HIDDEN_SIZES | {"num_key_value_heads": 2, "sliding_window": 3, "head_dim": 16}
MODELS = {
    "BERT": (transformers.BertModel, transformers.BertConfig(**HIDDEN_SIZES)),
    "GPT-2": (transformers.GPT2Model, transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, **SIZES)),
    "Llama": (transformers.LlamaModel, transformers.LlamaConfig(num_key_value_heads=2, **HIDDEN_SIZES)),
    "Mistral": (transformers.MistralModel, transformers.MistralConfig(**WINDOW)),
    "Gemma 2": (transformers.Gemma2Model, transformers.Gemma2Config(attn_logit_softcapping=2.0, **WINDOW)),
    "GPT-OSS": (transformers.GptOssModel, transformers.GptOssConfig(num_local_experts=2, num_experts_per_tok=1, **WINDOW)),
}
CAUSAL = [name for name in MODELS if name != "BERT"]


def made(name, kind=None):
    """With weights that give attention a say: those at first are nearly 0."""
    rapt.torch.register_transformers()
    base, config = MODELS[name]
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    model = (kind or base)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return made(request.param)


PADDING = {"full": slice(0, 0), "padded": slice(6, 9), "padded on the left": slice(0, 3)}


def outputs(model, implementation, *, padding="padded", **options):
    model.set_attn_implementation(implementation)
    ids = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, PADDING[padding]] = 0
    return model(ids, attention_mask=mask, **options), mask.bool()


@pytest.mark.parametrize("padding", PADDING)
def test_models_answer_the_same(model, padding):
    want, shown = outputs(model, "eager", padding=padding, output_attentions=True)
    got, _ = outputs(model, "rapt", padding=padding, output_attentions=True)
    torch.testing.assert_close(got.last_hidden_state[shown], want.last_hidden_state[shown], rtol=1e-4, atol=1e-4)
    assert len(got.attentions) == len(want.attentions) == 2
    for ours, theirs in zip(got.attentions, want.attentions):
        for row in range(2):
            torch.testing.assert_close(ours[row, :, shown[row]], theirs[row, :, shown[row]], rtol=1e-4, atol=1e-5)
    plain, _ = outputs(model, "rapt", padding=padding)
    assert plain.attentions is None
    torch.testing.assert_close(plain.last_hidden_state, got.last_hidden_state)


def test_models_train_alike(model):
    def gradients_with(implementation):
        model.zero_grad()
        result, shown = outputs(model, implementation)
        result.last_hidden_state[shown].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want, got = gradients_with("eager"), gradients_with("rapt")
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_models_compile_to_one_graph(name):
    model = made(name)
    want, shown = outputs(model, "eager")
    model.set_attn_implementation("rapt")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    got, _ = outputs(model, "rapt")
    torch.testing.assert_close(got.last_hidden_state[shown], want.last_hidden_state[shown], rtol=1e-4, atol=1e-4)


def test_inductor_trains_a_model():
    model = made("Llama")

    def step():
        result, shown = outputs(model, "rapt")
        result.last_hidden_state[shown].square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return result.last_hidden_state[shown], gradients

    want, want_gradients = step()
    model.forward = torch.compile(model.forward, fullgraph=True)
    got, gradients = step()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-3, atol=1e-4, msg=lambda m: f"{name}: {m}")


KINDS = {
    "GPT-2": transformers.GPT2LMHeadModel,
    "Llama": transformers.LlamaForCausalLM,
    "Mistral": transformers.MistralForCausalLM,
    "Gemma 2": transformers.Gemma2ForCausalLM,
    "GPT-OSS": transformers.GptOssForCausalLM,
}
WAYS = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_models_generate_the_same_tokens(name, way):
    model, tokens = made(name, KINDS[name]), []
    ids = torch.tensor([[5, 17, 42, 8], [0, 0, 42, 17]])
    for implementation in ("eager", "rapt"):
        model.set_attn_implementation(implementation)
        options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        tokens.append(model.generate(ids, **options, **WAYS[way]))
    assert torch.equal(*tokens)


def test_a_compiled_model_generates_the_same_tokens():
    """The masks are made outside of the compiled function here, by transformers."""
    model = made("Mistral", KINDS["Mistral"])
    ids = torch.tensor([[5, 17, 42, 8], [0, 0, 42, 17]])
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    model.set_attn_implementation("rapt")
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)


def test_autocast_computes_in_one_type():
    model = made("Llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, shown = outputs(model, "rapt")
        want, _ = outputs(model, "eager")
    torch.testing.assert_close(got.last_hidden_state[shown].float(), want.last_hidden_state[shown].float(), rtol=0.1, atol=0.1)


# --- The adapter's contract ------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Of a model: what transformers hands to an attention function."""

    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def attend(layer, mask, queries=4, keys=4, **arguments):
    rapt.torch.register_transformers()
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["rapt"]
    q, k = normal(2, 2, queries, 8), normal(2, 2, keys, 8)
    return function(layer, q, k, k, mask, **arguments)[0].transpose(1, 2), q, k


@pytest.mark.parametrize("name", ("block_indices", "sinks", "cu_seq_lens_q", "an_argument_of_tomorrow"))
def test_an_unknown_argument_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"attn_implementation='rapt': Layer passes {name}, which"):
        attend(Layer(is_causal=False), None, **{name: torch.zeros(1)})
    attend(Layer(is_causal=False), None, **{name: None}, use_cache=True, position_ids=torch.arange(4))


def test_causality_is_never_guessed():
    with pytest.raises(NotImplementedError, match="Layer has no mask and does not say whether it is causal"):
        attend(Layer(), None)
    with pytest.raises(NotImplementedError, match="Layer is causal but has no mask"):
        attend(Layer(is_causal=True), None)
    for layer, argument, causal in ((False, None, False), (True, False, False), (None, True, True)):
        y, q, k = attend(Layer(layer), None, is_causal=argument)
        torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, k, is_causal=causal), rtol=1e-4, atol=1e-5)


masking = transformers.masking_utils
RULES = {
    "causal": masking.causal_mask_function,
    "sliding": masking.sliding_window_causal_mask_function(3),
    "custom": lambda batch, head, q, k: (k <= q) & (k != 1),
}
if hasattr(masking, "bidirectional_mask_function"):
    RULES["bidirectional"] = masking.bidirectional_mask_function
    RULES["sliding both ways"] = masking.sliding_window_bidirectional_mask_function(2)


def mask_arguments(rule, queries, keys, offset, padded):
    if "q_length" in inspect.signature(masking.sdpa_mask).parameters:
        place = {"q_length": queries, "q_offset": offset}
    else:
        place = {"cache_position": torch.arange(queries) + offset}
    shown = torch.ones(2, offset + queries, dtype=torch.bool)
    shown[1, :2] = False
    shown = shown if padded else None
    return {"batch_size": 2, "kv_length": keys, "mask_function": RULES[rule], "attention_mask": shown} | place


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize(("queries", "keys", "offset"), ((9, 9, 0), (1, 7, 6), (4, 9, 5), (4, 12, 5), (4, 12, 0)))
@pytest.mark.parametrize("rule", RULES)
def test_a_description_is_the_mask_of_transformers(rule, queries, keys, offset, padded):
    rapt.torch.register_transformers()
    arguments = mask_arguments(rule, queries, keys, offset, padded)
    described = masking.ALL_MASK_ATTENTION_FUNCTIONS["rapt"](**arguments)
    want = masking.eager_mask(**arguments)
    assert torch.equal(described + 0.0, want) and torch.equal(described.to(torch.float32) * 1, want)
    assert described.shape == want.shape and described.dtype == want.dtype
    seen = torch.where(want == 0, 0, -torch.inf)
    y, q, k = attend(Layer(), described, queries, keys)
    shown = (want == 0).any(3)[:, 0]
    expected = F.scaled_dot_product_attention(q, k, k, attn_mask=seen)
    for row in range(2):
        torch.testing.assert_close(y[row][:, shown[row]], expected[row][:, shown[row]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "custom"])
def test_a_description_is_small(rule):
    rapt.torch.register_transformers()
    described = masking.ALL_MASK_ATTENTION_FUNCTIONS["rapt"](**mask_arguments(rule, 2048, 2048, 0, True))
    numbers = sum(getattr(described, name).numel() for name in described.__tensor_flatten__()[0])
    assert described.shape == (2, 1, 2048, 2048) and numbers <= 2 + 2 * 2048
    cut = described[:, :, :, :2048].contiguous()
    assert type(cut) is type(described)
    for change in (lambda: described.add_(1), lambda: described.__setitem__((0, 0), 0.0)):
        with pytest.raises(NotImplementedError, match="in place"):
            change()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float64))
def test_a_client_takes_and_returns_tensors(dtype):
    x = torch.randn(1, 2, 5, 8).to(dtype)
    with RaptServer("--kv_cache_bytes=67108864") as server, rapt.Client(f"http://{server.http_address}") as client:
        got, want = client.attend(x, x, x, lse=True), rapt.attend(x, x, x, lse=True)
        assert got.y.dtype == dtype and torch.equal(got.y, want.y) and torch.equal(got.lse, want.lse)
        with client.create_cache(rapt.LayerShape(2, 8), str(dtype).removeprefix("torch.")) as cache:
            rows = x[0].transpose(0, 1)
            step = cache.attend(0, rows, rows, rows)
            want = rapt.attention(x, x, x, causal=True)[0].transpose(0, 1)
            torch.testing.assert_close(step.y, want, rtol=2e-2, atol=2e-2)
        with pytest.raises(RuntimeError, match="q requires a gradient"):
            client.attend(x.clone().requires_grad_(), x, x)
