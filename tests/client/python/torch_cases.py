"""PyTorch's tensors, rapt.torch and models of transformers with random weights. `./dev test torch` runs it."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import rapt
import rapt.torch
import torch
import transformers
from rapt_server import RaptServer

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
        torch.ops.rapt.attention(x.to_sparse(), x, x, None, 0.0, None, False, None, 0.0, False)


def test_the_operators_are_as_pytorch_expects():
    q, k = normal(2, 4, 7, 8, requires_grad=True), normal(2, 2, 9, 8, requires_grad=True)
    mask = normal(2, 1, 7, 9, requires_grad=True)
    for more in ((None, 0.0, None, True, 0.5, 0.0, False), (mask, 0.0, None, False, None, 3.0, True)):
        torch.library.opcheck(torch.ops.rapt.attention.default, (q, k, k, *more))


def test_compiled_functions_have_no_graph_break():
    q, k = normal(2, 4, 7, 8, requires_grad=True), normal(2, 2, 9, 8, requires_grad=True)

    def loss(attention):
        return attention(q * 2, k, k, enable_gqa=True).sin().sum()

    compiled = torch.compile(lambda: loss(ATTENTION), fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(loss(F.scaled_dot_product_attention), [q, k])
    for got, expected in zip(torch.autograd.grad(compiled(), [q, k]), want):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_types(tmp_path):
    package = pathlib.Path(rapt.__file__).parent
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--cache-dir", tmp_path, package]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("Success: no issues found")


# --- transformers ----------------------------------------------------------------------------------

SIZES = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN = SIZES | {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
MODELS = {
    "BERT": (transformers.BertModel, transformers.BertConfig(**HIDDEN)),
    "GPT-2": (transformers.GPT2Model, transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, **SIZES)),
    "Llama": (transformers.LlamaModel, transformers.LlamaConfig(num_key_value_heads=2, **HIDDEN)),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    rapt.torch.register_transformers()
    kind, config = MODELS[request.param]
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    return kind(config).eval()


def outputs(model, implementation, *, padded, **options):
    model.set_attn_implementation(implementation)
    ids = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 6:] = 0
    return model(ids, attention_mask=mask, **options), mask.bool()


@pytest.mark.parametrize("padded", (False, True), ids=("full", "padded"))
def test_models_answer_the_same(model, padded):
    want, shown = outputs(model, "eager", padded=padded, output_attentions=True)
    got, _ = outputs(model, "rapt", padded=padded, output_attentions=True)
    torch.testing.assert_close(got.last_hidden_state[shown], want.last_hidden_state[shown], rtol=1e-4, atol=1e-5)
    assert len(got.attentions) == len(want.attentions) == 2
    for ours, theirs in zip(got.attentions, want.attentions):
        for row in range(2):
            torch.testing.assert_close(ours[row, :, shown[row]], theirs[row, :, shown[row]], rtol=1e-4, atol=1e-6)
    plain, _ = outputs(model, "rapt", padded=padded)
    assert plain.attentions is None
    torch.testing.assert_close(plain.last_hidden_state, got.last_hidden_state)


def test_models_train_alike(model):
    def gradients_with(implementation):
        model.zero_grad()
        result, shown = outputs(model, implementation, padded=True)
        result.last_hidden_state[shown].square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want, got = gradients_with("eager"), gradients_with("rapt")
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}")


def test_gpt2_generates_the_same_tokens():
    rapt.torch.register_transformers()
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(MODELS["GPT-2"][1]).eval()
    tokens = []
    for implementation in ("eager", "rapt"):
        model.set_attn_implementation(implementation)
        ids = torch.tensor([[5, 17, 42]])
        tokens.append(model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0))
    assert torch.equal(*tokens)


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
