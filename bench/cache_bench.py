"""Measures attention over resident keys and values; run by `./dev bench cache`.

cache_probe times rapt's own sides, in process and against rapt-server; ONNX Runtime's GroupQueryAttention with a
shared buffer is the peer. All sides run with the same number of threads, rounds alternate between them, and figures are
medians. Prints Markdown for RESULTS.md.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from served import Server

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = ROOT / "build/release/bin"
SIZE = 128
TOKENS = 4096
ROUNDS = 9
TYPES = {"FP32": (4, np.float32, TensorProto.FLOAT), "FP16": (2, np.float16, TensorProto.FLOAT16), "BF16": (2, None, None)}
HEADS = ((32, 8), (32, 32), (64, 8))
ONNX_RUNTIME_FLOORS = {("FP32", 32, 8): 3.3, ("FP16", 32, 8): 8, ("FP32", 32, 32): 1.5}
PAGED_FLOOR = 0.90
FORK_FLOORS = {(32, 8): 2.3, (32, 32): 5}


class Probe:
    """cache_probe, which answers commands with seconds."""

    def __init__(self, threads):
        command = [BIN / "cache_probe", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words):
        self._process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"cache_probe ended with {self._process.wait()}")
        return float(answer)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


class OnnxRuntime:
    """A decode step of GroupQueryAttention, whose present keys and values are in the memory of the past ones."""

    def __init__(self, dtype, query_heads, kv_heads, sequences, threads):
        _, numpy_type, onnx_type = TYPES[dtype]
        inputs = {
            "query": (sequences, 1, query_heads * SIZE),
            "key": (sequences, 1, kv_heads * SIZE),
            "value": (sequences, 1, kv_heads * SIZE),
            "past_key": (sequences, kv_heads, TOKENS, SIZE),
            "past_value": (sequences, kv_heads, TOKENS, SIZE),
        }
        integers = {"seqlens_k": [sequences], "total_sequence_length": [1]}
        node = helper.make_node(
            "GroupQueryAttention",
            [*inputs, *integers],
            ["output", "present_key", "present_value"],
            domain="com.microsoft",
            num_heads=query_heads,
            kv_num_heads=kv_heads,
        )
        values = [helper.make_tensor_value_info(name, onnx_type, shape) for name, shape in inputs.items()]
        values += [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name, shape in integers.items()]
        names = ("output", "present_key", "present_value")
        outputs = [helper.make_tensor_value_info(name, onnx_type, None) for name in names]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "decode", values, outputs)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        random = np.random.default_rng(5)
        arrays = {name: random.standard_normal(shape, np.float32).astype(numpy_type) for name, shape in inputs.items()}
        arrays["seqlens_k"] = np.full(sequences, TOKENS - 1, np.int32)
        arrays["total_sequence_length"] = np.array([TOKENS], np.int32)
        self._binding = self._session.io_binding()
        self._values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
        self._binding.bind_output("output")
        for name in ("key", "value"):
            self._binding.bind_ortvalue_output(f"present_{name}", self._values[f"past_{name}"])

    def __call__(self):
        self._session.run_with_iobinding(self._binding)


def timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleave(sides, rounds=ROUNDS):
    """sides: name -> function that returns seconds. Returns name -> the seconds of each round."""
    for side in sides.values():
        side()
    seconds = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(side())
    return seconds


def medians(seconds):
    return {name: statistics.median(values) for name, values in seconds.items()}


def mark(ratio, floor):
    return "-" if floor is None else f"{floor}, " + ("reached" if ratio >= floor else "**below**")


def kernels(probe, options, rows):
    print("### Kernels\n\nOne row for each of N sequences of 4096 tokens, head size 128. Ratios are of speed.\n")
    print("| type | heads | N | rapt, contiguous ms | rapt, random pages ms | ratio | floor 0.9 | GB/s | of reading |"
          " ONNX Runtime ms | ratio | floor |")  # fmt: skip
    print("| --- " * 12 + "|")
    for dtype, (element, numpy_type, _) in TYPES.items():
        for query_heads, kv_heads in HEADS:
            sequences = 4 if kv_heads == 32 else 8
            shape = (dtype, query_heads, kv_heads, sequences, TOKENS)
            sides = {name: lambda name=name: probe("kernel", *shape, name) for name in ("contiguous", "paged")}
            if numpy_type is not None and query_heads == 32 and not options.quick:
                peer = OnnxRuntime(*shape[:4], options.threads)
                sides["onnxruntime"] = lambda: timed(peer)
            seconds = medians(interleave(sides))
            reading = max(probe("read") for _ in range(3))
            rate = sequences * TOKENS * kv_heads * 2 * SIZE * element / seconds["paged"]
            ratio = seconds["contiguous"] / seconds["paged"]
            peer_ratio = seconds["onnxruntime"] / seconds["paged"] if "onnxruntime" in seconds else None
            floor = ONNX_RUNTIME_FLOORS.get((dtype, query_heads, kv_heads))
            probe("forget")
            rows.append({"case": shape, "paged_over_contiguous": ratio, "over_onnxruntime": peer_ratio,
                         "of_reading": rate / reading})  # fmt: skip
            peer_cells = f"{seconds['onnxruntime'] * 1e3:.2f} | {peer_ratio:.2f} | {mark(peer_ratio, floor)}" \
                if peer_ratio else "- | - | -"  # fmt: skip
            print(f"| {dtype} | {query_heads}/{kv_heads} | {sequences} | {seconds['contiguous'] * 1e3:.2f} |"
                  f" {seconds['paged'] * 1e3:.2f} | {ratio:.2f} | {mark(ratio, PAGED_FLOOR).split(', ')[1]} |"
                  f" {rate * 1e-9:.1f} | {rate / reading:.2f} | {peer_cells} |", flush=True)  # fmt: skip


def forks(probe, rows):
    print("\n### Forks\n\n32 forks of a prefix of 4096 tokens, read once for all of them or by each.\n")
    print("| type | heads | each ms | once ms | ratio | floor |\n" + "| --- " * 6 + "|")
    for dtype in ("FP16", "FP32"):
        for heads in ((32, 8), (32, 32)):
            shape = (dtype, *heads, 32, TOKENS)
            sides = {name: lambda name=name: probe("kernel", *shape, name) for name in ("apart", "forks")}
            seconds = medians(interleave(sides))
            probe("forget")
            ratio = seconds["apart"] / seconds["forks"]
            floor = FORK_FLOORS[heads] if dtype == "FP16" else None
            rows.append({"case": shape, "forks_ratio": ratio})
            print(f"| {dtype} | {heads[0]}/{heads[1]} | {seconds['apart'] * 1e3:.2f} | {seconds['forks'] * 1e3:.2f} |"
                  f" {ratio:.2f} | {mark(ratio, floor)} |", flush=True)  # fmt: skip


def eight_bits(probe, rows):
    print("\n### 8 bits\n\nSequences of 4096 tokens in random pages, stored as FP16 and in 8 bits (q8_0), 17/32 of the bytes.\n")
    print("| heads | N | FP16 ms | INT8 ms | ratio |\n" + "| --- " * 5 + "|")
    for heads in HEADS:
        shape = ("FP16", *heads, 4 if heads[1] == 32 else 8, TOKENS)
        seconds = medians(interleave({name: lambda name=name: probe("kernel", *shape, name) for name in ("paged", "int8")}))
        probe("forget")
        ratio = seconds["paged"] / seconds["int8"]
        rows.append({"case": shape, "int8_ratio": ratio})
        print(f"| {heads[0]}/{heads[1]} | {shape[3]} | {seconds['paged'] * 1e3:.2f} | {seconds['int8'] * 1e3:.2f} |"
              f" {ratio:.2f} |", flush=True)  # fmt: skip


@dataclasses.dataclass
class Sample:
    seconds: list
    cpu: float  # of the server, per call


def sample(server, command, count):
    command()
    cpu = server.cpu_seconds()
    seconds = [command() for _ in range(count)]
    return Sample(seconds, (server.cpu_seconds() - cpu) / count)


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def service(probe, options, rows):
    command = [BIN / "rapt-server", "--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0", "--http_address=",
               f"--kv_cache_bytes={6 << 30}", f"--threads={options.threads}", "--grace_period=0s"]  # fmt: skip
    with Server("rapt-server", command) as server:
        print("\n### A step against keys and values on the wire\n\nOne sequence of 4096 tokens, FP16, 32/8 heads.\n")
        probe("serve", server.address, "FP16", 32, 8, 1, TOKENS)
        parts = [(sample(server, lambda: probe("step"), 100), sample(server, lambda: probe("wire"), 10))
                 for _ in range(3)]  # fmt: skip
        step, wire = [statistics.median(s for part in parts for s in part[side].seconds) for side in (0, 1)]
        step_cpu, wire_cpu = [statistics.median(part[side].cpu for part in parts) for side in (0, 1)]
        rows.append({"step_over_wire": wire / step, "cpu_over_wire": wire_cpu / step_cpu})
        print("| | on the wire | resident | ratio | floor |\n" + "| --- " * 5 + "|")
        print(f"| p50 ms | {wire * 1e3:.2f} | {step * 1e3:.2f} | {wire / step:.1f} | {mark(wire / step, 30)} |")
        print(f"| server CPU ms | {wire_cpu * 1e3:.2f} | {step_cpu * 1e3:.2f} | {wire_cpu / step_cpu:.1f} |"
              f" {mark(wire_cpu / step_cpu, 3.5)} |")  # fmt: skip

        print("\n### One call against many\n\n32 sequences of 256 tokens, FP16, 32/8 heads; the calls come from four"
              " threads.\n")  # fmt: skip
        probe("serve", server.address, "FP16", 32, 8, 32, 256)
        seconds = medians(interleave({name: lambda name=name: probe(name) for name in ("calls", "step")}, 51))
        ratio = seconds["calls"] / seconds["step"]
        rows.append({"one_call_over_many": ratio})
        print("| 32 calls ms | one call ms | ratio | floor |\n" + "| --- " * 4 + "|")
        print(f"| {seconds['calls'] * 1e3:.2f} | {seconds['step'] * 1e3:.2f} | {ratio:.2f} | {mark(ratio, 2)} |")

        print("\n### Steps\n\nSequences of 1024 tokens, FP16, 32/8 heads, all in one call.\n")
        print("| sequences | steps/s of a sequence | tokens/s | p50 ms | p99 ms |\n" + "| --- " * 5 + "|")
        for sequences in (1, 16, 64, 256):
            probe("serve", server.address, "FP16", 32, 8, sequences, 1024)
            steps = sample(server, lambda: probe("step"), 30 if options.quick else 200).seconds
            p50, p99 = quantile(steps, 0.5), quantile(steps, 0.99)
            rows.append({"sequences": sequences, "p50": p50, "p99": p99})
            print(f"| {sequences} | {1 / p50:.0f} | {sequences / p50:.0f} | {p50 * 1e3:.2f} | {p99 * 1e3:.2f} |",
                  flush=True)  # fmt: skip
        probe("forget")


def parse_arguments():
    parser = argparse.ArgumentParser(prog="dev bench cache", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, without ONNX Runtime")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args()


def main():
    options = parse_arguments()
    rows = []
    with contextlib.closing(Probe(options.threads)) as probe:
        kernels(probe, options, rows)
        forks(probe, rows)
        eight_bits(probe, rows)
        service(probe, options, rows)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
