"""Compares calls of the Python package with PyTorch's and with those of the C interface; run by `./dev bench python`.

As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate between them, and
figures are medians. `C` is the library's call with arguments that are ready, as in kernel_bench.py. Prints Markdown for
RESULTS.md.
"""

import gc
import json
import pathlib
import re
import statistics
import subprocess
import sys

import rapt
import torch
from kernel_bench import (
    Bench,
    Case,
    Disturbance,
    commit,
    cpu_model,
    make_tensors,
    measure,
    milliseconds,
    parse_arguments,
    rapt_attention_of,
    torch_attention,
)

LEAST_OF_C = 0.97  # of the ratio of the C interface to PyTorch, for calls of a millisecond and more
MOST_OVERHEAD_US, MOST_IMPORT_MS = 12, 120


def all_cases():
    yield Case("tiny", "FP32", 1, 1, 4, 16)
    for dtype in ("FP32", "BF16"):
        yield Case("prefill", dtype, 1, 8, 1024, 64)
        yield Case("causal", dtype, 1, 8, 2048, 64, causal=True)
        yield Case("short", dtype, 32, 8, 128, 64)
        yield Case("decode GQA", dtype, 8, 32, 1, 128, key_length=4096, kv_heads=8)


def run(case, bench):
    t = make_tensors(case)
    arrays = [x.numpy() for x in (t.q, t.k, t.v)] if case.dtype == "FP32" else None
    sides = {
        "torch": torch_attention(case, t),
        "C": rapt_attention_of(bench.context, case, t),
        "tensors": lambda: rapt.attention(t.q, t.k, t.v, causal=case.causal),
    }
    if arrays:
        sides["NumPy"] = lambda: rapt.attention(*arrays, causal=case.causal)
    assert torch.equal(sides["C"](), sides["tensors"]())
    disturbance = Disturbance()
    seconds = {name: statistics.median(s) for name, s in measure(sides, bench.rounds, bench.block_seconds).items()}
    return {"name": case.name, "dtype": case.dtype, "seconds": seconds, "others_share": disturbance.share()}


def markdown(row):
    seconds = row["seconds"]
    times = [milliseconds(seconds[name] * 1e3 if name in seconds else None) for name in ("torch", "C", "tensors", "NumPy")]
    share = seconds["C"] / seconds["tensors"]
    reached = "-" if seconds["C"] < 1e-3 else "floor" if share >= LEAST_OF_C else "**below**"
    cells = [row["name"], row["dtype"], *times, f"{seconds['torch'] / seconds['tensors']:.2f}", f"{share:.2f}", reached]
    return "| " + " | ".join(cells) + " |"


def import_milliseconds():
    """The time of `import rapt` once NumPy is loaded: the median of new processes."""
    code = "import numpy, time; t = time.perf_counter(); import rapt; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    times = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(9)]
    return statistics.median(times) * 1e3


def main():
    options = parse_arguments("dev bench python", __doc__)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rapt.set_num_threads(options.threads)
    gc.disable()
    bench = Bench(options)
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.name} {case.dtype}")]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    print(f"{options.threads} threads, PyTorch {torch.__version__}, Python {sys.version.split()[0]}.\n")
    print(
        "| case | type | PyTorch ms | C ms | rapt, tensors ms | rapt, NumPy ms | PyTorch / rapt | C / rapt | floor 0.97 |\n"
        + "| --- " * 9
        + "|"
    )
    rows = []
    for case in cases:
        rows.append(run(case, bench))
        print(markdown(rows[-1]), flush=True)
    for row in rows:
        if row["name"].startswith("tiny"):
            over = {name: (row["seconds"][name] - row["seconds"]["C"]) * 1e6 for name in ("tensors", "NumPy")}
            print(f"\nA tiny call takes {over['NumPy']:.1f} us more than C with NumPy's arrays, {over['tensors']:.1f} us more with")
            print(f"PyTorch's tensors (aim {MOST_OVERHEAD_US}).", end=" ")
    imported = import_milliseconds()
    print(f"`import rapt` takes {imported:.0f} ms once NumPy is loaded (aim {MOST_IMPORT_MS}).")
    others = sorted(row["others_share"] for row in rows)
    print(f"Other processes took {others[len(others) // 2]:.0%} of the cores in the median of the rows, {others[-1]:.0%} at most.")
    if options.json:
        machine = {"cpu": cpu_model(), "threads": options.threads}
        report = {"machine": machine, "commit": commit(), "rows": rows, "import_ms": imported}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
