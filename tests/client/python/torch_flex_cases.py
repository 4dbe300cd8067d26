"""rapt.torch.flex_attention. `./dev test torch` runs it."""

import math

import pytest
import rapt.torch
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, or_masks

BATCH, HEADS, LENGTH, SIZE = 2, 4, 200, 16
random = torch.Generator().manual_seed(3)


def normal(*shape, requires_grad=True):
    return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_(requires_grad)


Q, K, V = normal(BATCH, HEADS, LENGTH, SIZE), normal(BATCH, 2, LENGTH, SIZE), normal(BATCH, 2, LENGTH, 5)
DOCUMENTS = torch.tensor([[0] * 50 + [1] * 70 + [2] * 80, [0] * 128 + [3] * 72])
STARTS = torch.tensor([0, 50, 120])
LENGTHS, PREFIXES = torch.tensor([150, 90]), torch.tensor([30, 70])
BLOCKS = torch.rand(BATCH, 7, 7, generator=random) < 0.5
OFFSET = torch.tensor(20)
NANS = torch.where(torch.arange(LENGTH) % 3 == 0, math.nan, torch.arange(LENGTH) % 2)
OTHER_DOCUMENTS = torch.tensor([2] * 10 + [0] * 90 + [1] * 100)


def causal(b, h, q, kv):
    return q >= kv


def near(b, h, q, kv):
    return q - kv <= 40


def first(b, h, q, kv):
    return kv < 4


def starts(b, h, q, kv):
    """As the packed sequences of attention-gym."""
    document = DOCUMENTS[0]
    return (document[q] == document[kv]) & (q - STARTS[document[q]] >= kv - STARTS[document[kv]])


MASKS = {
    "causal": causal,
    "before": lambda b, h, q, kv: q > kv,
    "window": and_masks(causal, near),
    "window on both sides": lambda b, h, q, kv: (q - kv).abs() <= 33,
    "not": lambda b, h, q, kv: ~((kv > q) | (q - kv > 40)),
    "at an offset": lambda b, h, q, kv: q + OFFSET >= kv,
    "at offsets of rows": lambda b, h, q, kv: (q - LENGTHS[b] >= kv - 100) & (q - LENGTHS[b] - 30 <= kv - 100),
    "prefix": or_masks(causal, lambda b, h, q, kv: kv < 60),
    "prefixes of rows": lambda b, h, q, kv: (kv < PREFIXES[b]) | (q >= kv),
    "sinks and a window": lambda b, h, q, kv: (q >= kv) & ((q - kv <= 30) | (kv < 4)),
    "sinks or a window": or_masks(and_masks(causal, near), and_masks(causal, first)),
    "padding": lambda b, h, q, kv: kv < LENGTHS[b],
    "padding of queries": lambda b, h, q, kv: (kv < LENGTHS[b]) & (q >= kv) & (q < LENGTHS[b]),
    "keys of heads": lambda b, h, q, kv: torch.where(h < 2, kv < 100, kv > 20),
    "documents": lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, kv],
    "causal documents": lambda b, h, q, kv: (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q >= kv),
    "documents and a window": and_masks(lambda b, h, q, kv: DOCUMENTS[1][q] == DOCUMENTS[1][kv], causal, near),
    "packed sequences": starts,
    "other documents of keys": lambda b, h, q, kv: DOCUMENTS[0][q] == OTHER_DOCUMENTS[kv],
    "chunks": lambda b, h, q, kv: (q // 64 == kv // 64) & (q >= kv),
    "blocks": lambda b, h, q, kv: BLOCKS[b, q // 32, kv // 32] & ~(kv > q),
    "nothing": lambda b, h, q, kv: q < -1,
    "no distance": lambda b, h, q, kv: q - kv > 1000,
    "a prefix alone": lambda b, h, q, kv: (q >= kv) & ((q - kv > 1000) | (kv < 4)),
    "a prefix alone in documents": lambda b, h, q, kv: (DOCUMENTS[0][q] == DOCUMENTS[0][kv]) & ((q - kv >= 80) | (kv < 20)),
    "not of NaN": lambda b, h, q, kv: ~(NANS[kv] >= 0.5) & ~(NANS[q] < 0.5),
    "not of a constant": lambda b, h, q, kv: ~((q >= kv) & False) & ~((q < kv) & True) & ~((q < 3) & (kv < 9) & False),
}

SLOPES, DISTANCES = normal(HEADS), normal(HEADS, 2 * LENGTH)
BIAS, KEYS = normal(HEADS, LENGTH, LENGTH), normal(BATCH, LENGTH)
HIDDEN = torch.where(torch.rand(LENGTH, LENGTH, generator=random) > 0.3, 0.0, -math.inf)
SCORES = {
    "ALiBi": (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), [SLOPES]),
    "ALiBi on both sides": (lambda s, b, h, q, kv: s - SLOPES[h] * (kv - q).abs(), [SLOPES]),
    "relative": (lambda s, b, h, q, kv: s + DISTANCES[h, q - kv + LENGTH], [DISTANCES]),
    "distance": (lambda s, b, h, q, kv: s + (q - kv), []),
    "softcap": (lambda s, b, h, q, kv: 20 * torch.tanh(s / 20), []),
    "softcap and bias": (lambda s, b, h, q, kv: torch.tanh(s * 0.3) * -2 + BIAS[h, q, kv], [BIAS]),
    "scaled bias": (lambda s, b, h, q, kv: s * 2 + BIAS[h, q, kv] / 3, [BIAS]),
    "transposed bias": (lambda s, b, h, q, kv: BIAS[h, kv, q] - s, [BIAS]),
    "biases": (lambda s, b, h, q, kv: s + KEYS[b, kv] + DISTANCES[h, kv - q + LENGTH] + 1, [KEYS, DISTANCES]),
    "mask": (lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")), []),
    "bias within a mask": (lambda s, b, h, q, kv: s + torch.where(q >= kv, SLOPES[h] * (kv - q), -math.inf), [SLOPES]),
    "bias of visible keys": (lambda s, b, h, q, kv: torch.where(q >= kv, s + torch.log1p((q - kv).double()), -math.inf), []),
    "one of two": (lambda s, b, h, q, kv: torch.where(q - kv > 9, s - 1.5, s + SLOPES[h]), [SLOPES]),
    "mask as bias": (lambda s, b, h, q, kv: s + HIDDEN[q, kv], []),
}


def by_hand(q, k, v, score_mod=None, mask_mod=None):
    k, v = (x.expand(len(q), -1, -1, -1).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    sizes = (*q.shape[:3], k.shape[2])
    indices = [torch.arange(n).reshape(-1, *[1] * (3 - axis)) for axis, n in enumerate(sizes)]
    scores = score_mod(scores, *indices) if score_mod else scores
    scores = scores.masked_fill(~mask_mod(*indices), -math.inf) if mask_mod else scores
    sees = (scores > -math.inf).any(3, keepdim=True)
    scores = scores.masked_fill(~sees, 0)
    y = torch.softmax(scores, 3).masked_fill(~sees, 0) @ v
    return y, scores.logsumexp(3).masked_fill(~sees[..., 0], -math.inf)


def block_mask(mask_mod, queries=LENGTH, keys=LENGTH, block=128):
    return create_block_mask(mask_mod, BATCH, HEADS, queries, keys, device="cpu", BLOCK_SIZE=block)


def flex(q, k, v, **options):
    return rapt.torch.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)


def check(mask_mod=None, score_mod=None, more=(), block=128):
    y, (lse, _) = flex(Q, K, V, score_mod=score_mod, block_mask=mask_mod and block_mask(mask_mod, block=block))
    want, want_lse = by_hand(Q, K, V, score_mod, mask_mod)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, want_lse, rtol=1e-11, atol=1e-11)
    sees = want_lse.isfinite()
    leaves, dy, dlse = [Q, K, V, *more], torch.randn_like(y), torch.randn_like(lse)
    got, expected = (
        torch.autograd.grad((a * dy).sum() + (torch.where(sees, b, 0) * dlse).sum(), leaves, allow_unused=True)
        for a, b in ((y, lse), (want, want_lse))
    )
    for ours, wanted in zip(got, expected):
        zero = torch.zeros(())
        ours, wanted = (zero if x is None else x for x in (ours, wanted))
        torch.testing.assert_close(ours + zero, wanted + zero, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", (128, 32))
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, block):
    check(MASKS[name], block=block)


@pytest.mark.parametrize("mask", (None, "window", "causal documents"))
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, mask):
    check(MASKS.get(mask), *SCORES[name])


def rows_of_rows(b, h, q, kv):
    return (DOCUMENTS[b][q] == DOCUMENTS[b][kv]) & (q >= kv)


@pytest.mark.parametrize(("mask", "score"), ((MASKS["sinks or a window"], "ALiBi"), (rows_of_rows, "softcap and bias")))
def test_answers_are_those_of_pytorch(mask, score):
    tensors = [x.detach().float() for x in (Q, K, V)]
    options = {"score_mod": SCORES[score][0], "block_mask": block_mask(mask)}
    with torch.no_grad():
        y, (lse, _) = flex(*tensors, **options)
        want, aux = theirs.flex_attention(*tensors, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, aux.lse.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", (1, 3))
def test_a_step_of_decoding(queries):
    offset = torch.tensor(150)

    def recent(b, h, q, kv):
        return (q + offset >= kv) & (q + offset - kv < 20)

    y, _ = flex(Q[:, :, :queries], K, V, block_mask=block_mask(recent, queries))
    torch.testing.assert_close(y, by_hand(Q[:, :, :queries], K, V, None, recent)[0])


def test_keys_of_one_row_are_those_of_all():
    y, _ = flex(Q, K[:1], V[:1], block_mask=block_mask(MASKS["causal documents"]))
    torch.testing.assert_close(y, by_hand(Q, K[:1], V[:1], None, MASKS["causal documents"])[0])


def test_memory_does_not_grow_with_the_square():
    x = torch.zeros(1, 1, 2**17, 8)
    listed = torch.arange(2**10).expand(1, 1, 2**10, 2**10).int()
    counts = torch.arange(1, 2**10 + 1).expand(1, 1, 2**10).int()
    blocks = BlockMask.from_kv_blocks(counts, listed, mask_mod=and_masks(causal, near), compute_q_blocks=False)
    with torch.profiler.profile(profile_memory=True) as profile:
        rapt.torch.flex_attention(x, x, x, lambda s, b, h, q, kv: s + (kv - q) / 8, blocks)
    most = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert most < 2**28  # a mask has 2**34 bytes


def test_a_refused_mask_takes_no_memory():
    x = torch.zeros(1, 1, 2**17, 8)
    ones = torch.ones(1, 1, 2**10, dtype=torch.int32)
    options = {"mask_mod": lambda b, h, q, kv: q * kv > 9, "seq_lengths": (2**17, 2**17), "compute_q_blocks": False}
    blocks = BlockMask.from_kv_blocks(ones, ones[..., None], **options)
    with torch.profiler.profile(profile_memory=True) as profile, pytest.raises(NotImplementedError, match="the mask gt"):
        rapt.torch.flex_attention(x, x, x, None, blocks)
    assert max((event.self_cpu_memory_usage for event in profile.key_averages()), default=0) < 2**28


# --- Blocks that are not those of the mask_mod -----------------------------------------------------

COUNTS, INDICES = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[1, 0], [0, 1]]]]).int()


def hidden_corner(b, h, q, kv):
    return ~((q < 128) & (kv < 128))


def from_blocks(*blocks, **more):
    return BlockMask.from_kv_blocks(*blocks, seq_lengths=(LENGTH, LENGTH), **more)


@pytest.mark.parametrize(
    ("blocks", "mask_mod"),
    (
        (from_blocks(COUNTS, INDICES), hidden_corner),
        (from_blocks(COUNTS * 0, INDICES, COUNTS, INDICES), hidden_corner),
        (from_blocks(COUNTS, INDICES, mask_mod=causal), and_masks(hidden_corner, causal)),
        (from_blocks(COUNTS, INDICES, mask_mod=MASKS["blocks"]), and_masks(hidden_corner, MASKS["blocks"])),
    ),
)
def test_blocks_that_are_not_listed_are_hidden(blocks, mask_mod):
    torch.testing.assert_close(flex(Q, K, V, block_mask=blocks)[0], by_hand(Q, K, V, None, mask_mod)[0])


def test_rows_of_a_block_mask():
    blocks = block_mask(causal)[:, :, 1]
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex(Q[:, :, 128:], K, V, block_mask=blocks)
    blocks.mask_mod = lambda b, h, q, kv: q + 128 >= kv
    torch.testing.assert_close(flex(Q[:, :, 128:], K, V, block_mask=blocks)[0], by_hand(Q, K, V, None, causal)[0][:, :, 128:])


# --- What is refused -------------------------------------------------------------------------------

BYTES, TWICE = torch.arange(LENGTH).to(torch.uint8), torch.tensor([0] * 50 + [1] * 70 + [0] * 80)


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    (
        (lambda b, h, q, kv: (q - kv) % 2 == 0, r"the mask eq\(remainder\(sub\(q_idx, kv_idx\), 2\), 0\)"),
        (lambda b, h, q, kv: BYTES[q] >= kv, r"the mask ge\(tensor\[q_idx\], kv_idx\)"),
        (lambda b, h, q, kv: q * 3 >= kv, r"the mask ge\(mul\(q_idx, 3\), kv_idx\)"),
        (lambda b, h, q, kv: ~(NANS[q] >= kv), r"the mask not\(ge\(tensor\[q_idx\], kv_idx\)\)|the mask ge"),
        (lambda b, h, q, kv: h * 10 >= q - kv, r"the mask ge\(mul\(h, 10\), sub\(q_idx, kv_idx\)\)"),
        (lambda b, h, q, kv: TWICE[q] == TWICE[kv], "documents whose keys are not together"),
    ),
)
def test_other_masks_are_refused(mask_mod, message):
    with pytest.raises(NotImplementedError, match=f"rapt does not compute {message}.*mask=create_mask"):
        flex(Q, K, V, block_mask=block_mask(mask_mod))


def test_a_full_block_that_is_not_full_is_refused():
    with pytest.raises(NotImplementedError, match="full blocks have pairs that its mask_mod hides"):
        flex(Q, K, V, block_mask=from_blocks(COUNTS * 0, INDICES, COUNTS, INDICES, mask_mod=causal))


NUMBERS = [1.0] * LENGTH


@pytest.mark.parametrize(
    ("score_mod", "message"),
    (
        (lambda s, b, h, q, kv: s.relu(), r"the score relu\(score\)"),
        (lambda s, b, h, q, kv: s + s, r"the score add\(score, score\)"),
        (lambda s, b, h, q, kv: s * SLOPES[h], r"the score mul\(score, tensor\[h\]\)"),
        (lambda s, b, h, q, kv: s * SLOPES[0], r"the score mul\(score, tensor\)"),  # its gradient would be lost
        (lambda s, b, h, q, kv: torch.tanh(s + 1), r"the score tanh\(add\(score, 1\)\)"),
        (lambda s, b, h, q, kv: torch.where(s > 0, s, 0.0), r"the score where"),
        (lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf) * -1, "multiplied by -1"),
        (lambda s, b, h, q, kv: s * 0, "multiplied by 0"),
        (lambda s, b, h, q, kv: q + kv, "which does not depend on the score"),
        (lambda s, b, h, q, kv: s + q * kv, r"the bias mul\(q_idx, kv_idx\)"),
        (lambda s, b, h, q, kv: s + torch.log(q - kv), "a bias of q_idx - kv_idx that is not finite"),
        (lambda s, b, h, q, kv: s + KEYS[b, q] + KEYS[b, kv], "biases of q_idx and of kv_idx that are added"),
        (lambda s, b, h, q, kv: s + SLOPES, r"all of a tensor of shape \[4\]"),
        (lambda s, b, h, q, kv: s + BIAS[h, q], r"tensor\[h, q_idx\], which is not one number"),
        (lambda s, b, h, q, kv: s + BIAS[:, q, kv].sum(), r"slice\(None, None, None\) as an index"),
        (lambda s, b, h, q, kv: s + KEYS[b, BYTES[kv]], "uses an index of type torch.uint8"),
        (lambda s, b, h, q, kv: s if q > 3 else s * 2, "uses __bool__ of an index"),
        (lambda s, b, h, q, kv: s + NUMBERS[q], "uses __index__ of an index"),
        (lambda s, b, h, q, kv: s + float(q), "uses __float__ of an index"),
        (lambda s, b, h, q, kv: s.add_(1), "uses add_ of an index"),
        (lambda s, b, h, q, kv: s + torch.rand_like(s), "uses rand_like of an index"),
        (lambda s, b, h, q, kv: s + torch.as_tensor(q, dtype=torch.float64), "uses a tensor on meta"),
    ),
)
def test_other_scores_are_refused(score_mod, message):
    with pytest.raises(NotImplementedError, match=message):
        flex(Q, K, V, score_mod=score_mod)


def test_what_does_not_fit_is_an_error():
    blocks, aux = block_mask(causal), AuxRequest(lse=True)
    for q, options, error, message in (
        (Q[0], {}, ValueError, "query has 3 axes"),
        (Q, {}, ValueError, "query has 4 heads, key 2; enable_gqa=True"),
        (Q[:, :, :72], {"enable_gqa": True, "block_mask": blocks}, ValueError, "for 200 queries and 200 keys; there are 72 and 200"),
        (Q, {"enable_gqa": True, "block_mask": causal}, TypeError, "it must be a BlockMask"),
        (Q[:1], {"enable_gqa": True, "block_mask": blocks}, ValueError, "for a batch of 2 and 4 heads; query has 1 and 4"),
        (Q[:, :2], {"block_mask": blocks}, ValueError, "for a batch of 2 and 4 heads; query has 2 and 2"),
        (Q[:, :, :0], {"enable_gqa": True, "block_mask": blocks}, ValueError, "there are 0 queries and 200 keys"),
        (Q, {"enable_gqa": True, "score_mod": lambda *_: None}, TypeError, "returned None; it must return a tensor"),
        (Q, {"enable_gqa": True, "return_lse": True, "return_aux": aux}, ValueError, "return_lse and return_aux are given"),
        (Q, {"enable_gqa": True, "return_aux": AuxRequest(max_scores=True)}, NotImplementedError, "max_scores"),
        (Q, {"enable_gqa": True, "score_mod": lambda s, b, h, q, kv: s + BIAS[h, q, kv + 1]}, IndexError, "out of"),
    ):
        with pytest.raises(error, match=message):
            rapt.torch.flex_attention(q, K, V, **options)
