"""Compares calls of the Python package with PyTorch's and with those of the C interface, and its client with grpcio; run by
`./dev bench python`.

As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate between them, and
figures are medians, quotients those of the rounds. `C` is the library's call with arguments that are ready, as in kernel_bench.py. The client and grpcio
call the same server with the same messages, from arrays to arrays; grpcio takes one bytes object, which is joined. Prints
Markdown for RESULTS.md.
"""

import gc
import pathlib
import re
import statistics
import subprocess
import sys
import time

import grpc
import numpy as np
import rapt
import torch
from kernel_bench import (
    Bench,
    Case,
    Disturbance,
    make_tensors,
    measure,
    milliseconds,
    parse_arguments,
    rapt_attention_of,
    torch_attention,
    write_report,
)
from rapt import _client, _messages, _server
from served import Server

LEAST_OF_C = 0.97  # of the ratio of the C interface to PyTorch, for calls of a millisecond and more
MOST_OVERHEAD_US, MOST_IMPORT_MS = 12, 120
MOST_OF_GRPCIO = 0.6  # of its time, for 24 MiB up and 8 MiB down
NANOBIND_US = 2  # of a tiny call with an extension by nanobind, measured when ctypes was chosen


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
    rounds = measure(sides, 5 * bench.rounds, bench.block_seconds)
    return {
        "name": case.name,
        "dtype": case.dtype,
        "seconds": medians(rounds),
        "of_torch": quotient(rounds, "torch", "tensors"),
        "of_c": quotient(rounds, "C", "tensors"),
        "others_share": disturbance.share(),
    }


def medians(rounds):
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}


def quotient(rounds, above, below):
    """The median of the rounds' quotients, which other processes disturb less than the quotient of medians."""
    return statistics.median(a / b for a, b in zip(rounds[above], rounds[below]))


def markdown(row):
    seconds = row["seconds"]
    times = [milliseconds(seconds[name] * 1e3 if name in seconds else None) for name in ("torch", "C", "tensors", "NumPy")]
    share = row["of_c"]
    reached = "-" if seconds["C"] < 1e-3 else "floor" if share >= LEAST_OF_C else "**below**"
    cells = [row["name"], row["dtype"], *times, f"{row['of_torch']:.2f}", f"{share:.2f}", reached]
    return "| " + " | ".join(cells) + " |"


def import_milliseconds():
    """The time of `import rapt` once NumPy is loaded: the median of new processes."""
    code = "import numpy, time; t = time.perf_counter(); import rapt; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    times = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(9)]
    return statistics.median(times) * 1e3


# One query and one key a head: nearly all of the time is transfer. q, k, v and y have a quarter each.
TRANSFERS = {"tiny": (1, 1, 1, 16), "24 MiB up, 8 MiB down": (16, 128, 1, 1024)}


def by_grpcio(stub, q, k, v):
    request = _client._attend_request(q, k, v, {})
    answer = stub(b"".join(_messages.encode(_messages.ATTEND_REQUEST, request)))
    return _server.received("y", _messages.decode(_messages.ATTEND_RESPONSE, memoryview(answer))["y"], q)


def cpu_seconds(call, count):
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


def transfers(bench):
    program = pathlib.Path(__file__).resolve().parents[1] / "build/release/bin/rapt-server"
    addresses = [f"--{name}_address=127.0.0.1:0" for name in ("grpc", "http", "metrics")]
    with Server("rapt-server", [program, *addresses]) as server, rapt.Client(f"http://{server.http_address}") as client:
        unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        with grpc.insecure_channel(server.address, unlimited) as channel:
            stub = channel.unary_unary("/rapt.v1.AttentionService/Attend")
            for name, shape in TRANSFERS.items():
                q, k, v = (np.random.default_rng(n).standard_normal(shape, np.float32) for n in range(3))
                sides = {"grpcio": lambda: by_grpcio(stub, q, k, v), "client": lambda: client.attend(q, k, v).y}
                assert np.array_equal(*(call() for call in sides.values()))
                disturbance = Disturbance()
                rounds = measure(sides, 4 * bench.rounds, 0.05)
                count = max(1, round(0.2 / rounds["client"][0]))
                yield {
                    "name": name,
                    "seconds": medians(rounds),
                    "of_grpcio": quotient(rounds, "client", "grpcio"),
                    "cpu_seconds": {side: cpu_seconds(call, count) for side, call in sides.items()},
                    "others_share": disturbance.share(),
                }


def print_transfers(bench):
    print("\nThe client against grpcio, attend() at a server on this machine:\n")
    print("| call | grpcio ms | rapt.Client ms | of grpcio's | grpcio CPU ms | rapt.Client CPU ms |\n" + "| --- " * 6 + "|")
    rows = list(transfers(bench))
    for row in rows:
        wall, cpu = row["seconds"], row["cpu_seconds"]
        times = [milliseconds(side[name] * 1e3) for side in (wall, cpu) for name in ("grpcio", "client")]
        cells = [row["name"], *times[:2], f"{row['of_grpcio']:.2f}", *times[2:]]
        print("| " + " | ".join(cells) + " |")
    share = rows[-1]["of_grpcio"]
    print(f"\nAim for large calls: {MOST_OF_GRPCIO} of grpcio's time, {'reached' if share <= MOST_OF_GRPCIO else '**missed**'}.\n")
    return rows


def main():
    options = parse_arguments("dev bench python", __doc__)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rapt.set_num_threads(options.threads)
    gc.disable()
    bench = Bench(options)
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.name} {case.dtype}")]
    if not cases and not re.search(options.filter, "client"):
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
            print(f"PyTorch's tensors (aim {MOST_OVERHEAD_US}; nanobind's {NANOBIND_US}).", end=" ")
    imported = import_milliseconds()
    print(f"`import rapt` takes {imported:.0f} ms once NumPy is loaded (aim {MOST_IMPORT_MS}).")
    if re.search(options.filter, "client"):
        rows += print_transfers(bench)
    others = sorted(row["others_share"] for row in rows)
    print(f"Other processes took {others[len(others) // 2]:.0%} of the cores in the median of the rows, {others[-1]:.0%} at most.")
    write_report(options, bench, rows, import_ms=imported)


if __name__ == "__main__":
    main()
