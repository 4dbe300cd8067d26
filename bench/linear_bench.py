"""Compares linear attention with ONNX Runtime's contrib kernel and with exact attention; run by `./dev bench linear`.

As in kernel_bench.py, all sides run in one process with the same number of threads, rounds alternate between
them, and figures are medians. Before a row is timed, its results are compared with ONNX Runtime's. Prints Markdown
for RESULTS.md.
"""

import ctypes
import dataclasses
import re
import statistics
import sys

import onnxruntime
import torch
from kernel_bench import Bench, Disturbance, Operator, measure, milliseconds, parse_arguments, verdict, write_report
from onnx import TensorProto, helper
from rapt import capi

INPUTS = ("query", "key", "value", "past_state", "decay", "beta")
RULES = ("gated_delta", "linear", "gated", "delta")
# Multiples of d_k * d_v that the recurrence takes per token and head.
OPERATIONS = {"linear": 4, "gated": 5, "delta": 6, "gated_delta": 7}
TOLERANCE = 1e-5
FLOOR, AIM = 2.0, 3.5
LEAST_PEAK_SHARE, LEAST_BANDWIDTH_SHARE = 0.35, 0.8
LEAST_OVER_EXACT = 20.0


@dataclasses.dataclass(frozen=True)
class Case:
    rule: str
    tokens: int
    batch: int = 1
    heads: int = 16
    size: int = 128
    per_key: bool = False
    keeps_state: bool = True  # returns the state after the tokens

    @property
    def name(self):
        kind = " per key" if self.per_key else "" if self.keeps_state else " reading"
        return f"{self.rule}{kind} {self.batch}x{self.heads}x{self.tokens}x{self.size}x{self.size}"

    def is_step(self):
        return self.tokens == 1

    def state_bytes(self):
        return 4 * self.batch * self.heads * self.size**2


def all_cases():
    cases = [Case(rule, tokens) for rule in RULES for tokens in (512, 2048, 8192)]
    cases += [Case(rule, 2048, per_key=True) for rule in ("gated", "gated_delta")]
    # States of 1 MiB, and of many times the caches.
    return cases + [Case(rule, 1, n, keeps_state=keeps) for keeps in (True, False) for n in (1, 256) for rule in RULES]


def make_tensors(case):
    random = torch.Generator().manual_seed(2027)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    tokens = (case.batch, case.tokens)
    key = torch.nn.functional.normalize(normal(*tokens, case.heads, case.size), dim=-1)
    tensors = {"query": normal(*tokens, case.heads * case.size), "key": key.reshape(*tokens, -1)}
    tensors["value"] = normal(*tokens, case.heads * case.size)
    if case.is_step():
        tensors["past_state"] = normal(case.batch, case.heads, case.size, case.size)
    if case.rule.startswith("gated"):
        width = case.heads * (case.size if case.per_key else 1)
        tensors["decay"] = -torch.exp(torch.rand(*tokens, width, generator=random) * 5 - 6)
    if case.rule.endswith("delta"):
        tensors["beta"] = torch.rand(*tokens, case.heads, generator=random)
    return tensors


def rapt_call(bench, case, tensors):
    attributes = {"q_num_heads": case.heads, "kv_num_heads": case.heads, "update_rule": case.rule}
    outputs = ["output", "present_state"] if case.keeps_state else ["output"]
    return Operator(bench.context, "linear_attention", tensors, attributes, outputs)


class OnnxRuntime:
    """A call of com.microsoft.LinearAttention on the same memory."""

    def __init__(self, case, tensors, threads):
        names = [name if name in tensors else "" for name in INPUTS]
        node = helper.make_node(
            "LinearAttention",
            names,
            ["output", "present_state"],
            domain="com.microsoft",
            q_num_heads=case.heads,
            kv_num_heads=case.heads,
            update_rule=case.rule,
        )
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in tensors]
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("output", "present_state")]
        graph = helper.make_graph([node], "linear", values, outputs)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        shapes = (tensors["query"].shape, (case.batch, case.heads, case.size, case.size))
        self.outputs = [torch.empty(shape) for shape in shapes]
        self._binding = self._session.io_binding()
        for name, tensor in tensors.items():
            self._binding.bind_input(name, "cpu", 0, TensorProto.FLOAT, list(tensor.shape), tensor.data_ptr())
        for name, tensor in zip(("output", "present_state"), self.outputs):
            self._binding.bind_output(name, "cpu", 0, TensorProto.FLOAT, list(tensor.shape), tensor.data_ptr())

    def __call__(self):
        self._session.run_with_iobinding(self._binding)


def difference(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


def run(case, bench):
    tensors = make_tensors(case)
    ours = rapt_call(bench, case, tensors)
    peer = OnnxRuntime(case, tensors, bench.threads)
    ours()
    peer()
    error = max(difference(*both) for both in zip(ours.outputs, peer.outputs))
    if not error <= TOLERANCE:
        sys.exit(f"{case.name}: differs from ONNX Runtime by {error:.2g}")
    probe = "read_gbps" if case.is_step() else "fma_gflops"
    ceiling = bench.probes.ask(probe)
    disturbance = Disturbance()
    seconds = measure({"rapt": ours, "onnx": peer}, bench.rounds, bench.block_seconds)
    seconds = {name: statistics.median(values) for name, values in seconds.items()}
    others = disturbance.share()
    ceiling = max(ceiling, bench.probes.ask(probe))
    work = case.batch * case.heads * case.tokens * OPERATIONS[case.rule] * case.size**2
    rate = (case.state_bytes() if case.is_step() else work) / seconds["rapt"] * 1e-9
    return {
        "name": case.name,
        "ms": {name: s * 1e3 for name, s in seconds.items()},
        "ratio": seconds["onnx"] / seconds["rapt"],
        "floor": FLOOR,
        "aim": AIM,
        "rate": rate,
        "rate_unit": "GB/s" if case.is_step() else "GF/s",
        "peak_share": rate / ceiling,
        "is_step": case.is_step(),
        "difference": error,
        "workspace_bytes": ours.plan.workspace_bytes,
        "others_share": others,
    }


HEADER = (
    "| case | rapt ms | ONNX Runtime ms | ratio | floor, aim | reached | rate | of peak | difference | workspace KiB |\n"
    + "| --- " * 10
    + "|"
)


def markdown(row):
    # Reading the state is all that a step does: its aim is the bandwidth.
    reached = "-" if row["is_step"] else verdict(row)
    cells = [
        row["name"],
        milliseconds(row["ms"]["rapt"]),
        milliseconds(row["ms"]["onnx"]),
        f"{row['ratio']:.2f}",
        "-" if row["is_step"] else f"{row['floor']:g}, {row['aim']:g}",
        reached,
        f"{row['rate']:.3g} {row['rate_unit']}",
        f"{row['peak_share']:.0%}",
        f"{row['difference']:.1e}",
        f"{row['workspace_bytes'] / 1024:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def over_exact(bench):
    """Times of causal exact attention and of the rule linear over the same sizes."""
    tokens, heads, size = 32768, 2, 128
    case = Case("linear", tokens, heads=heads)
    tensors = make_tensors(case)
    ours = rapt_call(bench, case, tensors)
    problem = capi.Problem(
        dtype=capi.FP32,
        causal=1,
        batch=1,
        query_heads=heads,
        kv_heads=heads,
        query_length=tokens,
        key_length=tokens,
        head_size=size,
        value_head_size=size,
    )
    q, k, v = (torch.randn(1, heads, tokens, size) for _ in range(3))
    y = torch.empty_like(q)
    arguments = capi.Arguments()
    for name, tensor in (("query", q), ("key", k), ("value", v), ("output", y)):
        getattr(arguments, name).data = tensor.data_ptr()
    plan, given = capi.Plan(bench.context, problem), ctypes.byref(arguments)
    exact = lambda: plan.run(given)
    seconds = measure({"linear": ours, "exact": exact}, bench.rounds, bench.block_seconds)
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def main():
    options = parse_arguments("dev bench linear", __doc__)
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    cases = [case for case in all_cases() if re.search(options.filter, case.name)]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    print(f"{options.threads} threads, FP32, ONNX Runtime {onnxruntime.__version__}.")
    print("The rate counts the operations of the recurrence; of one token, the bytes of its state. Rows named `reading` do")
    print("not ask for the state after the token; ONNX Runtime computes it anyway.\n")
    print(HEADER)
    rows = []
    for case in cases:
        rows.append(run(case, bench))
        print(markdown(rows[-1]), flush=True)
    long = [row for row in rows if not row["is_step"]]
    below = sum(row["ratio"] < FLOOR for row in long)
    weak = sum(row["peak_share"] < LEAST_PEAK_SHARE for row in long)
    steps = [row for row in rows if row["is_step"]]
    slow = sum(row["peak_share"] < LEAST_BANDWIDTH_SHARE for row in steps)
    others = sorted(row["others_share"] for row in rows)
    print(f"\n{below} of {len(long)} below the floor, {weak} below {LEAST_PEAK_SHARE:.0%} of the peak; of the steps,")
    print(f"{slow} of {len(steps)} below {LEAST_BANDWIDTH_SHARE:.0%} of the read bandwidth. Other processes took")
    print(f"{others[len(others) // 2]:.0%} of the cores in the median of the rows, {others[-1]:.0%} at most.")
    exact = None
    if not options.quick and not options.filter:
        exact = over_exact(bench)
        ratio = exact["exact"] / exact["linear"]
        print(f"\nCausal, 32768 tokens, 2 heads of 128: exact attention {exact['exact']:.0f} ms, the rule linear")
        print(f"{exact['linear']:.0f} ms, {ratio:.1f} times less (aim {LEAST_OVER_EXACT:g}).")
    write_report(options, bench, rows, exact=exact)


if __name__ == "__main__":
    main()
