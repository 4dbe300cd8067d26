"""Compares rapt's kernels with PyTorch's and ONNX Runtime's in one process; run by `./dev bench kernel`.

Every side has the same number of threads and allocates its output in every call, rapt and PyTorch with the
same allocator. rapt's workspace is reused between calls, as in the server. Rounds alternate between the
sides; figures are medians. Before a case is timed, rapt's results are compared with PyTorch's, and some rows
with float64. Prints Markdown for RESULTS.md.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

import torch
from onnx_attention import OnnxAttention, onnxruntime_version
from rapt import capi

ROOT = pathlib.Path(__file__).resolve().parents[1]

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "FP64": torch.float64}
RAPT_DTYPES = {
    torch.float32: capi.FP32,
    torch.float16: capi.FP16,
    torch.bfloat16: capi.BF16,
    torch.float64: capi.FP64,
    torch.bool: capi.BOOL,
}
TOLERANCES = {"FP64": 1e-12, "FP32": 2e-6, "FP16": 2e-3, "BF16": 1.6e-2}

# --- Cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    regime: str
    dtype: str
    batch: int
    query_heads: int
    query_length: int
    head_size: int
    key_length: int = 0  # 0: the number of queries
    kv_heads: int = 0  # 0: the number of query heads
    causal: bool = False
    mask: str = ""  # "bool", "float": [Sq, Sk]; "padding": a bool [B, 1, 1, Sk]; "heads": a bool for each

    @property
    def keys(self):
        return self.key_length or self.query_length

    @property
    def key_heads(self):
        return self.kv_heads or self.query_heads

    @property
    def name(self):
        heads = f"{self.query_heads}/{self.kv_heads}" if self.kv_heads else str(self.query_heads)
        lengths = f"{self.query_length}:{self.key_length}" if self.key_length else str(self.query_length)
        return f"{self.regime} {self.batch}x{heads}x{lengths}x{self.head_size}"

    def flops(self):
        """Multiply-adds count as two; pairs hidden by causality are not counted."""
        pairs = self.query_length * self.keys
        if self.causal:
            pairs = sum(min(i + 1, self.keys) for i in range(self.query_length))
        return 4.0 * self.batch * self.query_heads * pairs * self.head_size

    def key_value_bytes(self):
        element = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return 2 * self.batch * self.key_heads * self.keys * self.head_size * element

    def streams(self):
        """Returns whether the case is bound by reading K and V."""
        return self.query_length == 1


def all_cases():
    halves = ("FP16", "BF16")
    cases = []

    def add(regime, dtypes, *shape, **more):
        cases.extend(Case(regime, dtype, *shape, **more) for dtype in dtypes)

    for head_size in (64, 128):
        for length in (512, 1024, 2048, 4096):
            add("prefill", ("FP32", *halves), 1, 8, length, head_size)
    add("prefill", ("FP32", *halves), 32, 8, 512, 64)
    add("prefill GQA", ("FP32", "BF16"), 1, 32, 1024, 128, kv_heads=8)
    for head_size in (64, 128):
        add("causal", ("FP32", *halves), 1, 8, 2048, head_size, causal=True)
    add("short", ("FP32", *halves), 32, 8, 128, 64)
    for mask in ("bool", "float", "padding", "heads"):
        add(f"{mask} mask", ("FP32",), 2, 8, 1024, 64, mask=mask)
    add("bool mask", halves, 2, 8, 1024, 64, mask="bool")
    add("decode", ("FP32", *halves), 8, 32, 1, 128, key_length=4096)
    add("decode GQA", ("FP32", *halves), 8, 32, 1, 128, key_length=4096, kv_heads=8)
    add("decode one head", ("FP32", "BF16"), 1, 1, 1, 128, key_length=65536)
    add("decode short", ("FP32", "BF16"), 4, 8, 1, 64, key_length=128)
    add("cross", ("FP32", "BF16"), 1, 8, 128, 64, key_length=4096)
    for shape in ((1, 1, 1, 64), (1, 1, 16, 64), (1, 2, 7, 80), (1, 4, 32, 32), (1, 12, 64, 64)):
        add("tiny", ("FP32", *halves), *shape)
    for head_size in (33, 40, 72, 80, 96, 100, 160, 192, 256):
        add("head size", ("FP32",), 1, 8, 512, head_size)
    add("head size", halves, 1, 8, 512, 80)
    add("double", ("FP64",), 1, 8, 512, 64)
    for length in (64, 128, 256, 512):
        add("tutorial", ("FP32",), 32, 8, length, 64)
    return cases


# Floors and aims for the ratio of PyTorch's time to rapt's. Machines with AMX have separate aims.
NEVER_SLOWER = (1.0, None)
TARGETS = {
    ("prefill", 64, "FP32"): (1.35, 1.5),
    ("prefill", 128, "FP32"): (1.15, 1.3),
    ("prefill", 64, "FP16"): (1.3, None),
    ("prefill", 128, "FP16"): (1.3, None),
    ("causal", 64, "FP32"): (1.4, 1.6),
    ("causal", 128, "FP32"): (1.4, 1.6),
    ("causal", 64, "FP16"): (1.3, None),
    ("causal", 128, "FP16"): (1.3, None),
    ("short", 64, "FP32"): (1.5, 1.7),
    ("short", 64, "FP16"): (1.3, None),
    ("bool mask", 64, "FP32"): (1.4, 1.5),
    ("bool mask", 64, "FP16"): (1.3, None),
    ("float mask", 64, "FP32"): (1.4, 1.5),
    ("decode", 128, "FP32"): (1.3, 1.4),
    ("decode", 128, "FP16"): (1.3, None),
    ("decode", 128, "BF16"): (1.5, 1.65),
    ("decode GQA", 128, "FP32"): (2.7, 3.7),
    ("decode GQA", 128, "FP16"): (1.3, None),
    ("decode GQA", 128, "BF16"): (2.7, 3.7),
}
TARGETS_WITH_AMX = {
    ("prefill", 64, "FP32"): (1.35, 2.0),
    ("prefill", 128, "FP32"): (1.15, 2.1),
    ("prefill", 64, "FP16"): (1.3, 3.4),
    ("prefill", 128, "FP16"): (1.3, 3.4),
    ("prefill", 64, "BF16"): (2.0, 2.7),
    ("prefill", 128, "BF16"): (1.9, 2.5),
    ("causal", 64, "BF16"): (2.2, 2.6),
    ("causal", 128, "BF16"): (2.2, 2.6),
    ("short", 64, "FP16"): (1.3, 2.4),
    ("short", 64, "BF16"): (2.4, 3.0),
}


def targets(case, has_amx):
    key = (case.regime, case.head_size, case.dtype)
    if has_amx and key in TARGETS_WITH_AMX:
        return TARGETS_WITH_AMX[key]
    return TARGETS.get(key, NEVER_SLOWER)


@dataclasses.dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None


def make_mask(case, random):
    shape = (1, 1, case.query_length, case.keys)
    if case.mask == "float":
        return torch.randn(shape, generator=random).to(DTYPES[case.dtype])
    if case.mask == "padding":
        lengths = torch.linspace(case.keys // 2, case.keys, case.batch).long()
        return (torch.arange(case.keys)[None, :] < lengths[:, None])[:, None, None, :].contiguous()
    if case.mask == "heads":
        shape = (case.batch, case.query_heads, case.query_length, case.keys)
    mask = torch.rand(shape, generator=random) < 2 / 3
    mask[..., 0] = True  # Every query sees a key: otherwise PyTorch's kernels disagree with each other.
    return mask


def make_tensors(case):
    random = torch.Generator().manual_seed(20220623)

    def normal(heads, length):
        return torch.randn(case.batch, heads, length, case.head_size, generator=random).to(DTYPES[case.dtype])

    q = normal(case.query_heads, case.query_length)
    k, v = normal(case.key_heads, case.keys), normal(case.key_heads, case.keys)
    return Tensors(q, k, v, make_mask(case, random) if case.mask else None)


# --- Computing sides ----------------------------------------------------------------------------


class Rapt:
    """A call of the library. `inputs`: fields of rapt_arguments -> tensors, all contiguous."""

    def __init__(self, context, problem, inputs):
        query = inputs["query"]
        problem.dtype = RAPT_DTYPES[query.dtype]
        self._inputs = inputs  # kept alive: the arguments hold addresses
        self._arguments = capi.Arguments()
        for name, tensor in inputs.items():
            getattr(self._arguments, name).data = tensor.data_ptr()
        self.plan = capi.Plan(context, problem)
        self._output = self._arguments.output
        self._given = ctypes.byref(self._arguments)
        self._shape, self._dtype = (*query.shape[:3], problem.value_head_size), query.dtype

    def __call__(self):
        output = torch.empty(self._shape, dtype=self._dtype)
        self._output.data = output.data_ptr()
        self.plan.run(self._given)
        return output


class Operator:
    """A call of an operator other than attention on contiguous tensors of float32. Its `outputs` stay where they are."""

    def __init__(self, context, name, inputs, attributes, outputs):
        self._inputs = inputs  # kept alive: the arguments hold addresses
        call = capi.Call(name)
        for tensor, x in inputs.items():
            call.set_input(tensor, capi.FP32, x.shape)
        for attribute, value in attributes.items():
            call.set_attribute(attribute, value)
        for output in outputs:
            call.want(output)
        self.plan = capi.Plan(context, call)
        self.outputs = [torch.empty(self.plan.output(output)[0]) for output in outputs]
        tensors = inputs | dict(zip(outputs, self.outputs))
        self._tensors = capi.tensors({tensor: x.data_ptr() for tensor, x in tensors.items()})

    def __call__(self):
        self.plan.run(self._tensors, len(self._tensors))
        return self.outputs[0]


def problem_of(case):
    return capi.Problem(
        causal=case.causal,
        batch=case.batch,
        query_heads=case.query_heads,
        kv_heads=case.key_heads,
        query_length=case.query_length,
        key_length=case.keys,
        head_size=case.head_size,
        value_head_size=case.head_size,
    )


def rapt_attention_of(context, case, tensors):
    problem, inputs = problem_of(case), {"query": tensors.q, "key": tensors.k, "value": tensors.v}
    if tensors.mask is not None:
        problem.mask_dtype = RAPT_DTYPES[tensors.mask.dtype]
        problem.mask_shape[:] = tensors.mask.shape
        inputs["mask"] = tensors.mask
    return Rapt(context, problem, inputs)


def torch_attention(case, tensors):
    attention, t = torch.nn.functional.scaled_dot_product_attention, tensors
    if case.kv_heads:
        return lambda: attention(t.q, t.k, t.v, t.mask, is_causal=case.causal, enable_gqa=True)
    return lambda: attention(t.q, t.k, t.v, t.mask, is_causal=case.causal)


def standard_attention(tensors):
    """The textbook algorithm: the scores are a tensor."""
    scale = 1 / math.sqrt(tensors.q.shape[-1])
    return lambda: torch.softmax(tensors.q @ tensors.k.mT * scale, dim=-1) @ tensors.v


# --- Checking -------------------------------------------------------------------------------------


def visible(case, tensors, b, h, i):
    """The addend to the scores of one query, float64."""
    bias = torch.zeros(case.keys, dtype=torch.float64)
    if tensors.mask is not None:
        mask = tensors.mask.expand(case.batch, case.query_heads, case.query_length, case.keys)[b, h, i]
        if mask.dtype == torch.bool:
            bias.masked_fill_(~mask, -math.inf)
        else:
            bias += mask.double()
    if case.causal:
        bias[i + 1 :] = -math.inf
    return bias


def check(case, tensors, ours, theirs):
    """Raises if rapt disagrees with PyTorch, or a few of its rows with float64."""
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(ours, theirs, rtol=2 * tolerance, atol=2 * tolerance, msg=lambda m: f"{case.name}: {m}")
    group = case.query_heads // case.key_heads
    for b, h in ((0, 0), (case.batch - 1, case.query_heads - 1)):
        keys, values = tensors.k[b, h // group].double(), tensors.v[b, h // group].double()
        for i in sorted({0, case.query_length // 2, case.query_length - 1}):
            scores = keys @ tensors.q[b, h, i].double() / math.sqrt(case.head_size) + visible(case, tensors, b, h, i)
            want = torch.softmax(scores, dim=0) @ values
            error = (ours[b, h, i].double() - want).abs()
            if not bool((error <= tolerance + tolerance * want.abs()).all()):
                raise AssertionError(f"{case.name}: row ({b}, {h}, {i}) is off by {error.max():.3g}")


# --- Measuring ------------------------------------------------------------------------------------

LONG_SECONDS = 0.1  # Calls this long vary little.
ONNX_RUNTIME_ROUNDS = 2  # For orientation only; no target refers to it.
SETTLE_SECONDS = 0.06  # until the threads of OpenMP and ONNX Runtime stop spinning, which would slow down the next side


def timed_block(call, calls):
    """Seconds per call in a series of calls, without the first, which wakes the side's threads."""
    time.sleep(SETTLE_SECONDS)
    output = call()
    begin = time.perf_counter()
    for _ in range(calls):
        output = call()
    seconds = (time.perf_counter() - begin) / calls
    del output
    return seconds


def measure(sides, rounds, block_seconds):
    """sides: name -> call. Returns name -> the seconds of each round."""
    once = {name: timed_block(call, 1) for name, call in sides.items()}
    calls = {name: max(1, round(block_seconds / seconds)) for name, seconds in once.items()}
    if max(once.values()) > LONG_SECONDS:
        rounds = min(rounds, 3)
    seconds = {name: [] for name in sides}
    for n in range(rounds):
        for name, call in sides.items():
            if name != "onnxruntime" or n < ONNX_RUNTIME_ROUNDS:
                seconds[name].append(timed_block(call, calls[name]))
    return seconds


class Disturbance:
    """The share of the machine's cores used by other processes since the start."""

    def __init__(self):
        self._begin = self._now()

    def share(self):
        wall, busy, own = (now - begin for now, begin in zip(self._now(), self._begin))
        return max(0.0, (busy - own) / (wall * os.cpu_count()))

    @staticmethod
    def _now():
        # user, nice, system, idle, iowait, irq, softirq, steal
        jiffies = [int(n) for n in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(jiffies) - jiffies[3] - jiffies[4]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


class Probes:
    """The machine's ceilings, measured on request."""

    def __init__(self, path, threads):
        self._c, self._threads = ctypes.CDLL(path), threads
        for name in ("fma_gflops", "amx_gflops", "read_gbps"):
            getattr(self._c, f"rapt_probe_{name}").restype = ctypes.c_double
        self.has_amx = self.ask("amx_gflops") > 0

    def ask(self, name):
        return getattr(self._c, f"rapt_probe_{name}")(self._threads)

    def ceiling(self, case):
        """Per second: 10^9 bytes for cases bound by K and V, else 10^9 operations."""
        if case.streams():
            return self.ask("read_gbps")
        if case.dtype == "BF16" and self.has_amx:
            return self.ask("amx_gflops")
        return self.ask("fma_gflops") / (2 if case.dtype == "FP64" else 1)


class Bench:
    def __init__(self, options):
        self.threads, self.quick = options.threads, options.quick
        self.context = capi.Context(options.threads, isa=options.isa)
        self.probes = Probes(capi.library_path().with_name("librapt_probes.so"), options.threads)
        self.rounds, self.block_seconds = (3, 0.015) if options.quick else (5, 0.02)

    def row(self, case):
        tensors = make_tensors(case)
        rapt, peer = rapt_attention_of(self.context, case, tensors), torch_attention(case, tensors)
        check(case, tensors, rapt(), peer())
        sides = {"rapt": rapt, "torch": peer}
        if not self.quick and (onnx := OnnxAttention.make(case, tensors, self.threads)):
            sides["onnxruntime"] = onnx
        ceiling = [self.probes.ceiling(case)]
        disturbance = Disturbance()
        seconds = measure(sides, self.rounds, self.block_seconds)
        others = disturbance.share()
        ceiling.append(self.probes.ceiling(case))
        return {**self._summary(case, rapt.plan, seconds, max(ceiling)), "others_share": others}

    def _summary(self, case, plan, seconds, ceiling):
        ours, theirs = statistics.median(seconds["rapt"]), statistics.median(seconds["torch"])
        ratios = sorted(b / a for a, b in zip(seconds["rapt"], seconds["torch"]))
        rate = (case.key_value_bytes() if case.streams() else case.flops()) / ours * 1e-9
        floor, aim = targets(case, self.probes.has_amx)
        onnx = seconds.get("onnxruntime")
        return {
            "name": case.name,
            "dtype": case.dtype,
            "ours_ms": ours * 1e3,
            "torch_ms": theirs * 1e3,
            "onnxruntime_ms": statistics.median(onnx) * 1e3 if onnx else None,
            "ratio": theirs / ours,
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "floor": floor,
            "aim": aim,
            "rate": rate,
            "rate_unit": "GB/s" if case.streams() else "GF/s",
            "peak_share": rate / ceiling,
            "workspace_bytes": plan.workspace_bytes,
            "plan": plan.description,
        }


def verdict(row):
    if row["ratio"] < row["floor"]:
        return "**below**"
    return "aim" if row["aim"] and row["ratio"] >= row["aim"] else "floor"


def milliseconds(value):
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


HEADER = (
    "| case | type | rapt ms | PyTorch ms | ONNX Runtime ms | ratio | quartiles | floor, aim | reached | rate | of peak |"
    " workspace KiB | plan |\n" + "| --- " * 13 + "|"
)


def markdown(row):
    low, high = row["ratio_quartiles"]
    aim = f"{row['floor']:g}, {row['aim']:g}" if row["aim"] else f"{row['floor']:g}"
    cells = [
        row["name"],
        row["dtype"],
        milliseconds(row["ours_ms"]),
        milliseconds(row["torch_ms"]),
        milliseconds(row["onnxruntime_ms"]),
        f"{row['ratio']:.2f}",
        f"{low:.2f}-{high:.2f}",
        aim,
        verdict(row),
        f"{row['rate']:.3g} {row['rate_unit']}",
        f"{row['peak_share']:.0%}",
        f"{row['workspace_bytes'] / 1024:.0f}",
        row["plan"],
    ]
    return "| " + " | ".join(cells) + " |"


# --- Memory: scores as a tensor compared with blocks of keys ---------------------------------------------


def peak_bytes(call):
    """The growth of the process's peak memory during the call."""

    def status(name):
        text = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024

    ctypes.CDLL(None).malloc_trim(0)  # Return freed memory to the system.
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def print_memory(bench):
    print("\nBatch 1, 8 heads of 64, FP32: peak memory beyond Q, K and V, and time.\n")
    print("| length | standard MiB | PyTorch SDPA MiB | rapt MiB | standard ms | PyTorch SDPA ms | rapt ms |")
    print("| --- " * 7 + "|")
    rows = []
    for length in (1024, 2048, 4096):
        case = Case("memory", "FP32", 1, 8, length, 64)
        tensors = make_tensors(case)
        context = capi.Context(bench.threads)  # A new context, so that its workspace is counted.
        sides = {
            "standard": standard_attention(tensors),
            "torch": torch_attention(case, tensors),
            "rapt": rapt_attention_of(context, case, tensors),
        }
        mib = {name: peak_bytes(call) / 2**20 for name, call in sides.items()}
        seconds = {name: statistics.median(s) for name, s in measure(sides, 3, bench.block_seconds).items()}
        cells = [f"{mib[name]:.1f}" for name in sides] + [milliseconds(seconds[name] * 1e3) for name in sides]
        print("| " + " | ".join([str(length), *cells]) + " |")
        rows.append({"length": length, "peak_mib": mib, "ms": {name: s * 1e3 for name, s in seconds.items()}})
    return rows


# --- The program ----------------------------------------------------------------------------------


def cpu_model():
    return re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1]


def commit():
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_report(options, bench, rows, **more):
    """Writes the rows to the file of --json, if it is given, with the machine and the commit."""
    if options.json:
        machine = {"cpu": cpu_model(), "threads": options.threads, "amx": bench.probes.has_amx}
        report = {"machine": machine, "commit": commit(), "rows": rows, **more}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments(prog, description):
    parser = argparse.ArgumentParser(prog=prog, description=description.split("\n")[0])
    parser.add_argument("--filter", default="", help="regular expression: run only cases whose `NAME DTYPE` matches")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without ONNX Runtime and memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", help="force rapt's instruction set")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args()


def main():
    options = parse_arguments("dev bench kernel", __doc__)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    gc.disable()
    bench = Bench(options)
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.name} {case.dtype}")]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    versions = {
        "rapt": capi.version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime_version(),
        "python": platform.python_version(),
    }
    print(f"{options.threads} threads, PyTorch {versions['torch']}, ONNX Runtime {versions['onnxruntime']}.\n\n{HEADER}")
    rows = []
    for case in cases:
        rows.append(bench.row(case))
        print(markdown(rows[-1]), flush=True)
    below = sum(row["ratio"] < row["floor"] for row in rows)
    others = sorted(row["others_share"] for row in rows)
    print(f"\n{below} of {len(rows)} below the floor. Other processes took {others[len(others) // 2]:.0%} of the cores")
    print(f"in the median of the cases, {others[-1]:.0%} at most.")
    memory = print_memory(bench) if not options.quick and not options.filter else []
    write_report(options, bench, rows, versions=versions, memory=memory)


if __name__ == "__main__":
    main()
