"""Compares estimates of attention with exact attention; run by `./dev bench approximation`.

Window, block mask, LSH and FAVOR+ compute the same inputs, whose queries are their keys. Rows of the inputs have the
norm sqrt(D), so that LSH's division by the norm of keys has no effect; kinds differ in their directions and scale:

    random      independent directions, scale 1 / sqrt(D): every token sees all others alike
    local       a random walk, scale 1 / sqrt(D): neighbours are alike
    clustered   64 tokens of each cluster, anywhere in the sequence, scale 3 / sqrt(D): they have all of the weight
    flat        independent directions, scale 0.1 / sqrt(D): scores near 0

The error is |Y - exact| / |exact|. LSH hides a token from itself; its exact result is that of its own kernel without
hashing. As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate
between them, and times are medians. Prints Markdown for RESULTS.md.
"""

import dataclasses
import math
import re
import statistics
import sys

import torch
from kernel_bench import Bench, Disturbance, Operator, Rapt, measure, milliseconds, parse_arguments, write_report
from rapt import capi

HEADS, SIZE = 2, 64
LENGTHS = (4096, 32768)
CLUSTER = 64
WINDOW = 256  # keys
BLOCK, SHOWN_BLOCKS = 64, 8
HASHES, CHUNK = 4, 64
FEATURES = 256
LEAST_LSH_OVER_EXACT = 4.0


@dataclasses.dataclass(frozen=True)
class Case:
    length: int
    causal: bool

    @property
    def name(self):
        return f"{self.length} {'causal' if self.causal else 'full'}"


def normalized(x):
    return torch.nn.functional.normalize(x, dim=-1) * math.sqrt(x.shape[-1])


def make_inputs(length):
    """Kind -> X [1, H, S, D] and the scale; and V."""
    random = torch.Generator().manual_seed(2028)

    def normal(*shape):
        return torch.randn(1, HEADS, *shape, generator=random)

    steps = normal(length, SIZE)
    walk = torch.empty_like(steps)
    walk[:, :, 0] = steps[:, :, 0]
    for t in range(1, length):
        walk[:, :, t] = 0.98 * walk[:, :, t - 1] + math.sqrt(1 - 0.98**2) * steps[:, :, t]
    members = torch.randperm(length, generator=random) // CLUSTER
    clustered = normal(length // CLUSTER, SIZE)[:, :, members] + 0.1 * normal(length, SIZE)
    directions = normalized(normal(length, SIZE))
    inputs = {
        "random": (directions, 1),
        "local": (normalized(walk), 1),
        "clustered": (normalized(clustered), 3),
        "flat": (directions, 0.1),
    }
    unit = SIZE**-0.5
    return {kind: (x.contiguous(), scale * unit) for kind, (x, scale) in inputs.items()}, normal(length, SIZE)


def attention(bench, case, x, v, scale, **fields):
    problem = capi.Problem(
        has_scale=1,
        scale=scale,
        causal=case.causal,
        batch=1,
        query_heads=HEADS,
        kv_heads=HEADS,
        query_length=case.length,
        key_length=case.length,
        head_size=SIZE,
        value_head_size=SIZE,
    )
    tensors = {"query": x, "key": x, "value": v}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            setattr(problem, name, value)
    return Rapt(bench.context, problem, tensors)


def window(bench, case, x, v, scale):
    left, right = (WINDOW - 1, 0) if case.causal else (WINDOW // 2, WINDOW // 2 - 1)
    fields = {"has_left_window": 1, "left_window": left, "has_right_window": 1, "right_window": right}
    return attention(bench, case, x, v, scale, **fields)


def block_mask(bench, case, x, v, scale):
    """The block of the query and the one before, and random ones among those that it may see."""
    blocks = case.length // BLOCK
    random = torch.Generator().manual_seed(7)
    weight = torch.rand(blocks, blocks, generator=random)
    row, column = torch.arange(blocks)[:, None], torch.arange(blocks)[None]
    if case.causal:
        weight[column > row] = -1
    weight[(column == row) | (column == row - 1)] = 2
    shown = weight.argsort(-1, descending=True).argsort(-1) < SHOWN_BLOCKS
    return attention(
        bench,
        case,
        x,
        v,
        scale,
        block_mask=shown[None, None].contiguous(),
        has_block_mask=1,
        block_mask_batch=1,
        block_mask_heads=1,
        block_q=BLOCK,
        block_k=BLOCK,
    )


def lsh(bench, case, x, v, scale, chunk=CHUNK):
    attributes = {"num_hashes": HASHES, "chunk_length": chunk, "is_causal": case.causal, "scale": scale, "seed": 0}
    return Operator(bench.context, "lsh_attention", {"Q": x, "V": v}, attributes, ("Y",))


def favor(bench, case, x, v, scale):
    x, v = (tensor.transpose(1, 2).reshape(1, case.length, -1).contiguous() for tensor in (x, v))
    attributes = {
        "q_num_heads": HEADS,
        "kv_num_heads": HEADS,
        "update_rule": "linear",
        "scale": scale,
        "is_causal": case.causal,
        "feature_map": "favor",
        "num_features": FEATURES,
        "seed": 1,
    }
    return Operator(bench.context, "linear_attention", {"query": x, "key": x, "value": v}, attributes, ("output",))


SIDES = {
    "exact": attention,
    f"window of {WINDOW}": window,
    f"block mask, {SHOWN_BLOCKS} blocks of {BLOCK}": block_mask,
    f"LSH, {HASHES} rounds, chunks of {CHUNK}": lsh,
    f"FAVOR+, {FEATURES} features": favor,
}


def error_of(make, bench, case, x, v, scale):
    got = make(bench, case, x, v, scale)()
    if make is favor:
        got = got.reshape(1, case.length, HEADS, SIZE).transpose(1, 2)
    if make is lsh:
        exact = lsh(bench, case, x, v, scale, chunk=case.length)()
    else:
        exact = attention(bench, case, x, v, scale)()
    return ((got - exact).norm() / exact.norm()).item()


def run(case, bench):
    inputs, v = make_inputs(case.length)
    sides = {name: make(bench, case, inputs["random"][0], v, inputs["random"][1]) for name, make in SIDES.items()}
    disturbance = Disturbance()
    seconds = measure(sides, bench.rounds, bench.block_seconds)
    seconds = {name: statistics.median(values) for name, values in seconds.items()}
    others = disturbance.share()
    rows = []
    for name, make in SIDES.items():
        rows.append(
            {
                "case": case.name,
                "name": name,
                "ms": seconds[name] * 1e3,
                "ratio": seconds["exact"] / seconds[name],
                "workspace_bytes": sides[name].plan.workspace_bytes,
                "errors": {kind: error_of(make, bench, case, x, v, scale) for kind, (x, scale) in inputs.items()},
                "others_share": others,
            }
        )
    return rows


KINDS = ("random", "local", "clustered", "flat")
HEADER = (
    "| tokens | | ms | faster than exact | workspace KiB | " + " | ".join(f"error, {kind}" for kind in KINDS) + " |\n"
    + "| --- " * (5 + len(KINDS))
    + "|"
)


def markdown(row):
    cells = [
        row["case"],
        row["name"],
        milliseconds(row["ms"]),
        f"{row['ratio']:.2g}",
        f"{row['workspace_bytes'] / 1024:.0f}",
        *("-" if row["name"] == "exact" else f"{row['errors'][kind]:.2g}" for kind in KINDS),
    ]
    return "| " + " | ".join(cells) + " |"


def main():
    options = parse_arguments("dev bench approximation", __doc__)
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    cases = [Case(length, causal) for length in LENGTHS for causal in (True, False)]
    cases = [case for case in cases if re.search(options.filter, case.name)]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    print(f"{options.threads} threads, FP32, {HEADS} heads of {SIZE}, queries are keys.\n")
    print(HEADER)
    rows = []
    for case in cases:
        rows += run(case, bench)
        print("\n".join(map(markdown, rows[-len(SIDES) :])), flush=True)
    hashed = [row["ratio"] for row in rows if row["name"].startswith("LSH") and row["case"].startswith("32768")]
    if hashed:
        print(f"\nLSH over exact attention at 32768 tokens: {', '.join(f'{ratio:.1f}' for ratio in hashed)}", end="")
        print(f" (floor {LEAST_LSH_OVER_EXACT:g}).", end="")
    print(f" Other processes took {max(row['others_share'] for row in rows):.0%} of the cores at most.")
    write_report(options, bench, rows)


if __name__ == "__main__":
    main()
