"""Compares layers and projections with PyTorch and oneDNN in one process; run by `./dev bench layer`.

As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate between
them, and figures are medians, quotients those of the rounds. Before a row is timed, its results are compared with
PyTorch's. The peer of layers is torch.nn.MultiheadAttention; that of projections is the oneDNN within PyTorch, with
weights that it has packed. Prints Markdown for RESULTS.md.
"""

import ctypes
import dataclasses
import re
import statistics
import sys

import torch
from kernel_bench import Bench, Disturbance, measure, milliseconds, parse_arguments, verdict, write_report
from rapt import capi

DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
CODES = {"FP32": 0, "FP16": 1, "BF16": 2}  # of DType in attention/tensor_view.h
TOLERANCES = {"FP32": 1e-5, "BF16": 3e-2}
# Of the ratio of the peer's time to rapt's.
LONG_LAYER = {"FP32": (1.2, 1.5), "BF16": (1.2, 2.0)}
OTHERS = (1.0, 1.1)
LEAST_BANDWIDTH_SHARE = 0.85


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str  # "layer", "projection"
    dtype: str
    rows: int  # of a batch row
    depth: int  # of a layer: the embedding
    columns: int = 0
    heads: int = 16
    batch: int = 1

    @property
    def name(self):
        if self.kind == "layer":
            return f"layer {self.batch}x{self.rows}x{self.depth}, {self.heads} heads"
        return f"projection {self.rows}x{self.depth}x{self.columns}"

    def is_step(self):
        return self.rows * self.batch == 1

    def flops(self):
        if self.kind == "projection":
            return 2 * self.rows * self.depth * self.columns
        return self.batch * (8 * self.rows * self.depth**2 + 4 * self.rows**2 * self.depth)

    def weight_bytes(self):
        size = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return size * (4 * self.depth**2 if self.kind == "layer" else self.depth * self.columns)


def all_cases():
    cases = [Case("layer", dtype, 1024, 1024) for dtype in DTYPES]
    cases += [Case("layer", dtype, 128, 768, heads=12, batch=8) for dtype in DTYPES]
    cases += [Case("layer", dtype, 1, 4096, heads=32) for dtype in DTYPES]
    for rows, depth, columns in ((128, 768, 2304), (1024, 768, 768), (1024, 1024, 3072), (1, 4096, 16384)):
        cases += [Case("projection", dtype, rows, depth, columns) for dtype in DTYPES]
    return cases


class Library:
    """bench/layer_library.cc."""

    def __init__(self):
        c = ctypes.CDLL(capi.library_path().with_name("librapt_layer_bench.so"))
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        pointers = ctypes.POINTER(pointer)
        for kind, sizes in (
            ("layer", [integer, integer, pointers, pointers, integer, integer]),
            ("projection", [integer, integer, integer, pointer, pointer]),
        ):
            opens, runs, closes = (getattr(c, f"rapt_{kind}_bench_{name}") for name in ("open", "run", "close"))
            opens.argtypes, opens.restype = [ctypes.c_int, *sizes, ctypes.c_int], pointer
            runs.argtypes, runs.restype = [pointer] * 3, None
            closes.argtypes, closes.restype = [pointer], None
        c.rapt_layer_bench_workspace.argtypes, c.rapt_layer_bench_workspace.restype = [pointer], integer
        self.c = c


class Rapt:
    """A call, whose output stays where it is."""

    def __init__(self, library, kind, opened, x, output):
        if not opened:
            raise ValueError(f"rapt refused a {kind}")
        self._run, self._close = (getattr(library.c, f"rapt_{kind}_bench_{name}") for name in ("run", "close"))
        self.opened, self.output, self._x = opened, output, x

    def __call__(self):
        self._run(self.opened, self._x.data_ptr(), self.output.data_ptr())
        return self.output

    def close(self):
        self._close(self.opened)


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def layer_sides(case, library, threads):
    dtype = DTYPES[case.dtype]
    module = torch.nn.MultiheadAttention(case.depth, case.heads, batch_first=True).to(dtype).eval()
    for bias in (module.in_proj_bias, module.out_proj.bias):
        bias.uniform_(-1, 1)
    x = torch.randn(case.batch, case.rows, case.depth).to(dtype)
    matrices = [*module.in_proj_weight.chunk(3), module.out_proj.weight]
    biases = [*module.in_proj_bias.chunk(3), module.out_proj.bias]
    opened = library.c.rapt_layer_bench_open(
        CODES[case.dtype], case.depth, case.heads, pointers(matrices), pointers(biases), case.batch, case.rows, threads
    )
    peer = lambda: module(x, x, x, need_weights=False)[0]
    return Rapt(library, "layer", opened, x, torch.empty_like(x)), peer


def projection_sides(case, library, threads):
    dtype = DTYPES[case.dtype]
    x = torch.randn(case.rows, case.depth).to(dtype)
    matrix = (torch.randn(case.columns, case.depth) / case.depth**0.5).to(dtype)
    bias = torch.randn(case.columns)
    opened = library.c.rapt_projection_bench_open(
        CODES[case.dtype], case.rows, case.depth, case.columns, matrix.data_ptr(), bias.data_ptr(), threads
    )
    ours = Rapt(library, "projection", opened, x, torch.empty(case.rows, case.columns, dtype=dtype))
    ours.bias = bias
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, case.rows)
    typed = bias.to(dtype)
    return ours, lambda: torch.ops.mkldnn._linear_pointwise(x, packed, typed, "none", [], "")


def run(case, bench, library):
    torch.manual_seed(2027)
    sides = layer_sides if case.kind == "layer" else projection_sides
    ours, peer = sides(case, library, bench.threads)
    want = peer().float()
    error = ((ours().float() - want).abs().max() / want.abs().max()).item()
    if not error <= 2 * TOLERANCES[case.dtype]:
        sys.exit(f"{case.name} {case.dtype}: differs from PyTorch by {error:.2g}")
    probe = "read_gbps" if case.is_step() else "fma_gflops"
    ceiling = bench.probes.ask(probe)
    disturbance = Disturbance()
    seconds = measure({"rapt": ours, "torch": peer}, bench.rounds, bench.block_seconds)
    others = disturbance.share()
    ceiling = max(ceiling, bench.probes.ask(probe))
    ratios = sorted(b / a for a, b in zip(seconds["rapt"], seconds["torch"]))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rate = (case.weight_bytes() if case.is_step() else case.flops()) / median["rapt"] * 1e-9
    floor, aim = LONG_LAYER[case.dtype] if case.kind == "layer" and case.rows == 1024 else OTHERS
    workspace = library.c.rapt_layer_bench_workspace(ours.opened) if case.kind == "layer" else None
    ours.close()
    return {
        "name": case.name,
        "dtype": case.dtype,
        "ms": {name: s * 1e3 for name, s in median.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "floor": floor,
        "aim": aim,
        "rate": rate,
        "rate_unit": "GB/s" if case.is_step() else "GF/s",
        "peak_share": rate / ceiling,
        "is_step": case.is_step(),
        "difference": error,
        "workspace_bytes": workspace,
        "others_share": others,
    }


HEADER = (
    "| case | type | rapt ms | PyTorch or oneDNN ms | ratio | quartiles | floor, aim | reached | rate | of peak |"
    " difference | workspace KiB |\n" + "| --- " * 12 + "|"
)


def markdown(row):
    low, high = row["ratio_quartiles"]
    workspace = row["workspace_bytes"]
    cells = [
        row["name"],
        row["dtype"],
        milliseconds(row["ms"]["rapt"]),
        milliseconds(row["ms"]["torch"]),
        f"{row['ratio']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{row['floor']:g}, {row['aim']:g}",
        verdict(row),
        f"{row['rate']:.3g} {row['rate_unit']}",
        f"{row['peak_share']:.0%}",
        f"{row['difference']:.1e}",
        "-" if workspace is None else f"{workspace / 1024:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main():
    options = parse_arguments("dev bench layer", __doc__)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    bench, library = Bench(options), Library()
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.name} {case.dtype}")]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    print(f"{options.threads} threads, PyTorch {torch.__version__}. The peer of layers is torch.nn.MultiheadAttention, that of")
    print("projections the oneDNN within PyTorch, with packed weights. The rate of many rows is in operations, and its")
    print("peak that of FMA in FP32, which dot products of BF16 exceed; of one row, in bytes of weights.\n")
    print(HEADER)
    rows = []
    for case in cases:
        rows.append(run(case, bench, library))
        print(markdown(rows[-1]), flush=True)
    below = sum(row["ratio"] < row["floor"] for row in rows)
    steps = [row for row in rows if row["is_step"]]
    slow = sum(row["peak_share"] < LEAST_BANDWIDTH_SHARE for row in steps)
    others = sorted(row["others_share"] for row in rows)
    print(f"\n{below} of {len(rows)} below the floor; {slow} of the {len(steps)} with one row below {LEAST_BANDWIDTH_SHARE:.0%} of the")
    print(f"read bandwidth. Other processes took {others[len(others) // 2]:.0%} of the cores in the median of the rows,")
    print(f"{others[-1]:.0%} at most.")
    write_report(options, bench, rows)


if __name__ == "__main__":
    main()
