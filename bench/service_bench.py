"""Compares the service with its alternatives; run by `./dev bench service`.

The same client, rapt-load, sends the same calls of the Open Inference Protocol over loopback to rapt-server
and to each peer in bench/peers, over gRPC or over HTTP with binary tensors, interleaved; PyTorch in this process
is the lower bound of latency. All compute with the same number of threads. Prints Markdown for RESULTS.md.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import statistics
import sys
import sysconfig
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench/peers"))
from served import WARMUP_SECONDS, Server, load  # noqa: E402
from torch_attention import DTYPES, attend  # noqa: E402

BIN = ROOT / "build/release/bin"
PYTRITON_PYTHON = ROOT / "build/python-pytriton/bin/python"
PEERS = {"rapt": ("grpcio", "PyTriton"), "rapt HTTP": ("FastAPI",)}  # with the same protocol
LARGEST_LOAD_BYTES = 2 << 30  # requests in flight; Python's server holds several copies of each


# --- Cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    shape: str  # in the syntax of rapt-load
    dtype: str
    # Floor and aim of p50 with one call in flight, and of calls/s with 16, relative to the better peer.
    latency: tuple = ()
    rate: tuple = ()

    def axes(self):
        batch, heads, lengths, head_size = self.shape.split("x")
        query_heads, _, kv_heads = heads.partition("/")
        queries, _, keys = lengths.partition(":")
        sizes = (batch, query_heads, kv_heads or query_heads, queries, keys or queries, head_size)
        return tuple(int(size) for size in sizes)

    def tensors(self):
        b, hq, hkv, sq, sk, d = self.axes()
        random = torch.Generator().manual_seed(0)
        shapes = ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, d))
        return [torch.randn(shape, generator=random).to(DTYPES[self.dtype]) for shape in shapes]

    def bytes(self):
        b, hq, hkv, sq, sk, d = self.axes()
        return b * d * (2 * hq * sq + 2 * hkv * sk) * torch.empty(0, dtype=DTYPES[self.dtype]).element_size()


def all_cases():
    fp32 = {
        "1x1x16x64": ((3, 4), (4, 8)),
        "32x8x128x64": ((2, 3), (2, 3)),
        "1x8x1024x64": ((1.5, 2), (1.5, 2)),
        "1x8x2048x64": ((1.4, 1.7), (1.4, 1.7)),
    }
    bf16 = {"1x16x2048x128": ((2, 2.5), (2, 2.5))}
    shapes = (*fp32, "1x16x2048x128", "8x32/8x1:4096x128")
    cases = [Case(shape, "FP32", *fp32.get(shape, ())) for shape in shapes]
    return cases + [Case(shape, "BF16", *bf16.get(shape, ())) for shape in shapes]


# --- Servers --------------------------------------------------------------------------------------


def free_ports():
    """Returns the first of three consecutive free ports."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for port in (first + 1, first + 2):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return first


def servers(threads):
    # Threads that spin after computing would take the cores from the serving threads.
    peer = {"OMP_WAIT_POLICY": "PASSIVE"}
    pytriton = peer | {
        "RAPT_TORCH_SITE": sysconfig.get_path("purelib"),
        "LD_LIBRARY_PATH": f"{sysconfig.get_config_var('LIBDIR')}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    rapt = [BIN / "rapt-server", "--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0"]
    rapt += ["--http_address=127.0.0.1:0", f"--threads={threads}", f"--max_message_bytes={1 << 30}"]
    fastapi = [sys.executable, ROOT / "bench/peers/fastapi_server.py", "--threads", threads]
    return [
        Server("rapt", rapt),
        Server("rapt HTTP", rapt, protocol="http"),
        Server("FastAPI", fastapi, peer, protocol="http"),
        Server("grpcio", [sys.executable, ROOT / "bench/peers/grpcio_server.py", "--threads", threads], peer),
        Server(
            "PyTriton",
            [PYTRITON_PYTHON, ROOT / "bench/peers/pytriton_server.py", "--threads", threads]
            + ["--port", free_ports()],
            pytriton,
        ),
    ]


# --- Measuring ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    """The rounds of one server, case and concurrency."""

    p50_ms: list = dataclasses.field(default_factory=list)
    p99_ms: list = dataclasses.field(default_factory=list)
    rate: list = dataclasses.field(default_factory=list)
    gigabytes_per_s: list = dataclasses.field(default_factory=list)
    cpu_ms: list = dataclasses.field(default_factory=list)
    peak_mib: list = dataclasses.field(default_factory=list)
    outside_share: list = dataclasses.field(default_factory=list)  # share of a call not spent computing

    def median(self, name):
        values = getattr(self, name)
        return statistics.median(values) if values else None


def measure(server, case, concurrency, seconds):
    """Runs one round. Raises RuntimeError if calls fail."""
    server.forget_peak()
    cpu = server.cpu_seconds()
    calls = (case.shape, case.dtype, concurrency, seconds)
    result = load(BIN / "rapt-load", server.address, *calls, "--protocol", server.protocol)
    cpu = server.cpu_seconds() - cpu
    times, summary = result["milliseconds"], result["summary"]
    calls = summary["rate"] * (summary["seconds"] + WARMUP_SECONDS)  # CPU time includes the warmup
    return {
        "p50_ms": times["latency"]["p50"],
        "p99_ms": times["latency"]["p99"],
        "rate": summary["rate"],
        "gigabytes_per_s": summary["gigabytes_per_s"],
        "cpu_ms": cpu / calls * 1e3,
        "peak_mib": server.peak_mib(),
        "outside_share": 1 - times["compute"]["mean"] / times["service"]["mean"] if "compute" in times else None,
    }


def in_process_ms(case, seconds):
    q, k, v = case.tensors()
    attend(q, k, v)
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 3:
        begin = time.perf_counter()
        attend(q, k, v)
        took.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(took)


# --- Reporting ------------------------------------------------------------------------------------

COLUMNS = ("shape", "type", "in flight", "server", "p50 ms", "p99 ms", "calls/s", "GB/s", "CPU ms/call")
COLUMNS += ("peak MiB", "p50 and calls/s against the better peer of the protocol", "floor, aim")


def number(value):
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def verdict(ratio, target):
    if not target:
        return ""
    floor, aim = target
    return f"{floor:g}, {aim:g}: " + ("aim" if ratio >= aim else "floor" if ratio >= floor else "BELOW")


def rows(case, concurrency, points):
    for name, point in points.items():
        compared = judged = ""
        peers = [points[other] for other in PEERS.get(name, ()) if other in points]
        if peers:
            latency = min(peer.median("p50_ms") for peer in peers) / point.median("p50_ms")
            rate = point.median("rate") / max(peer.median("rate") for peer in peers)
            compared = f"{latency:.2f}, {rate:.2f}"
            if name == "rapt":
                judged = {1: verdict(latency, case.latency), 16: verdict(rate, case.rate)}.get(concurrency, "")
        values = ("p50_ms", "p99_ms", "rate", "gigabytes_per_s", "cpu_ms", "peak_mib")
        yield [case.shape, case.dtype, str(concurrency), name]+ [number(point.median(v)) for v in values] + [compared, judged]


def bars(title, unit, values):
    """Prints a chart for a terminal and Markdown: values by name."""
    print(f"\n{title}, {unit}:\n\n```")
    for name, value in values.items():
        print(f"{name:>24} {'█' * max(1, round(40 * value / max(values.values())))} {number(value)}")
    print("```")


def parse_arguments():
    parser = argparse.ArgumentParser(prog="dev bench service", description=__doc__.split("\n")[0])
    parser.add_argument("--filter", default="", help="regular expression: run only cases whose `SHAPE DTYPE` matches")
    parser.add_argument("--quick", action="store_true", help="one short round, 1 and 16 in flight")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="also write the rounds to FILE")
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rounds, seconds, in_flight = (1, 0.5, (1, 16)) if options.quick else (2, 0.8, (1, 4, 16))
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.shape} {case.dtype}")]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    notes, results = [], []
    with contextlib.ExitStack() as stack:
        running = []
        for server in servers(options.threads):
            try:
                running.append(stack.enter_context(server))
            except (RuntimeError, OSError) as error:
                notes.append(str(error))
        congestion = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        print(f"{options.threads} compute threads each, PyTorch {torch.__version__}, TCP {congestion}.\n")
        print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|")
        for case in cases:
            floor = in_process_ms(case, seconds / 2)
            cells = [case.shape, case.dtype, "1", "in process", number(floor)] + [""] * 7
            print("| " + " | ".join(cells) + " |", flush=True)
            for concurrency in in_flight:
                if concurrency * case.bytes() > LARGEST_LOAD_BYTES:
                    continue
                points = measure_case(case, concurrency, running, rounds, seconds, notes)
                for row in rows(case, concurrency, points):
                    print("| " + " | ".join(row) + " |", flush=True)
                results.append((case, concurrency, floor, points))
    for note in dict.fromkeys(notes):
        print(f"\n- {note}")
    summarize(results)
    if options.json:
        report = [
            {"shape": c.shape, "dtype": c.dtype, "in_flight": n, "in_process_ms": floor}
            | {"servers": {name: dataclasses.asdict(point) for name, point in points.items()}}
            for c, n, floor, points in results
        ]
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def measure_case(case, concurrency, running, rounds, seconds, notes):
    points = {server.name: Point() for server in running}
    for _ in range(rounds):
        for server in running:
            if server.name == "PyTriton" and case.dtype == "BF16":
                continue  # NumPy has no such type
            try:
                for name, value in measure(server, case, concurrency, seconds).items():
                    if value is not None:
                        getattr(points[server.name], name).append(value)
            except RuntimeError as error:
                notes.append(f"{server.name}, {case.shape} {case.dtype}, {concurrency} in flight: {error}")
    return {name: point for name, point in points.items() if point.rate}


def summarize(results):
    for case, concurrency, floor, points in results:
        if (case.shape, concurrency) == ("1x8x2048x64", 1) and "rapt" in points:
            share = points["rapt"].median("outside_share")
            print(f"\n{case.shape} {case.dtype}: {share:.1%} of a call is not spent computing (floor 15 %, aim 7 %).")
    for case, concurrency, floor, points in results:
        if case.dtype == "FP32" and concurrency == 1:
            values = {name: point.median("p50_ms") for name, point in points.items()}
            bars(f"{case.shape} {case.dtype}, p50 with one call in flight", "ms", {"in process": floor, **values})
        if case.dtype == "FP32" and concurrency == 16:
            values = {name: point.median("rate") for name, point in points.items()}
            bars(f"{case.shape} {case.dtype}, 16 calls in flight", "calls/s", values)


if __name__ == "__main__":
    main()
