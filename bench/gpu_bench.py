"""Benchmarks a GPU and the cuDNN backend on it; run by `./dev bench gpu`.

Measures copies, compilation, kernels interleaved with PyTorch's, requests in process one by one, on all
lanes and in joined runs, the crossover between CPU and GPU, and the service end to end. Uses gpu_probe, and
PyTorch if this Python has it with CUDA. Prints Markdown for RESULTS.md.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench/gpu")]
import libraries  # noqa: E402
from served import Server, load  # noqa: E402

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
LARGEST_COPY = 256 << 20
LARGEST_LOAD_BYTES = 8 << 30  # requests in flight
KERNEL_AIM = 0.95  # of PyTorch's best
PIPELINE_AIM = 0.9  # of the rate that copies or kernels alone allow


# --- Cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: str
    batch: int
    query_heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    causal: bool = False

    @property
    def shape(self):
        """In the syntax of rapt-load."""
        heads = f"{self.query_heads}/{self.kv_heads}" if self.kv_heads != self.query_heads else f"{self.query_heads}"
        lengths = f"{self.queries}:{self.keys}" if self.keys != self.queries else f"{self.queries}"
        return f"{self.batch}x{heads}x{lengths}x{self.head_size}" + (" causal" if self.causal else "")

    @property
    def name(self):
        return f"{self.shape} {self.dtype.upper()}"

    @property
    def words(self):
        """In the syntax of gpu_probe."""
        sizes = (self.batch, self.query_heads, self.kv_heads, self.queries, self.keys, self.head_size)
        return f"{self.dtype} {' '.join(map(str, sizes))} {int(self.causal)}"

    def flops(self):
        """Multiply-adds count as two; pairs hidden by causality are not counted."""
        pairs = self.queries * self.keys
        if self.causal:
            hidden_from = min(self.queries, self.keys)
            pairs = hidden_from * (hidden_from + 1) // 2 + max(0, self.queries - self.keys) * self.keys
        return 4.0 * self.batch * self.query_heads * pairs * self.head_size

    def bytes_in(self):
        tokens = self.query_heads * self.queries + 2 * self.kv_heads * self.keys
        return self.batch * tokens * self.head_size * ELEMENT_BYTES[self.dtype]

    def bytes_out(self):
        return self.batch * self.query_heads * self.queries * self.head_size * ELEMENT_BYTES[self.dtype]

    def streams(self):
        """Returns whether the case is bound by reading K and V."""
        return self.queries == 1


def prefill(dtype, length, head_size=128, heads=(32, 8), batch=1, causal=True):
    return Case(dtype, batch, *heads, length, length, head_size, causal)


def decode(dtype, length, batch=8):
    return Case(dtype, batch, 32, 8, 1, length, 128)


def kernel_cases():
    return [
        *(prefill("bf16", length) for length in (2048, 8192, 32768)),
        prefill("bf16", 8192, causal=False),
        prefill("bf16", 2048, batch=8),
        prefill("bf16", 4096, head_size=64, heads=(16, 16)),
        prefill("bf16", 4096, head_size=256, heads=(16, 16)),
        prefill("fp16", 8192),
        prefill("fp32", 2048, heads=(16, 16)),
        decode("bf16", 4096),
        decode("bf16", 8192, batch=64),
        decode("bf16", 32768, batch=1),
    ]


def pipeline_cases():
    return [prefill("bf16", 2048), prefill("bf16", 8192), prefill("bf16", 32768), decode("bf16", 4096)]


def crossover_cases(quick):
    lengths = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    dtypes = ("bf16", "fp32")
    if quick:
        lengths, dtypes = lengths[:4], dtypes[:1]
    cases = []
    for dtype in dtypes:
        cases += [prefill(dtype, length) for length in lengths]
        cases += [prefill(dtype, length, 64, (8, 8), 8, causal=False) for length in lengths[:5]]
        cases += [decode(dtype, 16 * length) for length in lengths[:6:2]]
    return cases


def joined_cases(quick):
    cases = [decode("bf16", length, 1) for length in (64, 128, 256)]
    cases += [prefill("bf16", length) for length in (32, 64)]
    return cases[:1] if quick else cases


def service_cases(quick):
    return [prefill("bf16", 512)] if quick else [prefill("bf16", 8192), prefill("bf16", 2048), decode("bf16", 4096)]


# --- Measuring processes ----------------------------------------------------------------------------


class Declined(Exception):
    """The request is not supported; the message states why."""


class Probe:
    """gpu_probe; context manager."""

    def __init__(self, program, directories, threads):
        self._command = [str(program), f"--libraries={directories}", f"--threads={threads}"]

    def __enter__(self):
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.kind, _, device = self._answer().partition(" ")
            self.device = json.loads(device)
        except Declined:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def ask(self, *words):
        """Returns the numbers documented in gpu_probe.cc. Raises Declined."""
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return [float(number) for number in self._answer().split()]

    def _answer(self):
        answer, _, text = self._process.stdout.readline().rstrip("\n").partition(" ")
        if answer == "ok":
            return text
        if answer == "error":
            raise Declined(text)
        raise RuntimeError(f"gpu_probe ended with status {self._process.wait()}")

    def kernel_seconds(self, case):
        return self.ask("kernel", case.words)[0]


class Torch:
    """PyTorch's scaled_dot_product_attention with one of its backends."""

    ROUND_SECONDS = 0.1  # the same as in gpu_probe

    def __init__(self, torch, name, backend):
        self._torch, self.name, self._backend = torch, name, backend
        self._case = self._tensors = None

    def kernel_seconds(self, case):
        if case != self._case:
            self._case, self._tensors = case, self._make(case)
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel([self._backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they explain why it declines; the error suffices
            try:
                self._seconds(1)
                runs = min(max(int(self.ROUND_SECONDS / max(self._seconds(1), 1e-9)), 3), 2000)
                return self._seconds(runs) / runs
            except RuntimeError as error:
                raise Declined(str(error).splitlines()[0]) from error

    def _make(self, case):
        dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[case.dtype]
        random = self._torch.Generator("cuda").manual_seed(0)
        shapes = ((case.query_heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
        return [
            self._torch.randn(
                (case.batch, *shape, case.head_size), generator=random, device="cuda", dtype=getattr(self._torch, dtype)
            )
            for shape in shapes
        ]

    def _seconds(self, runs):
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(runs):
            self._torch.nn.functional.scaled_dot_product_attention(
                *self._tensors, is_causal=self._case.causal, enable_gqa=self._case.query_heads != self._case.kv_heads
            )
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def torch_peers(notes):
    try:
        import torch
        from torch.nn.attention import SDPBackend

        if not torch.cuda.is_available():
            raise ImportError("it sees no GPU")
    except ImportError as error:
        notes.append(f"No comparison with PyTorch: {error}.")
        return []
    torch.set_grad_enabled(False)
    notes.append(f"PyTorch {torch.__version__} with cuDNN {torch.backends.cudnn.version()}.")
    backends = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return [Torch(torch, name, backend) for name, backend in backends.items()]


# --- Parts ----------------------------------------------------------------------------------------


def number(value):
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def table(*columns):
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")


def row(*cells):
    print("| " + " | ".join(cell if isinstance(cell, str) else number(cell) for cell in cells) + " |", flush=True)


def copies(probe):
    """Prints the table. Returns the pinned bytes per second in and out, of large copies."""
    print("\n### Copies, GB/s\n")
    table("size", "pinned, in", "pinned, out", "pageable, in", "pageable, out")
    for size in (64 << 10, 1 << 20, 16 << 20, LARGEST_COPY):
        rates = [
            size / probe.ask("copy", direction, memory, size)[0]
            for memory in ("pinned", "pageable")
            for direction in ("in", "out")
        ]
        row(f"{size >> 10} KiB", *(rate / 1e9 for rate in rates))
    return rates[:2]


def kernels(probe, peers, cases, rounds, notes):
    print("\n### Kernels, tensors on the device, ms\n")
    table("case", "compiled in s", "plan KiB", "workspace KiB", "rapt", *(f"PyTorch {peer.name}" for peer in peers),
          "best of PyTorch's over rapt", f"aim {KERNEL_AIM}", "rate")  # fmt: skip
    for case in cases:
        try:
            compile_seconds, plan_bytes, workspace_bytes = probe.ask("compile", case.words)
        except Declined as error:
            notes.append(f"{case.name}: {error}")
            continue
        seconds = in_turns([probe, *peers], case, rounds, notes)
        ours, theirs = seconds[0], [time for time in seconds[1:] if time]
        ratio = min(theirs) / ours if ours and theirs else None
        reached = "" if ratio is None else "reached" if ratio >= KERNEL_AIM else "BELOW"
        row(case.name, compile_seconds, plan_bytes / 1024, workspace_bytes / 1024,
            *(time and time * 1e3 for time in seconds), ratio, reached, rate(case, ours))  # fmt: skip


def in_turns(sides, case, rounds, notes):
    """The median seconds of each, None if it declines; interleaved, so that clock changes affect all of them."""
    times = [[] for _ in sides]
    declined = set()
    for _ in range(rounds):
        for side, found in zip(sides, times):
            if side in declined:
                continue
            try:
                found.append(side.kernel_seconds(case))
            except Declined as error:
                declined.add(side)
                notes.append(f"{case.name}, {getattr(side, 'name', 'rapt')}: {error}")
    return [statistics.median(found) if found else None for found in times]


def rate(case, seconds):
    if not seconds:
        return "-"
    if case.streams():
        return f"{case.bytes_in() / seconds / 1e12:.2f} TB/s"
    return f"{case.flops() / seconds / 1e12:.0f} TFLOP/s"


def pipeline(probe, cases, bytes_per_second, notes):
    print("\n### Requests in process, from pageable memory, ms\n")
    table("case", "copy in", "kernel", "copy out", "one request", "all lanes busy, a request",
          "of the longest of the three", f"aim {PIPELINE_AIM}", "GB/s in and out")  # fmt: skip
    into, out_of = bytes_per_second
    for case in cases:
        try:
            probe.ask("compile", case.words)
            parts = [case.bytes_in() / into, probe.kernel_seconds(case), case.bytes_out() / out_of]
            alone = probe.ask("attend", "cudnn", case.words)[0]
            together = probe.ask("pipeline", case.words)[0]
        except Declined as error:
            notes.append(f"{case.name}: {error}")
            continue
        share = max(parts) / together
        moved = (case.bytes_in() + case.bytes_out()) / together / 1e9
        row(case.name, *(part * 1e3 for part in parts), alone * 1e3, together * 1e3, share,
            "reached" if share >= PIPELINE_AIM else "BELOW", moved)  # fmt: skip


def joined(probe, cases, notes):
    print("\n### Requests that wait for one lane, in process, ms\n")
    table("case", "requests", "one by one", "joined", "speedup")
    for case in cases:
        try:
            requests, alone, joined_run = probe.ask("joined", case.words)
        except Declined as error:
            notes.append(f"{case.name}, joined: {error}")
            continue
        row(case.name, f"{requests:.0f}", alone * 1e3, joined_run * 1e3, alone / joined_run)


def crossover(probe, cases, notes):
    print("\n### CPU or GPU, one request in process, ms\n")
    table("case", "GFLOP", "CPU", "GPU", "faster", "auto expects CPU", "GPU", "and takes")
    points, picks = [], []
    for case in cases:
        try:
            cpu, flops = probe.ask("attend", "cpu", case.words)
            gpu, _ = probe.ask("attend", "cudnn", case.words)
            expected_gpu, expected_cpu = probe.ask("estimate", case.words)
        except Declined as error:
            notes.append(f"{case.name}: {error}")
            continue
        points.append((flops, cpu, gpu))
        picks.append(gpu if expected_gpu < expected_cpu else cpu)
        row(case.name, flops / 1e9, cpu * 1e3, gpu * 1e3, "GPU" if gpu < cpu else "CPU",
            expected_cpu * 1e3, expected_gpu * 1e3, "GPU" if picks[-1] == gpu else "CPU")  # fmt: skip
    print(f"\n{verdict(points, picks)}{advice(points)}")


def losses(chosen, points):
    """The logarithms of the ratios of chosen times to faster times."""
    return [math.log(time / min(cpu, gpu)) for time, (_, cpu, gpu) in zip(chosen, points)]


def verdict(points, picks):
    """The loss of choosing by the server's startup measurements."""
    if not points:
        return ""
    lost = losses(picks, points)
    longer = math.expm1(statistics.mean(lost))
    return (
        f"By its startup measurements `auto` chooses the faster one in {lost.count(0)} of {len(points)} cases, "
        f"and takes {longer:.0%} longer than the faster one on average. "
    )


def best_min_flops(points):
    """The offload threshold with which `auto` loses the least; inf if the CPU is always faster.

    A point is (flops, cpu seconds, gpu seconds). The loss is the sum of the logarithms of the ratios to the faster one.
    """
    points = sorted(points)

    def loss(on_cpu):
        chosen = [cpu for _, cpu, _ in points[:on_cpu]] + [gpu for _, _, gpu in points[on_cpu:]]
        return sum(losses(chosen, points))

    on_cpu = min(range(len(points) + 1), key=loss)
    if on_cpu == len(points):
        return math.inf
    if on_cpu == 0:
        return 0
    return math.sqrt(points[on_cpu - 1][0] * points[on_cpu][0])


def advice(points):
    if not points:
        return "Nothing was measured."
    best = best_min_flops(points)
    if best == math.inf:
        return "The CPU is faster in all cases."
    digits = 10 ** max(math.floor(math.log10(max(best, 1))) - 1, 0)
    return f"Among fixed thresholds, `--cudnn_min_flops={round(best / digits) * digits:.0f}` loses the least."


def service(options, directories, cases, notes):
    print("\n### The service, end to end\n")
    seconds, in_flight = (0.5, (1, 4)) if options.quick else (1, (1, 4, 16))
    with contextlib.ExitStack() as stack:
        socket = f"{stack.enter_context(tempfile.TemporaryDirectory())}/rapt.sock"
        command = [options.bin / "rapt-server", "--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0", "--http_address="]
        command += [f"--unix_socket={socket}", "--allow_shared_memory", f"--max_message_bytes={1 << 30}"]
        command += [f"--backend={options.backend}", f"--threads={options.threads}", f"--cudnn_libraries={directories}"]
        try:
            server = stack.enter_context(Server("rapt-server", command))
        except (RuntimeError, OSError) as error:
            print(f"Not measured: {error}")
            return
        tcp, unix = server.address.split(",")
        table("case", "way", "in flight", "p50 ms", "p99 ms", "calls/s", "GB/s", "computing ms")
        for case in cases:
            ways = (("TCP", tcp, ()), ("Unix socket", unix, ()), ("shared memory", unix, ("--shared-memory",)))
            for way, address, flags in ways:
                for concurrency in in_flight:
                    if concurrency * (case.bytes_in() + case.bytes_out()) > LARGEST_LOAD_BYTES:
                        continue
                    try:
                        result = load(
                            options.bin / "rapt-load", address, case.shape, case.dtype, concurrency, seconds, *flags
                        )
                    except RuntimeError as error:
                        notes.append(f"{case.name}, {way}, {concurrency} in flight: {error}")
                        continue
                    times, summary = result["milliseconds"], result["summary"]
                    row(case.name, way, str(concurrency), times["latency"]["p50"], times["latency"]["p99"],
                        summary["rate"], summary["gigabytes_per_s"], times.get("compute", {}).get("mean"))  # fmt: skip


# --- Main -----------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(prog="dev bench gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--filter", default="", help="regular expression: run only cases whose `SHAPE TYPE` matches")
    parser.add_argument("--quick", action="store_true", help="one round, small cases")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin", help="directory of the programs")
    parser.add_argument("--backend", default="cudnn", help="backend of the server")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads on the CPU")
    return parser.parse_args()


def main():
    options = parse_arguments()
    directories = libraries.directories()

    def chosen(cases):
        return [case for case in cases if re.search(options.filter, case.name)]

    notes = []
    try:
        with Probe(options.bin / "gpu_probe", directories, options.threads) as probe:
            name, driver = probe.device["deviceName"], probe.device["driverVer"] / 1000
            print(f"{name} ({probe.kind}), driver for CUDA {driver:g}, {options.threads} threads of the CPU.")
            peers = torch_peers(notes)
            bytes_per_second = copies(probe)
            small = [case for case in kernel_cases() if not options.quick or case.flops() < 1e12]
            kernels(probe, peers, chosen(small), 1 if options.quick else 5, notes)
            pipeline(probe, chosen(pipeline_cases()[: 1 if options.quick else None]), bytes_per_second, notes)
            joined(probe, chosen(joined_cases(options.quick)), notes)
            crossover(probe, chosen(crossover_cases(options.quick)), notes)
    except Declined as error:
        sys.exit(f"dev bench gpu: {error}")
    # After the probe has released the device.
    service(options, directories, chosen(service_cases(options.quick)), notes)
    print()
    for note in dict.fromkeys(notes):
        print(f"- {note}")


if __name__ == "__main__":
    main()
