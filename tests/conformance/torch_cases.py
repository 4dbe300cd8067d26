"""Random attention problems against PyTorch in float64. `./dev test torch` runs it.

A case is its seed: `pytest torch_cases.py -k seed17` runs one again.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from attention_client import assert_close, attend, to_input

CASES = 400

TORCH_TYPES = {
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
}
LENGTHS = (1, 2, 3, 5, 17, 31, 63, 64, 65, 127, 129)
HEAD_SIZES = (1, 3, 8, 17, 32, 64, 80)
LARGE = 16.0  # scores beyond this earn the tolerance's extra term
OUTPUTS = ["Y", "qk_matmul_output", "lse"]
GRADIENT_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass
class Case:
    """One problem with the operator's names; arrays are already rounded to dtype."""

    dtype: np.dtype
    tensors: dict
    parameters: dict
    shape: str

    def describe(self):
        given = {name: list(array.shape) for name, array in self.tensors.items()}
        return f"{self.shape} {self.dtype} {given} {self.parameters}"


def mask_shape(rng, batch, heads, queries, keys):
    full = [batch, heads, queries, keys]
    shape = [size if rng.random() < 0.6 else 1 for size in full[:3]] + [keys]
    return shape[rng.integers(0, 3) :] if shape[0] == 1 else shape


def make_case(seed):
    rng = np.random.default_rng(seed)
    dtype = list(TORCH_TYPES)[seed % 4]
    batch, kv_heads, group = rng.integers(1, 4, 3)
    heads = kv_heads * group
    queries, keys = rng.choice(LENGTHS, 2)
    head_size, value_size = rng.choice(HEAD_SIZES, 2)
    past = int(rng.choice((0, 0, 1, 33)))
    spread = rng.choice((1.0, 1.0, 4.0))  # 4: scores near a hundred

    def normal(*shape, spread=1.0):
        return (spread * rng.standard_normal(shape)).astype(dtype)

    tensors = {
        "Q": normal(batch, heads, queries, head_size, spread=spread),
        "K": normal(batch, kv_heads, keys, head_size, spread=spread),
        "V": normal(batch, kv_heads, keys, value_size),
    }
    if past:
        tensors["past_key"] = normal(batch, kv_heads, past, head_size, spread=spread)
        tensors["past_value"] = normal(batch, kv_heads, past, value_size)
    elif rng.random() < 0.2:
        tensors["nonpad_kv_seqlen"] = rng.integers(0, keys + 1, batch)
    kind = rng.choice(("none", "none", "bool", "float"))
    shape = mask_shape(rng, batch, heads, queries, past + keys)
    if kind == "bool":
        tensors["attn_mask"] = rng.random(shape) < 0.7
    elif kind == "float":
        mask = rng.standard_normal(shape)
        mask[rng.random(shape) < 0.1] = -np.inf
        tensors["attn_mask"] = mask.astype(dtype)

    parameters = {"qk_matmul_output_mode": int(rng.integers(0, 4))}
    if rng.random() < 0.3:
        parameters["is_causal"] = 1
    if rng.random() < 0.2:
        parameters["left_window_size"] = int(rng.integers(0, 20))
    if rng.random() < 0.2:
        parameters["right_window_size"] = int(rng.integers(0, 20))
    if rng.random() < 0.2:
        parameters["softcap"] = float(rng.choice((0.5, 5.0, 30.0)))
    if rng.random() < 0.2:
        parameters["scale"] = float(rng.choice((0.01, 0.3, -0.2)))
    described = f"seed {seed}: B{batch} Hq{heads} Hkv{kv_heads} Sq{queries} Sk{keys} P{past}"
    return Case(dtype, tensors, parameters, described)


def to_torch(array, dtype=torch.float64):
    if array.dtype == np.bool_:
        return torch.from_numpy(array)
    return torch.from_numpy(array.astype(np.float64)).to(dtype)


def hidden(case, queries, keys, past):
    """[B or 1, 1, Sq, T]; true for keys hidden by causality, window or lengths."""
    parameters, lengths = case.parameters, case.tensors.get("nonpad_kv_seqlen")
    i = torch.arange(queries).reshape(1, 1, -1, 1)
    j = torch.arange(past + keys).reshape(1, 1, 1, -1)
    offset, result = past, torch.zeros(1, 1, queries, past + keys, dtype=torch.bool)
    if lengths is not None:
        lengths = torch.from_numpy(lengths).reshape(-1, 1, 1, 1)
        offset = lengths - queries
        result = result | (j >= lengths)
    if parameters.get("is_causal"):
        result = result | (j > i + offset)
    if parameters.get("left_window_size", -1) >= 0:
        result = result | (j < i + offset - parameters["left_window_size"])
    if parameters.get("right_window_size", -1) >= 0:
        result = result | (j > i + offset + parameters["right_window_size"])
    return result


class Oracle:
    """The definition in PyTorch, and PyTorch's own attention for supported cases."""

    def __init__(self, case):
        tensors = case.tensors
        self.case = case
        self.query = tensors["Q"]
        self.key, self.value = tensors["K"], tensors["V"]
        self.past = 0
        if "past_key" in tensors:
            self.past = tensors["past_key"].shape[2]
            self.key = np.concatenate([tensors["past_key"], self.key], axis=2)
            self.value = np.concatenate([tensors["past_value"], self.value], axis=2)
        self.scale = case.parameters.get("scale", self.query.shape[3] ** -0.5)
        self.softcap = case.parameters.get("softcap", 0.0)
        self.bias = self._bias()

    def _bias(self):
        queries, total = self.query.shape[2], self.key.shape[2]
        out_of_sight = hidden(self.case, queries, total - self.past, self.past)
        bias = torch.zeros(out_of_sight.shape, dtype=torch.float64)
        mask = self.case.tensors.get("attn_mask")
        if mask is not None and mask.dtype == np.bool_:
            bias = bias.masked_fill(~to_torch(mask), -torch.inf)
        elif mask is not None:
            bias = bias + to_torch(mask)
        return bias.masked_fill(out_of_sight, -torch.inf)

    def sdpa(self, dtype):
        """PyTorch's operator in that type. Rows that see no key are zero, as in rapt."""
        y = torch.nn.functional.scaled_dot_product_attention(
            to_torch(self.query, dtype),
            to_torch(self.key, dtype),
            to_torch(self.value, dtype),
            attn_mask=self.bias.expand(-1, self.query.shape[1], -1, -1).to(dtype),
            scale=self.scale,
            enable_gqa=True,
        )
        blind = torch.isneginf(self.bias).all(-1, keepdim=True)
        return y.to(torch.float64).masked_fill(blind, 0.0)

    def gradients(self, dy, dtype):
        """dQ, dK and dV of all keys in that type, and the largest |dY V^T|, whose terms cancel. Rows that see
        no key are left out."""
        leaves = [to_torch(array, dtype).requires_grad_() for array in (self.query, self.key, self.value)]
        q, k, v = leaves
        group = self.query.shape[1] // self.key.shape[1]
        bias = self.bias.expand(self.query.shape[0], self.query.shape[1], -1, -1)
        blind = torch.isneginf(bias).all(-1, keepdim=True)
        bias = bias.masked_fill(blind, 0.0).to(dtype)
        dy = to_torch(dy, dtype).masked_fill(blind, 0.0)
        values = v.repeat_interleave(group, dim=1)
        if self.softcap:
            scores = self.scale * (q @ k.repeat_interleave(group, dim=1).transpose(2, 3))
            weights = torch.softmax(self.softcap * torch.tanh(scores / self.softcap) + bias, -1)
            y = weights @ values
        else:
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True
            )
        y.backward(dy)
        terms = float((dy @ values.detach().transpose(2, 3)).abs().max())
        return [leaf.grad.to(torch.float64).numpy() for leaf in leaves], terms

    def compute(self):
        """Y, qk_matmul_output and lse in float64, and the largest score."""
        group = self.query.shape[1] // self.key.shape[1]
        key = to_torch(self.key).repeat_interleave(group, dim=1)
        value = to_torch(self.value).repeat_interleave(group, dim=1)
        scores = self.scale * (to_torch(self.query) @ key.transpose(2, 3))
        capped = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        biased = capped + self.bias
        lse = torch.logsumexp(biased, -1)
        weights = torch.softmax(biased, -1).nan_to_num(nan=0.0)
        y = weights @ value if self.softcap else self.sdpa(torch.float64)
        mode = self.case.parameters["qk_matmul_output_mode"]
        chosen = (scores, capped, biased, weights)[mode]
        return y.numpy(), chosen.numpy(), lse.numpy(), float(scores.abs().max())


@pytest.mark.parametrize("seed", range(CASES), ids=lambda seed: f"seed{seed}")
def test_agrees_with_pytorch(client, seed):
    case = make_case(seed)
    oracle = Oracle(case)
    y, scores, lse, largest = oracle.compute()
    lse_dtype = np.dtype(np.float64 if case.dtype == np.float64 else np.float32)
    slack = 8 * 2**-24 * largest if largest > LARGE and case.dtype != np.float64 else 0.0
    try:
        got = attend(client, case.tensors, OUTPUTS, case.parameters)
        for name, want, dtype in zip(OUTPUTS, (y, scores, lse), (case.dtype, case.dtype, lse_dtype)):
            assert got[name].dtype == dtype
            assert_close(name, got[name], want, slack=slack)
        if case.dtype != np.float64 and not oracle.softcap:
            assert_not_worse_than_pytorch(got["Y"], oracle, y)
    except AssertionError as failure:
        raise AssertionError(f"{case.describe()}: {failure}") from failure


def assert_not_worse_than_pytorch(got, oracle, want):
    assert_error_is_at_most_twice(got, oracle.sdpa(TORCH_TYPES[got.dtype]).numpy(), want)


def assert_error_is_at_most_twice(got, reference, want, terms=0.0):
    """At most twice PyTorch's own error in the same type, and one rounding of the largest number, or of the terms
    that cancel.

    The errors are root mean squares: the largest of a few hundred roundings is chance.
    """

    def error(y):
        return float(np.sqrt(np.mean((y.astype(np.float64) - want) ** 2)))

    theirs, ours = error(reference), error(got)
    rounding = float(ml_dtypes.finfo(got.dtype).eps) * max(np.abs(want).max(), terms)
    assert ours <= 2 * theirs + rounding, f"our error {ours:.3g}, PyTorch's {theirs:.3g}"


@pytest.mark.parametrize("seed", range(CASES), ids=lambda seed: f"seed{seed}")
def test_gradients_agree_with_pytorch(client, seed):
    case = make_case(seed)
    oracle = Oracle(case)
    rng = np.random.default_rng(seed)
    shape = (*case.tensors["Q"].shape[:3], case.tensors["V"].shape[3])
    dy = rng.standard_normal(shape).astype(case.dtype)
    (dq, dk, dv), terms = oracle.gradients(dy, torch.float64)
    want = {"dQ": dq, "dK": dk[:, :, oracle.past :], "dV": dv[:, :, oracle.past :]}
    if oracle.past:
        want |= {"d_past_key": dk[:, :, : oracle.past], "d_past_value": dv[:, :, : oracle.past]}
    largest = oracle.compute()[3]
    del case.parameters["qk_matmul_output_mode"]
    result = client.infer(
        "attention_backward",
        [to_input(name, array) for name, array in (case.tensors | {"dY": dy}).items()],
        outputs=[triton.InferRequestedOutput(name) for name in want],
        parameters=case.parameters,
    )
    dtype = TORCH_TYPES[case.dtype]
    precision = 2**-53 if dtype == torch.float64 else 2**-24
    tolerance = GRADIENT_TOLERANCES[dtype] + 8 * precision * largest
    for name, gradient in want.items():
        got = result.as_numpy(name)
        assert got.dtype == case.dtype
        error = np.abs(got.astype(np.float64) - gradient).max()
        assert error <= tolerance * max(np.abs(gradient).max(), 0.05 * terms), f"{case.describe()}: {name}: {error}"
    # Of peaked weights, terms cancel that PyTorch's formula for small problems does not have.
    if dtype != torch.float64 and not oracle.softcap and largest <= LARGE:
        theirs = oracle.gradients(dy, dtype)[0]
        for name, ours, reference in zip(("dQ", "dK", "dV"), (result.as_numpy(n) for n in ("dQ", "dK", "dV")), theirs):
            reference = reference if name == "dQ" else reference[:, :, oracle.past :]
            if reference.any():  # PyTorch's formula gives exactly 0 for rows that see one key
                assert_error_is_at_most_twice(ours, reference, want[name], terms)
