"""Compares calls of the Python package with PyTorch's and with those of the C interface, its client with grpcio, and layers of
transformers with attn_implementation="rapt" with "sdpa"; run by `./dev bench python`.

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
import rapt.torch
import torch
import transformers
from kernel_bench import (
    Bench,
    Case,
    Disturbance,
    make_tensors,
    measure,
    milliseconds,
    parse_arguments,
    peak_bytes,
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


# --- rapt.torch and transformers -------------------------------------------------------------------

F = torch.nn.functional
SMALL = {"1x1x16x64": ((1, 1, 16, 64), 16), "1x12x64x64": ((1, 12, 64, 64), 64), "1x8x1:512x64": ((1, 8, 1, 64), 512)}
MODELS = ("BERT-base layer 8x512, padded", "Llama-1B layer, 2048 tokens", "Llama-1B layer, 8 steps at 2048", "window 512 of 4096")
LEAST_OF_SDPA = dict.fromkeys(SMALL, 1 / 1.3) | dict(zip(MODELS, (1.1, 1.1, 1.3, 8)))


def small_calls(name):
    shape, keys = SMALL[name]
    q, k, v = (torch.randn(*shape[:2], length, shape[3]) for length in (shape[2], keys, keys))
    functions = {"sdpa": F.scaled_dot_product_attention, "rapt": rapt.torch.scaled_dot_product_attention}
    return {side: lambda function=function: function(q, k, v) for side, function in functions.items()}


def window_calls():
    q = k = v = torch.randn(1, 8, 4096, 64)
    distance = torch.arange(4096)[:, None] - torch.arange(4096)
    mask = (distance >= 0) & (distance < 512)
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "rapt": lambda: rapt.torch.attention(q, k, v, causal=True, window=(511, None)),
    }


def model_calls(name):
    """The call of each side: the same layer with the attention of each."""
    if name in SMALL:
        return small_calls(name)
    if name.startswith("window"):
        return window_calls()
    rapt.torch.register_transformers()
    torch.manual_seed(5)
    if name.startswith("BERT"):
        config = transformers.BertConfig(num_hidden_layers=1, vocab_size=100)
        model, ids = transformers.BertModel(config, add_pooling_layer=False).eval(), torch.randint(0, 100, (8, 512))
        shown = (torch.arange(512) < torch.linspace(128, 512, 8).long()[:, None]).long()
        call = lambda: model(ids, attention_mask=shown).last_hidden_state[shown.bool()]
    else:
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
        config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=100, **sizes)
        model, ids = transformers.LlamaModel(config).eval(), torch.randint(0, 100, (1, 2048))
        call = lambda: model(ids, use_cache=False).last_hidden_state
    if "steps" in name:
        call = steps(model, ids)

    def with_attention(implementation):
        model.set_attn_implementation(implementation)
        return call()

    return {side: lambda side=side: with_attention(side) for side in ("sdpa", "rapt")}


def steps(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    model(ids, cache=cache)

    def run():
        answers = [model(ids[:, n : n + 1], cache=cache).last_hidden_state for n in range(8)]
        cache.crop(-8)
        return torch.cat(answers)

    return run


def peak_mib(name, side, threads):
    """The memory that a call takes at most, in a process of its own."""
    command = [sys.executable, "-B", __file__, "--peak", name, side, str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def print_peak(name, side, threads):
    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    rapt.set_num_threads(int(threads))
    print(peak_bytes(model_calls(name)[side]) / 2**20)


def print_models(names, options, bench):
    if not names:
        return []
    print("\n`rapt.torch`, and a layer of transformers with either attention, FP32:\n")
    print("| call | sdpa ms | rapt ms | ratio | aim | least of rounds | peak MiB sdpa | rapt |\n" + "| --- " * 8 + "|")
    rows = []
    for name in names:
        sides = model_calls(name)
        want, got = (call() for call in sides.values())
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        disturbance = Disturbance()
        rounds = measure(sides, 4 * bench.rounds, bench.block_seconds)
        row = {"name": name, "seconds": medians(rounds), "ratio": quotient(rounds, "sdpa", "rapt")}
        row |= {"least": min(rounds["sdpa"]) / min(rounds["rapt"]), "others_share": disturbance.share()}
        row["peak_mib"] = {side: peak_mib(name, side, options.threads) for side in sides} if name in MODELS else {}
        rows.append(row)
        aim = LEAST_OF_SDPA[name]
        cells = [name, *(milliseconds(row["seconds"][side] * 1e3) for side in sides), f"{row['ratio']:.2f}"]
        cells += [f"{aim:.2f}, {'reached' if row['ratio'] >= aim else '**missed**'}", f"{row['least']:.2f}"]
        cells += [f"{row['peak_mib'][side]:.0f}" if row["peak_mib"] else "-" for side in sides]
        print("| " + " | ".join(cells) + " |", flush=True)
    return rows


def main():
    if sys.argv[1:2] == ["--peak"]:
        return print_peak(*sys.argv[2:])
    options = parse_arguments("dev bench python", __doc__)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rapt.set_num_threads(options.threads)
    gc.disable()
    bench = Bench(options)
    cases = [case for case in all_cases() if re.search(options.filter, f"{case.name} {case.dtype}")]
    models = [name for name in LEAST_OF_SDPA if re.search(options.filter, f"model {name}")]
    if not cases and not models and not re.search(options.filter, "client"):
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
    rows += print_models(models, options, bench)
    if re.search(options.filter, "client"):
        rows += print_transfers(bench)
    others = sorted(row["others_share"] for row in rows)
    print(f"Other processes took {others[len(others) // 2]:.0%} of the cores in the median of the rows, {others[-1]:.0%} at most.")
    write_report(options, bench, rows, import_ms=imported)


if __name__ == "__main__":
    main()
