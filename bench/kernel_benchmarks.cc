// rapt-bench: benchmarks the kernels alone, with Google Benchmark, and parts of the server, whose
// benchmarks lie beside their tests (tests/**/*_bench.cc). Of kernels it reports time, operations
// or bytes per second, their share of a ceiling measured immediately before and after, and the
// workspace.
//
//     rapt-bench [--threads=N] [--isa=NAME] [--benchmark_filter=REGEX] ...
//
// Output and workspace are reused in every iteration. `./dev bench kernel` compares with other
// libraries.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "bench/probes.h"
#include "bench/random_tensor.h"

namespace rapt {
namespace {

using bench::RandomTensor;

struct Case {
  std::string regime;
  Problem problem;

  std::string Name() const {
    const Problem& p = problem;
    std::string heads = absl::StrCat(p.query_heads);
    if (p.kv_heads != p.query_heads) absl::StrAppend(&heads, "of", p.kv_heads);
    std::string lengths = absl::StrCat(p.query_length);
    if (p.key_length != p.query_length) absl::StrAppend(&lengths, "to", p.key_length);
    return absl::StrCat(regime, "/", NameOf(p.dtype), "/", p.batch, "x", heads, "x", lengths, "x",
                        p.head_size);
  }

  // Whether the case is bound by reading K and V.
  bool Streams() const { return problem.query_length == 1; }

  double KeyValueBytes() const {
    const Problem& p = problem;
    return static_cast<double>(p.batch * p.kv_heads * p.key_length *
                               (p.head_size + p.value_head_size) * SizeOf(p.dtype));
  }
};

Problem Square(DType dtype, int64_t batch, int64_t heads, int64_t length, int64_t head_size) {
  Problem p;
  p.dtype = dtype;
  p.batch = batch;
  p.query_heads = p.kv_heads = heads;
  p.query_length = p.key_length = length;
  p.head_size = p.value_head_size = head_size;
  return p;
}

std::vector<Case> CasesOf(DType dtype) {
  std::vector<Case> cases;
  for (int64_t head_size : {64, 128}) {
    for (int64_t length : {512, 1024, 2048, 4096}) {
      cases.push_back({"prefill", Square(dtype, 1, 8, length, head_size)});
    }
    Case causal = {"causal", Square(dtype, 1, 8, 2048, head_size)};
    causal.problem.causal = true;
    cases.push_back(causal);
  }
  cases.push_back({"prefill", Square(dtype, 32, 8, 512, 64)});
  cases.push_back({"short", Square(dtype, 32, 8, 128, 64)});
  for (DType mask_type : {DType::kBool, dtype}) {
    Case masked = {mask_type == DType::kBool ? "bool_mask" : "float_mask",
                   Square(dtype, 2, 8, 1024, 64)};
    masked.problem.mask = MaskShape{mask_type, {1, 1, 1024, 1024}};
    cases.push_back(masked);
  }
  for (int64_t kv_heads : {32, 8}) {
    Case decode = {"decode", Square(dtype, 8, 32, 4096, 128)};
    decode.problem.query_length = 1;
    decode.problem.kv_heads = kv_heads;
    cases.push_back(decode);
  }
  Case scores = {"weights", Square(dtype, 1, 8, 1024, 64)};
  scores.problem.score_output = ScoreOutput::kWeights;
  cases.push_back(scores);
  cases.push_back({"tiny", Square(dtype, 1, 1, 16, 64)});
  cases.push_back({"tiny", Square(dtype, 1, 12, 64, 64)});
  for (int64_t head_size : {33, 80, 96, 192, 256}) {
    cases.push_back({"head_size", Square(dtype, 1, 8, 512, head_size)});
  }
  return cases;
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::vector<Case> more = CasesOf(dtype);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  cases.push_back({"prefill", Square(DType::kFloat64, 1, 8, 1024, 64)});
  return cases;
}

// The ceiling that a case is compared with, in its units per second.
double Ceiling(const Case& c, int threads) {
  if (c.Streams()) return rapt_probe_read_gbps(threads) * 1e9;
  if (c.problem.dtype == DType::kBFloat16) {
    if (const double amx = rapt_probe_amx_gflops(threads); amx > 0) return amx * 1e9;
  }
  return rapt_probe_fma_gflops(threads) * (c.problem.dtype == DType::kFloat64 ? 0.5e9 : 1e9);
}

void RunCase(benchmark::State& state, const Case& c, const PlanOptions& options) {
  const Problem& p = c.problem;
  const absl::StatusOr<Plan> plan = MakePlan(p, options);
  if (!plan.ok()) return state.SkipWithError(std::string(plan.status().message()).c_str());
  const RandomTensor query(p.dtype, {p.batch, p.query_heads, p.query_length, p.head_size});
  const RandomTensor key(p.dtype, {p.batch, p.kv_heads, p.key_length, p.head_size});
  const RandomTensor value(p.dtype, {p.batch, p.kv_heads, p.key_length, p.value_head_size});
  RandomTensor output(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size});
  Arguments arguments;
  arguments.inputs[Role::kQ] = query.View();
  arguments.inputs[Role::kK] = key.View();
  arguments.inputs[Role::kV] = value.View();
  arguments.outputs[Role::kY] = output.MutableView();
  const MaskShape shape = p.mask.value_or(MaskShape{});
  const RandomTensor mask(shape.dtype, shape.dims);
  if (p.mask) {
    arguments.inputs[Role::kMask] = mask.View();
    for (int axis = 0; axis < 2; ++axis) arguments.inputs[Role::kMask].strides[axis] = 0;
  }
  const int64_t score_keys = p.score_output ? p.key_length : 0;
  RandomTensor scores(p.dtype, {p.batch, p.query_heads, p.query_length, score_keys});
  arguments.outputs[Role::kScores] = scores.MutableView();
  AlignedBuffer workspace(static_cast<size_t>(plan->workspace_bytes()));
  ThreadPool pool(options.threads);

  double ceiling = Ceiling(c, options.threads);
  const auto begin = std::chrono::steady_clock::now();
  while (state.KeepRunning()) {
    const absl::Status status = Run(*plan, arguments, workspace.span(), pool);
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  ceiling = std::max(ceiling, Ceiling(c, options.threads));

  const double work = c.Streams() ? c.KeyValueBytes() : plan->flops;
  const double rate = work * static_cast<double>(state.iterations()) / seconds.count();
  state.counters[c.Streams() ? "GB/s" : "GF/s"] = rate * 1e-9;
  state.counters["of_peak"] = rate / ceiling;
  state.counters["workspace_bytes"] = static_cast<double>(plan->workspace_bytes());
  state.SetLabel(plan->Describe());
}

// Removes rapt-bench's own flags from the arguments.
PlanOptions TakeOptions(int* argc, char** argv) {
  PlanOptions options;
  options.threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  char** kept = argv + 1;
  for (char** next = argv + 1; next != argv + *argc; ++next) {
    absl::string_view flag = *next;
    if (absl::ConsumePrefix(&flag, "--isa=")) {
      options.isa = std::string(flag);
    } else if (absl::ConsumePrefix(&flag, "--threads=")) {
      if (!absl::SimpleAtoi(flag, &options.threads)) options.threads = 0;
    } else {
      *kept++ = *next;
    }
  }
  *argc = static_cast<int>(kept - argv);
  return options;
}

int Main(int argc, char** argv) {
  const PlanOptions options = TakeOptions(&argc, argv);
  if (const absl::Status status = Validate(options); !status.ok()) {
    std::fprintf(stderr, "rapt-bench: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const Case& c : AllCases()) {
    benchmark::RegisterBenchmark(c.Name().c_str(), RunCase, c, options)
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) { return rapt::Main(argc, argv); }
