"""Compares variants of attention with rapt's plain kernel and with PyTorch; run by `./dev bench variant`.

As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate between
them, and figures are medians. Before a row is timed, its result is compared with PyTorch's or with that of the
same call stated by other means. Prints Markdown for RESULTS.md.
"""

import dataclasses
import gc
import math
import re
import statistics
import sys
from collections.abc import Callable

import torch
from kernel_bench import (
    RAPT_DTYPES,
    TOLERANCES,
    Bench,
    Case,
    Disturbance,
    Rapt,
    make_tensors,
    measure,
    milliseconds,
    parse_arguments,
    problem_of,
    rapt_attention_of,
    verdict,
    write_report,
)
from rapt import capi

SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclasses.dataclass
class Row:
    variant: str
    case: Case
    against: str  # in words
    ours: Callable
    peer: Callable
    floor: float
    aim: float
    expected: Callable | None = None  # what computes the same; None: `peer` does


class Variants:
    """Makes the rows. Tensors are drawn from a seed."""

    def __init__(self, bench):
        self._bench = bench
        self._random = torch.Generator().manual_seed(1810)

    def _normal(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self._random).to(dtype)

    def _plain(self, case, tensors):
        return rapt_attention_of(self._bench.context, case, tensors)

    def _variant(self, case, tensors, inputs=(), values=True, **fields):
        problem = problem_of(case)
        for name, value in fields.items():
            if not hasattr(problem, name):
                raise TypeError(f"rapt_problem has no field {name}")
            setattr(problem, name, value)
        inputs = {"query": tensors.q, "key": tensors.k, **dict(inputs)}
        if values:
            inputs["value"] = tensors.v
        return Rapt(self._bench.context, problem, inputs)

    def rows(self):
        yield from self._of_plain_shapes()
        yield from self._biases()
        yield self._additive()
        yield from self._normalizers()
        yield from self._block_masks()
        yield from self._selections()
        yield self._latent_heads()

    def _of_plain_shapes(self):
        shapes = [
            Case("prefill", "FP32", 1, 8, 2048, 64),
            Case("prefill", "FP32", 1, 8, 2048, 128),
            Case("short", "FP32", 32, 8, 128, 64),
            Case("decode", "FP32", 8, 32, 1, 128, key_length=4096),
        ]
        for case in shapes:
            tensors = make_tensors(case)
            plain = self._plain(case, tensors)
            heads, length = case.query_heads, case.query_length + case.keys - 1
            yield self._sink(case, tensors, plain)
            yield self._relative_bias(case, tensors, plain, heads, length)
            yield self._rotary(case, tensors, plain)

    def _sink(self, case, tensors, plain):
        sink = self._normal(case.query_heads)
        ours = self._variant(case, tensors, {"head_sink": sink}, head_sink_dtype=RAPT_DTYPES[sink.dtype])

        def expected():
            scores = tensors.q @ tensors.k.mT / math.sqrt(case.head_size)
            column = sink[None, :, None, None].expand(*scores.shape[:3], 1)
            return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ tensors.v

        return Row("head_sink", case, "plain kernel", ours, plain, 0.97, 1.0, expected)

    def _relative_bias(self, case, tensors, plain, heads, length):
        reach = max(case.query_length, case.keys)
        table = self._normal(heads, 2 * reach + 1)
        ours = self._variant(
            case,
            tensors,
            {"relative_bias": table},
            relative_bias_dtype=RAPT_DTYPES[table.dtype],
            relative_bias_heads=heads,
            relative_bias_length=table.shape[1],
        )
        distance = torch.arange(case.keys)[None, :] - torch.arange(case.query_length)[:, None]

        def expected():
            return SDPA(tensors.q, tensors.k, tensors.v, table[:, distance + reach][None])

        return Row("relative_bias", case, "plain kernel", ours, plain, 0.93, 0.95, expected)

    def _rotary(self, case, tensors, plain):
        ours = self._variant(case, tensors, has_rope_theta=1, rope_theta=10000.0)

        def rotate(x):
            half = case.head_size // 2
            angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * 10000.0 ** (
                -2 * torch.arange(half, dtype=torch.float64) / case.head_size
            )
            cos, sin = angles.cos().float(), angles.sin().float()
            first, second = x[..., :half], x[..., half:]
            return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

        def expected():
            return SDPA(rotate(tensors.q), rotate(tensors.k), tensors.v)

        return Row("rope_theta", case, "plain kernel", ours, plain, 0.93, 0.95, expected)

    def _biases(self):
        case = Case("prefill", "FP32", 1, 8, 2048, 64)
        tensors = make_tensors(case)
        heads = torch.arange(case.query_heads)
        distance = torch.arange(case.keys)[None, :] - torch.arange(case.query_length)[:, None]
        slopes = 2.0 ** (-8.0 * (heads + 1) / case.query_heads)
        alibi = (-slopes[:, None, None] * distance.abs())[None]
        buckets = self._normal(32, case.query_heads)
        t5 = buckets[t5_buckets(distance, 32, 128)].permute(2, 0, 1)[None].contiguous()
        fields = {"bias_table_dtype": RAPT_DTYPES[buckets.dtype], "bias_table_buckets": 32, "is_bidirectional": 1}
        for name, ours, mask in (
            ("alibi", self._variant(case, tensors, alibi=1), alibi),
            ("bias_table", self._variant(case, tensors, {"bias_table": buckets}, **fields), t5),
        ):
            peer = lambda mask=mask: SDPA(tensors.q, tensors.k, tensors.v, mask)
            yield Row(name, case, "PyTorch with a float mask", ours, peer, 1.3, 1.6)

    def _additive(self):
        case = Case("additive", "FP32", 1, 8, 128, 256)
        tensors, weight = make_tensors(case), self._normal(8, 256) / 16
        ours = self._variant(
            case,
            tensors,
            {"additive_weight": weight},
            score_function=capi.SCORE_FUNCTIONS["additive"],
            additive_weight_dtype=RAPT_DTYPES[weight.dtype],
            additive_weight_heads=8,
        )

        def peer():
            sums = torch.tanh(tensors.q[:, :, :, None] + tensors.k[:, :, None])
            return torch.softmax((sums * weight[None, :, None, None]).sum(-1), -1) @ tensors.v

        return Row("additive", case, "PyTorch, sums as a tensor", ours, peer, 5, 10)

    def _normalizers(self):
        import entmax

        case = Case("prefill", "FP32", 1, 8, 2048, 64)
        tensors = make_tensors(case)
        plain = self._plain(case, tensors)
        for name, function, normalizer in (
            ("sparsemax", entmax.sparsemax, capi.NORMALIZERS["sparsemax"]),
            ("entmax15", entmax.entmax15, capi.NORMALIZERS["entmax15"]),
        ):
            ours = self._variant(case, tensors, normalizer=normalizer)

            def peer(function=function):
                return function(tensors.q @ tensors.k.mT / math.sqrt(case.head_size), dim=-1) @ tensors.v

            yield Row(name, case, "PyTorch with entmax", ours, peer, 5, 10)
            yield Row(name, case, "plain kernel", ours, plain, 1, 1, peer)

    def _block_masks(self):
        for length in (2048, 4096):
            case = Case("prefill", "FP32", 1, 8, length, 64)
            tensors, blocks = make_tensors(case), length // 64
            shown = torch.rand(1, 1, blocks, blocks, generator=self._random).argsort(-1) < blocks // 8
            ours = self._variant(
                case,
                tensors,
                {"block_mask": shown},
                has_block_mask=1,
                block_mask_batch=1,
                block_mask_heads=1,
                block_q=64,
                block_k=64,
            )

            def expected(tensors=tensors, shown=shown):
                mask = shown.repeat_interleave(64, -1).repeat_interleave(64, -2)
                return SDPA(tensors.q, tensors.k, tensors.v, mask)

            yield Row("block_mask, 1/8", case, "plain kernel", ours, self._plain(case, tensors), 5, 7, expected)

    def _selections(self):
        for kv_heads in (8, 1):
            case = Case("selected", "FP32", 1, 8, 256, 128, key_length=8192, kv_heads=kv_heads)
            tensors = make_tensors(case)
            chosen = torch.rand(1, kv_heads, 256, 8192, generator=self._random).topk(64).indices.to(torch.int32)
            ours = self._variant(
                case,
                tensors,
                {"selected_indices": chosen},
                has_selected_indices=1,
                selected_count=64,
                selected_heads=kv_heads,
            )

            def expected(tensors=tensors, chosen=chosen, group=8 // kv_heads):
                mask = torch.zeros(1, chosen.shape[1], 256, 8192, dtype=torch.bool).scatter_(-1, chosen.long(), True)
                mask = mask.repeat_interleave(group, 1)
                return SDPA(tensors.q, tensors.k, tensors.v, mask, enable_gqa=True)

            plain = self._plain(case, tensors)
            yield Row("selected_indices, 64 of 8192", case, "plain kernel", ours, plain, 20, 60, expected)

    def _latent_heads(self):
        case = Case("MLA decode", "BF16", 1, 128, 1, 576, key_length=4096, kv_heads=1)
        tensors = make_tensors(case)
        values = tensors.k[..., :512].contiguous()
        scale = 1 / math.sqrt(192)
        ours = self._variant(
            case, tensors, values=False, values_in_keys=1, value_head_size=512, scale=scale, has_scale=1
        )
        peer = lambda: SDPA(tensors.q, tensors.k, values, scale=scale, enable_gqa=True)
        return Row("v_head_size 512", case, "PyTorch with V copied", ours, peer, 1.5, 3)


def t5_buckets(distance, buckets, max_distance):
    """Bidirectional."""
    half = buckets // 2
    exact, size = half // 2, distance.abs()
    far = exact + (size.clamp(min=1) / exact).log() / math.log(max_distance / exact) * (half - exact)
    far = far.long().clamp(max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(size < exact, size, far)


def check(row):
    ours, expected = row.ours(), (row.expected or row.peer)()
    tolerance = 4 * TOLERANCES[row.case.dtype]
    name = f"{row.variant} {row.case.name}"
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def run(row, bench):
    check(row)
    disturbance = Disturbance()
    seconds = measure({"rapt": row.ours, "peer": row.peer}, bench.rounds, bench.block_seconds)
    ours, theirs = statistics.median(seconds["rapt"]), statistics.median(seconds["peer"])
    return {
        "variant": row.variant,
        "name": row.case.name,
        "dtype": row.case.dtype,
        "against": row.against,
        "ours_ms": ours * 1e3,
        "peer_ms": theirs * 1e3,
        "ratio": theirs / ours,
        "floor": row.floor,
        "aim": row.aim,
        "workspace_bytes": row.ours.plan.workspace_bytes,
        "plan": row.ours.plan.description,
        "others_share": disturbance.share(),
    }


NOTES = """
Rows that miss their floor on two cores with AVX-512, and why:

- `rope_theta`, short and decode: pairs are rotated in FP64, so that every path returns the same bits. A short call
  uses each rotated row 128 times, a decode step once; the step also computes the sines of all positions.
- `selected_indices` with 8 KV heads: each query and head reads 64 rows of K and V of its own, 128 MiB in all, so that
  memory sets the time. Heads of a group share the rows: the row with one KV head.
"""

HEADER = (
    "| variant | case | type | against | rapt ms | its ms | ratio | floor, aim | reached | workspace KiB | plan |\n"
    + "| --- " * 11
    + "|"
)


def markdown(row):
    cells = [
        row["variant"],
        row["name"],
        row["dtype"],
        row["against"],
        milliseconds(row["ours_ms"]),
        milliseconds(row["peer_ms"]),
        f"{row['ratio']:.2f}",
        f"{row['floor']:g}, {row['aim']:g}",
        verdict(row),
        f"{row['workspace_bytes'] / 1024:.0f}",
        row["plan"],
    ]
    return "| " + " | ".join(cells) + " |"


def main():
    options = parse_arguments("dev bench variant", __doc__)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    gc.disable()
    bench = Bench(options)
    print(f"{options.threads} threads, PyTorch {torch.__version__}.\n\n{HEADER}")
    rows = []
    for row in Variants(bench).rows():
        if re.search(options.filter, f"{row.variant} {row.case.name} {row.case.dtype}"):
            rows.append(run(row, bench))
            print(markdown(rows[-1]), flush=True)
    if not rows:
        sys.exit(f"no row matches {options.filter!r}")
    below = sum(row["ratio"] < row["floor"] for row in rows)
    others = sorted(row["others_share"] for row in rows)
    print(f"\n{below} of {len(rows)} below the floor. Other processes took {others[len(others) // 2]:.0%} of the cores")
    print(f"in the median of the rows, {others[-1]:.0%} at most.")
    print(NOTES, end="")
    write_report(options, bench, rows)


if __name__ == "__main__":
    main()
