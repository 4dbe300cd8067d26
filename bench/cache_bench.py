"""Measures attention over resident keys and values; run by `./dev bench cache`.

cache_probe times rapt's own sides, in process and against rapt-server. The peers are ONNX Runtime's GroupQueryAttention
with a shared buffer and OpenVINO's PagedAttention with pages in random order; Triton's client sends keys and values on
the wire. All sides run with the same number of threads, rounds alternate between them and reading memory, and figures
are medians. Prints Markdown for RESULTS.md and draws bench/cache_steps.svg.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import time

import chart
import numpy as np
import onnxruntime
import openvino
import openvino.opset16 as operators
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from openvino._pyopenvino.op import _PagedAttentionExtension
from served import Server

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = ROOT / "build/release/bin"
SIZE = 128
TOKENS = 4096
ROUNDS = 9
TYPES = {"FP32": (4, np.float32, TensorProto.FLOAT), "FP16": (2, np.float16, TensorProto.FLOAT16), "BF16": (2, None, None)}
HEADS = ((32, 8), (32, 32), (64, 8))
ONNX_RUNTIME_FLOORS = {("FP32", 32, 8): 3.3, ("FP16", 32, 8): 8, ("FP32", 32, 32): 1.5}
OPENVINO_SHAPE = ("FP16", 32, 8, 1, 32768)
OPENVINO_FLOOR = 2
OPENVINO_PAGE = 32  # tokens of a page; the CPU plugin accepts no other number
READING_FLOORS = {("FP16", 64, 8): 0.75, ("BF16", 64, 8): 0.75}
PAGED_FLOOR = 0.90
MOST_BYTES_OVER_RAW = 1.05
CHART = ROOT / "bench/cache_steps.svg"
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


class OpenVino:
    """A decode step of PagedAttention over FP16 pages in random order. The runtime has the operator, but no public
    Python function makes one. Queries and new tokens are FP32, as the CPU plugin wants them."""

    def __init__(self, query_heads, kv_heads, sequences, tokens, threads):
        pages = sequences * tokens // OPENVINO_PAGE
        random = np.random.default_rng(5)

        def numbers(shape, dtype):
            return random.standard_normal(shape, np.float32).astype(dtype)

        self._arrays = [
            numbers((sequences, query_heads * SIZE), np.float32),
            numbers((sequences, kv_heads * SIZE), np.float32),
            numbers((sequences, kv_heads * SIZE), np.float32),
            numbers((pages, kv_heads, OPENVINO_PAGE, SIZE), np.float16),
            numbers((pages, kv_heads, OPENVINO_PAGE, SIZE), np.float16),
            np.full(sequences, tokens - 1, np.int32),  # tokens before the new one
            np.arange(sequences + 1, dtype=np.int32),  # where each sequence's rows begin
            random.permutation(pages).astype(np.int32),
            np.arange(sequences + 1, dtype=np.int32) * (tokens // OPENVINO_PAGE),  # and its pages
        ]
        parameters = [
            operators.parameter([-1, *array.shape[1:]], openvino.Type(array.dtype)) for array in self._arrays
        ]

        def constant(value, dtype):
            return operators.constant(np.array(value, dtype))

        none, zero = constant([], np.int32), constant(0, np.int32)
        no_numbers = constant([], np.float32)
        constants = [
            constant(SIZE**-0.5, np.float32),  # the scale
            zero,  # no window
            no_numbers,  # no slopes
            constant(tokens, np.int32),  # the longest context
            *(none, none, none, no_numbers),  # no scores wanted, no rotation
            *(no_numbers, zero, zero, no_numbers),  # no block mask, no sinks
            *(zero, none, none, none, none, constant([], np.uint8), none),  # no eviction, no types, no bias
        ]
        node = _PagedAttentionExtension([value.output(0) for value in (*parameters, *constants)])
        for name, value in (("num_k_heads", kv_heads), ("num_v_heads", kv_heads)):
            node.get_rt_info()[name] = value
        for name in ("k_head_size", "v_head_size"):
            node.get_rt_info()[name] = SIZE
        model = openvino.Model([node.output(0)], parameters, "decode")
        settings = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "f16", "INFERENCE_PRECISION_HINT": "f32"}
        self._request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        for n, array in enumerate(self._arrays):
            self._request.set_input_tensor(n, openvino.Tensor(array, shared_memory=True))

    def __call__(self):
        self._request.infer()


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
          " floor | ONNX Runtime ms | ratio | floor |")  # fmt: skip
    print("| --- " * 13 + "|")
    for dtype, (element, numpy_type, _) in TYPES.items():
        for query_heads, kv_heads in HEADS:
            sequences = 4 if kv_heads == 32 else 8
            shape = (dtype, query_heads, kv_heads, sequences, TOKENS)
            sides = {name: lambda name=name: probe("kernel", *shape, name) for name in ("contiguous", "paged")}
            sides["a byte"] = lambda: 1 / probe("read")
            if numpy_type is not None and query_heads == 32 and not options.quick:
                peer = OnnxRuntime(*shape[:4], options.threads)
                sides["onnxruntime"] = lambda: timed(peer)
            seconds = medians(interleave(sides))
            rate = sequences * TOKENS * kv_heads * 2 * SIZE * element / seconds["paged"]
            of_reading = rate * seconds["a byte"]
            ratio = seconds["contiguous"] / seconds["paged"]
            peer_ratio = seconds["onnxruntime"] / seconds["paged"] if "onnxruntime" in seconds else None
            floor = ONNX_RUNTIME_FLOORS.get((dtype, query_heads, kv_heads))
            probe("forget")
            rows.append({"case": shape, "paged_over_contiguous": ratio, "over_onnxruntime": peer_ratio,
                         "of_reading": of_reading})  # fmt: skip
            peer_cells = f"{seconds['onnxruntime'] * 1e3:.2f} | {peer_ratio:.2f} | {mark(peer_ratio, floor)}" \
                if peer_ratio else "- | - | -"  # fmt: skip
            print(f"| {dtype} | {query_heads}/{kv_heads} | {sequences} | {seconds['contiguous'] * 1e3:.2f} |"
                  f" {seconds['paged'] * 1e3:.2f} | {ratio:.2f} | {mark(ratio, PAGED_FLOOR).split(', ')[1]} |"
                  f" {rate * 1e-9:.1f} | {of_reading:.2f} |"
                  f" {mark(of_reading, READING_FLOORS.get((dtype, query_heads, kv_heads)))} | {peer_cells} |",
                  flush=True)  # fmt: skip


def pages(probe, options, rows):
    dtype, query_heads, kv_heads, sequences, tokens = OPENVINO_SHAPE
    print(f"\n### OpenVINO\n\nPagedAttention, {dtype} pages in random order, {sequences}x{query_heads}/{kv_heads}:"
          f"{tokens}.\n")  # fmt: skip
    peer = OpenVino(query_heads, kv_heads, sequences, tokens, options.threads)
    seconds = medians(
        interleave({"rapt": lambda: probe("kernel", *OPENVINO_SHAPE, "paged"), "openvino": lambda: timed(peer)})
    )
    probe("forget")
    ratio = seconds["openvino"] / seconds["rapt"]
    rows.append({"case": OPENVINO_SHAPE, "over_openvino": ratio})
    print("| OpenVINO ms | rapt ms | ratio | floor |\n" + "| --- " * 4 + "|")
    print(f"| {seconds['openvino'] * 1e3:.2f} | {seconds['rapt'] * 1e3:.2f} | {ratio:.2f} |"
          f" {mark(ratio, OPENVINO_FLOOR)} |", flush=True)  # fmt: skip


def forks(probe, _, rows):
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


def eight_bits(probe, _, rows):
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


class TritonSteps:
    """A decode step of one FP16 sequence by Triton's client: with all keys and values, or with those of a token."""

    def __init__(self, address, query_heads, kv_heads, tokens):
        self._client = triton.InferenceServerClient(address)
        random = np.random.default_rng(5)

        def numbers(heads, count):
            return random.standard_normal((1, heads, count, SIZE), np.float32).astype(np.float16)

        self._query = numbers(query_heads, 1)
        self._all, self._new = numbers(kv_heads, tokens), numbers(kv_heads, 1)
        self._infer("attention_session", {"K": self._all, "V": self._all}, sequence_id=1, sequence_start=True)

    def _infer(self, model, arrays, **parameters):
        inputs = []
        for name, array in arrays.items():
            inputs.append(triton.InferInput(name, array.shape, "FP16"))
            inputs[-1].set_data_from_numpy(array)
        self._client.infer(model, inputs, **parameters)

    def wire(self):
        return timed(lambda: self._infer("attention", {"Q": self._query, "K": self._all, "V": self._all}))

    def step(self):
        arrays = {"Q": self._query, "K": self._new, "V": self._new}
        return timed(lambda: self._infer("attention_session", arrays, sequence_id=1))

    def close(self):
        self._infer("attention_session", {}, sequence_id=1, sequence_end=True)
        self._client.close()


def against_the_wire(server, sides, rows, client, floors):
    """sides: a step with resident keys and values, and one that carries them. Prints a row for each figure."""
    parts = [(sample(server, sides[0], 100), sample(server, sides[1], 40)) for _ in range(3)]
    step, wire = [statistics.median(s for part in parts for s in part[side].seconds) for side in (0, 1)]
    step_cpu, wire_cpu = [statistics.median(part[side].cpu for part in parts) for side in (0, 1)]
    rows.append({"client": client, "step_over_wire": wire / step, "cpu_over_wire": wire_cpu / step_cpu})
    for figure, ours, theirs, floor in (("p50", step, wire, floors[0]), ("server CPU", step_cpu, wire_cpu, floors[1])):
        print(f"| {client} | {figure} | {theirs * 1e3:.2f} | {ours * 1e3:.2f} | {theirs / ours:.1f} |"
              f" {mark(theirs / ours, floor)} |", flush=True)  # fmt: skip


def bytes_of_tokens(probe, server, rows):
    probe("serve", server.address, "FP16", 32, 8, 32, TOKENS)
    raw = 32 * TOKENS * 8 * 2 * SIZE * 2
    ratio = server.read_metric("rapt_kv_used_bytes") / raw
    rows.append({"bytes_over_raw": ratio})
    verdict = "reached" if ratio <= MOST_BYTES_OVER_RAW else "**above**"
    print(f"\n### Bytes\n\n32 caches of {TOKENS} tokens, FP16, 8 heads: `rapt_kv_used_bytes` is {ratio:.3f} times the"
          f" bytes of K and V (at most {MOST_BYTES_OVER_RAW}: {verdict}).")  # fmt: skip


def one_call(probe, server, rows):
    print("\n### One call against many\n\n32 sequences of 256 tokens, FP16, 32/8 heads; the calls come from four"
          " threads.\n")  # fmt: skip
    probe("serve", server.address, "FP16", 32, 8, 32, 256)
    seconds = medians(interleave({name: lambda name=name: probe(name) for name in ("calls", "step")}, 51))
    ratio = seconds["calls"] / seconds["step"]
    rows.append({"one_call_over_many": ratio})
    print("| 32 calls ms | one call ms | ratio | floor |\n" + "| --- " * 4 + "|")
    print(f"| {seconds['calls'] * 1e3:.2f} | {seconds['step'] * 1e3:.2f} | {ratio:.2f} | {mark(ratio, 2)} |")


def steps_of_many(probe, server, options, rows):
    print("\n### Steps\n\nSequences of 1024 tokens, FP16, 32/8 heads, all in one call.\n")
    print("| sequences | steps/s of a sequence | tokens/s | p50 ms | p99 ms |\n" + "| --- " * 5 + "|")
    counts, p50s, p99s = (1, 16, 64, 256), [], []
    for sequences in counts:
        probe("serve", server.address, "FP16", 32, 8, sequences, 1024)
        steps = sample(server, lambda: probe("step"), 30 if options.quick else 200).seconds
        p50, p99 = quantile(steps, 0.5), quantile(steps, 0.99)
        p50s.append(p50)
        p99s.append(p99)
        rows.append({"sequences": sequences, "p50": p50, "p99": p99})
        print(f"| {sequences} | {1 / p50:.0f} | {sequences / p50:.0f} | {p50 * 1e3:.2f} | {p99 * 1e3:.2f} |",
              flush=True)  # fmt: skip
    if options.quick:
        return
    rates = {"a sequence": [1 / p50 for p50 in p50s], "all": [n / p50 for n, p50 in zip(counts, p50s, strict=True)]}
    times = {"p50": [1e3 * p50 for p50 in p50s], "p99": [1e3 * p99 for p99 in p99s]}
    panels = [chart.Panel(title, "sequences in a call", counts, curves)
              for title, curves in (("steps per second", rates), ("time of a step, ms", times))]  # fmt: skip
    CHART.write_text(chart.render(panels))
    print(f"\n![Steps per second and their time]({CHART.name})")


def service(probe, options, rows):
    command = [BIN / "rapt-server", "--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0", "--http_address=",
               f"--kv_cache_bytes={6 << 30}", f"--threads={options.threads}", "--grace_period=0s"]  # fmt: skip
    with Server("rapt-server", command) as server:
        print("\n### A step against keys and values on the wire\n\nOne sequence of 4096 tokens, FP16, 32/8 heads;"
              " milliseconds. Triton's client copies arrays into each request.\n")  # fmt: skip
        print("| client | | on the wire | resident | ratio | floor |\n" + "| --- " * 6 + "|")
        with contextlib.closing(TritonSteps(server.address, 32, 8, TOKENS)) as steps:
            against_the_wire(server, (steps.step, steps.wire), rows, "tritonclient", (30, 3.5))
        probe("serve", server.address, "FP16", 32, 8, 1, TOKENS)
        sides = (lambda: probe("step"), lambda: probe("wire"))
        against_the_wire(server, sides, rows, "C++", (None, None))
        bytes_of_tokens(probe, server, rows)
        one_call(probe, server, rows)
        steps_of_many(probe, server, options, rows)
        probe("forget")


def parse_arguments():
    parser = argparse.ArgumentParser(prog="dev bench cache", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, without peers and chart")
    parser.add_argument("--filter", metavar="REGEX", default="", help="only parts whose name matches: kernels, forks, int8, service, pages")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return parser.parse_args()


def main():
    options = parse_arguments()
    rows = []
    with contextlib.closing(Probe(options.threads)) as probe:
        parts = {"kernels": kernels, "forks": forks, "int8": eight_bits, "service": service}
        if not options.quick:
            parts["pages"] = pages
        for name, measure in parts.items():
            if re.search(options.filter, name):
                measure(probe, options, rows)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
