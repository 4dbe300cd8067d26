"""Compares the backward pass with PyTorch's autograd; run by `./dev bench backward`.

As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate between
them, and figures are medians. A step is a forward pass that keeps lse and a backward pass that uses Y and lse, as in
training. Before a row is timed, its gradients are compared with those of the same formulas in FP64. Prints Markdown
for RESULTS.md.
"""

import ctypes
import dataclasses
import gc
import math
import re
import statistics
import sys

import torch
from kernel_bench import (
    RAPT_DTYPES,
    Bench,
    Case,
    Disturbance,
    make_tensors,
    measure,
    milliseconds,
    parse_arguments,
    peak_bytes,
    problem_of,
    verdict,
    write_report,
)
from rapt import capi

SDPA = torch.nn.functional.scaled_dot_product_attention
D_QUERY, D_KEY, D_VALUE = 1, 2, 4
# Times of the forward pass that a backward pass takes at most: with Y and lse, and without.
MOST_WITH_OUTPUT, MOST_WITHOUT = 2.7, 3.5


def all_cases():
    for dtype in ("FP32", "BF16"):
        for head_size in (64, 128):
            for causal in (False, True):
                regime = "causal" if causal else "full"
                for length in (512, 1024, 2048, 4096):
                    yield Case(regime, dtype, 1, 16, length, head_size, causal=causal)
        yield Case("grouped", dtype, 1, 16, 2048, 64, kv_heads=4)
        yield Case("grouped", dtype, 1, 16, 2048, 128, kv_heads=4, causal=True)


def targets(case):
    """Floor and aim of the ratio to PyTorch."""
    return (1.2, 1.5) if case.dtype == "FP32" else (1.5, 2.0)


class Call:
    """A call of the library. `inputs` and `outputs`: fields of rapt_arguments -> tensors, all contiguous."""

    def __init__(self, bench, case, dtype, inputs, outputs, **fields):
        problem = problem_of(case)
        problem.dtype = RAPT_DTYPES[dtype]
        for name, value in fields.items():
            if not hasattr(problem, name):
                raise TypeError(f"rapt_problem has no field {name}")
            setattr(problem, name, value)
        self._kept = inputs, outputs  # alive: the arguments hold addresses
        self._arguments = capi.Arguments()
        for name, tensor in {**inputs, **outputs}.items():
            getattr(self._arguments, name).data = tensor.data_ptr()
        self.plan = capi.Plan(bench.context, problem)
        self._given = ctypes.byref(self._arguments)

    def __call__(self):
        self.plan.run(self._given)


class Side:
    """rapt's three calls on a case's tensors."""

    def __init__(self, bench, case, tensors, dy):
        t, dtype = tensors, tensors.q.dtype
        inputs = {"query": t.q, "key": t.k, "value": t.v}
        y = torch.empty(*t.q.shape[:3], t.v.shape[3], dtype=dtype)
        lse = torch.empty(t.q.shape[:3], dtype=torch.float32)
        self.gradients = [torch.empty_like(x) for x in (t.q, t.k, t.v)]
        outputs = dict(zip(("d_query", "d_key", "d_value"), self.gradients))
        fields = {"gradients": D_QUERY | D_KEY | D_VALUE}
        self.forward = Call(bench, case, dtype, inputs, {"output": y, "lse": lse}, wants_lse=1)
        inputs = {**inputs, "output_gradient": dy}
        self.without = Call(bench, case, dtype, inputs, outputs, **fields)
        inputs = {**inputs, "forward_output": y, "forward_lse": lse}
        self.backward = Call(bench, case, dtype, inputs, outputs, has_forward=1, **fields)

    def step(self):
        self.forward()
        self.backward()


def torch_step(case, tensors, dy, dtype=None):
    """Returns a call that returns the gradients, of `dtype` if it is not None."""
    q, k, v = (x.to(dtype or x.dtype).detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    dy = dy.to(q.dtype)

    def step():
        y = SDPA(q, k, v, is_causal=case.causal, enable_gqa=bool(case.kv_heads))
        return torch.autograd.grad(y, (q, k, v), dy)

    return step


def errors(gradients, exact):
    """The largest error of any gradient, relative to the largest number of that gradient."""
    return max(((g.double() - e).abs().max() / e.abs().max()).item() for g, e in zip(gradients, exact))


def run(case, bench):
    tensors = make_tensors(case)
    dy = torch.randn(*tensors.q.shape[:3], tensors.v.shape[3], generator=torch.Generator().manual_seed(7))
    dy = dy.to(tensors.q.dtype)
    side, peer = Side(bench, case, tensors, dy), torch_step(case, tensors, dy)
    exact = torch_step(case, tensors, dy, torch.float64)()
    side.step()
    ours, theirs = errors(side.gradients, exact), errors(peer(), exact)
    if not ours <= 2 * theirs:
        sys.exit(f"{case.name} {case.dtype}: error {ours:.2g}, PyTorch's {theirs:.2g}")
    del exact
    disturbance = Disturbance()
    sides = {
        "step": side.step,
        "torch": peer,
        "forward": side.forward,
        "backward": side.backward,
        "without": side.without,
    }
    seconds = {name: statistics.median(s) for name, s in measure(sides, bench.rounds, bench.block_seconds).items()}
    floor, aim = targets(case)
    return {
        "name": case.name,
        "dtype": case.dtype,
        "ms": {name: s * 1e3 for name, s in seconds.items()},
        "ratio": seconds["torch"] / seconds["step"],
        "floor": floor,
        "aim": aim,
        "backward_share": seconds["backward"] / seconds["forward"],
        "without_share": seconds["without"] / seconds["forward"],
        "error_share": ours / theirs,
        "workspace_bytes": side.backward.plan.workspace_bytes,
        "plan": side.backward.plan.description,
        "others_share": disturbance.share(),
    }


HEADER = (
    "| case | type | forward ms | backward ms | without Y ms | step ms | PyTorch ms | ratio | floor, aim | reached |"
    " backward / forward | without / forward | error / PyTorch's | workspace MiB | plan |\n" + "| --- " * 15 + "|"
)


def markdown(row):
    times = [milliseconds(row["ms"][name]) for name in ("forward", "backward", "without", "step", "torch")]
    cells = [
        row["name"],
        row["dtype"],
        *times,
        f"{row['ratio']:.2f}",
        f"{row['floor']:g}, {row['aim']:g}",
        verdict(row),
        f"{row['backward_share']:.2f}",
        f"{row['without_share']:.2f}",
        f"{row['error_share']:.2f}",
        f"{row['workspace_bytes'] / 2**20:.1f}",
        row["plan"],
    ]
    return "| " + " | ".join(cells) + " |"


def standard_step(case, tensors, dy):
    """Attention with the matrix of scores, as PyTorch's math path, and its gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v))

    def step():
        weights = torch.softmax(q @ k.mT / math.sqrt(case.head_size), -1)
        return torch.autograd.grad(weights @ v, (q, k, v), dy)

    return step


def print_memory(bench):
    print("\nFP32, 16 heads: peak memory of a step beyond Q, K, V and dY, and that beyond Y, lse and gradients, too.\n")
    print("| case | standard MiB | PyTorch SDPA MiB | rapt MiB | beyond the tensors | of standard |\n" + "| --- " * 6 + "|")
    rows = []
    for head_size in (64, 128):
        case = Case("memory", "FP32", 1, 16, 2048, head_size)
        tensors = make_tensors(case)
        dy = torch.randn_like(tensors.q)

        def ours(case=case, tensors=tensors, dy=dy):
            fresh = Bench(bench.options)  # so that its workspace is counted
            Side(fresh, case, tensors, dy).step()

        calls = {
            "standard": standard_step(case, tensors, dy),
            "torch": torch_step(case, tensors, dy),
            "rapt": ours,
        }
        mib = {name: peak_bytes(call) / 2**20 for name, call in calls.items()}
        elements = 4 * tensors.q.numel() + tensors.q.numel() // head_size  # dQ, dK, dV, Y; lse
        beyond = mib["rapt"] - elements * 4 / 2**20
        cells = [f"{mib[name]:.1f}" for name in calls] + [f"{beyond:.1f}", f"{beyond / mib['standard']:.3f}"]
        print("| " + " | ".join([case.name, *cells]) + " |", flush=True)
        rows.append({"name": case.name, "peak_mib": mib})
    return rows


def main():
    options = parse_arguments("dev bench backward", __doc__)
    torch.set_num_threads(options.threads)
    gc.disable()
    bench = Bench(options)
    bench.options = options
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.name} {case.dtype}")]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    print(f"{options.threads} threads, PyTorch {torch.__version__}.\n\n{HEADER}")
    rows = []
    for case in cases:
        rows.append(run(case, bench))
        print(markdown(rows[-1]), flush=True)
    below = sum(row["ratio"] < row["floor"] for row in rows)
    slow = sum(row["backward_share"] > MOST_WITH_OUTPUT for row in rows)
    slow_without = sum(row["without_share"] > MOST_WITHOUT for row in rows)
    others = sorted(row["others_share"] for row in rows)
    print(f"\n{below} of {len(rows)} below the floor; {slow} above {MOST_WITH_OUTPUT} forward passes with Y and lse,")
    print(f"{slow_without} above {MOST_WITHOUT} without. Other processes took {others[len(others) // 2]:.0%} of the cores")
    print(f"in the median of the rows, {others[-1]:.0%} at most.")
    memory = [] if options.quick else print_memory(bench)
    write_report(options, bench, rows, memory=memory)


if __name__ == "__main__":
    main()
