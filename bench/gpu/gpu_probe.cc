// gpu_probe: measures the GPU and the cuDNN backend on it for gpu_bench.py, which sends one command
// per line:
//
//     copy in|out pinned|pageable BYTES    seconds of a copy
//     compile PROBLEM                      seconds, bytes of the plan, bytes of its workspace
//     kernel PROBLEM                       seconds of the kernels alone, compiled before
//     attend cpu|cudnn PROBLEM             seconds of one request, floating-point operations
//     estimate PROBLEM                     seconds on the GPU and on the CPU, as estimated by auto
//     pipeline PROBLEM                     seconds per request if every lane always has work
//     joined PROBLEM                       number of requests in a joined run; their seconds on one
//                                          lane, one by one and joined
//
// PROBLEM is TYPE B Hq Hkv Sq Sk D CAUSAL. An answer is "ok" and numbers, or "error" and a reason.
// The first line of output is "ok", the device's kind and its description by cuDNN, in JSON.
//
//     gpu_probe [--libraries=DIRECTORIES] [--memory_bytes=N] [--threads=N]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "bench/gpu/device_meter.h"
#include "bench/random_tensor.h"

namespace rapt::bench {
namespace {

using Words = std::vector<std::string>;
using Numbers = absl::StatusOr<std::vector<double>>;

constexpr double kRoundSeconds = 0.3;
constexpr int kMaxRuns = 200;

struct Settings {
  std::string libraries;
  int64_t memory_bytes = int64_t{4} << 30;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
};

double SecondsOf(absl::FunctionRef<void()> work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int RunsFor(double seconds) {
  return static_cast<int>(std::clamp<double>(kRoundSeconds / std::max(seconds, 1e-9), 1, kMaxRuns));
}

absl::Status InvalidCommand(const Words& words) {
  return absl::InvalidArgumentError(absl::StrCat("invalid command: ", absl::StrJoin(words, " ")));
}

// Parses the words from `first` on.
absl::StatusOr<Problem> ParseProblem(const Words& words, size_t first) {
  static const std::map<std::string, DType> kTypes = {
      {"fp32", DType::kFloat32}, {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}};
  if (words.size() != first + 8) return InvalidCommand(words);
  const auto dtype = kTypes.find(words[first]);
  if (dtype == kTypes.end()) return InvalidCommand(words);
  int64_t sizes[7];
  for (size_t n = 0; n < 7; ++n) {
    if (!absl::SimpleAtoi(words[first + 1 + n], &sizes[n])) return InvalidCommand(words);
  }
  const Problem problem{.dtype = dtype->second,
                        .batch = sizes[0],
                        .query_heads = sizes[1],
                        .kv_heads = sizes[2],
                        .query_length = sizes[3],
                        .key_length = sizes[4],
                        .head_size = sizes[5],
                        .value_head_size = sizes[5],
                        .causal = sizes[6] != 0};
  absl::Status status = Validate(problem);
  if (status.ok()) status = cudnn::Supports(problem);
  if (!status.ok()) return status;
  return problem;
}

// A request's plan, tensors and workspace.
class Request {
 public:
  Request(const Problem& p, Plan plan)
      : plan_(std::move(plan)),
        query_(p.dtype, {p.batch, p.query_heads, p.query_length, p.head_size}),
        key_(p.dtype, {p.batch, p.kv_heads, p.key_length, p.head_size}),
        value_(p.dtype, {p.batch, p.kv_heads, p.key_length, p.value_head_size}),
        workspace_(static_cast<size_t>(plan_.workspace_bytes())) {
    for (int n = 0; n < plan_.threads; ++n) {
      outputs_.emplace_back(p.dtype, std::array<int64_t, 4>{p.batch, p.query_heads, p.query_length,
                                                            p.value_head_size});
    }
  }

  // Computes one request with all workers; returns seconds.
  absl::StatusOr<double> Attend(ThreadPool& pool) {
    absl::Status status;
    const double seconds =
        SecondsOf([&] { status = Run(plan_, ArgumentsOf(0), workspace_.span(), pool); });
    if (!status.ok()) return status;
    return seconds;
  }

  // Computes `requests` of them, each task on the next free worker; returns seconds for all.
  double AttendAll(int64_t requests, ThreadPool& pool) {
    const int64_t tasks = plan_.stages[0];
    return SecondsOf([&] {
      pool.ParallelFor(requests * tasks, [&](int64_t task, int worker) {
        plan_.routing.backend->RunTask(plan_, ArgumentsOf(worker), workspace_.data(), /*stage=*/0,
                                       task % tasks, worker, Checkpoint{});
      });
    });
  }

  const Plan& plan() const { return plan_; }

  // OK unless the CPU computed a piece as fallback.
  absl::Status CheckBackend() const {
    if (piece_fallback_ == nullptr) return absl::OkStatus();
    return absl::UnavailableError("the CPU computed a part of it");
  }

  // As one member of a joined run with separate `arguments`.
  Backend::BatchMember ToMember(Arguments& arguments) {
    arguments = ArgumentsOf(0);
    return {&plan_, &arguments};
  }
  void RunAlone(const Backend::BatchMember& member) {
    plan_.routing.backend->RunTask(plan_, *member.arguments, workspace_.data(), /*stage=*/0,
                                   /*task=*/0,
                                   /*worker=*/0, Checkpoint{});
  }

 private:
  // Every worker has a separate output.
  Arguments ArgumentsOf(int worker) {
    Arguments arguments;
    arguments.inputs[Role::kQ] = query_.View();
    arguments.inputs[Role::kK] = key_.View();
    arguments.inputs[Role::kV] = value_.View();
    arguments.outputs[Role::kY] = outputs_[static_cast<size_t>(worker)].MutableView();
    arguments.piece_fallback = &piece_fallback_;
    return arguments;
  }

  const Plan plan_;
  const RandomTensor query_;
  const RandomTensor key_;
  const RandomTensor value_;
  std::vector<RandomTensor> outputs_;
  AlignedBuffer workspace_;
  std::atomic<const Backend*> piece_fallback_{nullptr};
};

class Probe {
 public:
  Probe(MeteredDevice opened, const Settings& settings)
      : device_(*opened.device),
        meter_(std::move(opened.meter)),
        threads_(settings.threads),
        computing_(settings.threads),
        waiting_(opened.device->lanes()) {
    backend_.Start(std::move(opened.device), CpuBackend(), clock_, {});
  }

  // The device's kind and properties.
  std::string Introduction() const {
    return absl::StrCat(device_.kind(), " ", meter_->properties());
  }

  Numbers Answer(const Words& words) {
    if (words[0] == "copy") return Copy(words);
    if (words[0] == "compile") return Compile(words);
    if (words[0] == "kernel") return Kernel(words);
    if (words[0] == "attend") return Attend(words);
    if (words[0] == "estimate") return Estimate(words);
    if (words[0] == "pipeline") return Pipeline(words);
    if (words[0] == "joined") return Joined(words);
    return InvalidCommand(words);
  }

 private:
  Numbers Copy(const Words& words) {
    int64_t bytes = 0;
    if (words.size() != 4 || !absl::SimpleAtoi(words[3], &bytes) || bytes < 1) {
      return InvalidCommand(words);
    }
    const auto direction =
        words[1] == "in" ? DeviceMeter::Direction::kToDevice : DeviceMeter::Direction::kToHost;
    const absl::StatusOr<double> seconds =
        meter_->CopySeconds(direction, words[2] == "pinned", bytes);
    if (!seconds.ok()) return seconds.status();
    return {{*seconds}};
  }

  Numbers Compile(const Words& words) {
    const absl::StatusOr<Problem> problem = ParseProblem(words, 1);
    if (!problem.ok()) return problem.status();
    const cudnn::SdpaGraph graph = cudnn::GraphOf(*problem);
    absl::StatusOr<cudnn::CompiledPlan> plan;
    const double seconds = SecondsOf([&] { plan = device_.Compile(graph); });
    if (!plan.ok()) return plan.status();
    const auto bytes = static_cast<double>(plan->bytes.size());
    const auto workspace_bytes = static_cast<double>(plan->workspace_bytes);
    compiled_[graph.Key()] = *std::move(plan);
    return {{seconds, bytes, workspace_bytes}};
  }

  Numbers Kernel(const Words& words) {
    const absl::StatusOr<Problem> problem = ParseProblem(words, 1);
    if (!problem.ok()) return problem.status();
    const cudnn::SdpaGraph graph = cudnn::GraphOf(*problem);
    const auto plan = compiled_.find(graph.Key());
    if (plan == compiled_.end()) return absl::FailedPreconditionError("the kernel is not compiled");
    const absl::StatusOr<double> seconds = meter_->KernelSeconds(graph, plan->second);
    if (!seconds.ok()) return seconds.status();
    return {{*seconds}};
  }

  Numbers Attend(const Words& words) {
    const absl::StatusOr<Problem> problem = ParseProblem(words, 2);
    if (!problem.ok()) return problem.status();
    const bool on_device = words[1] == "cudnn";
    ThreadPool& pool = on_device ? waiting_ : computing_;
    absl::StatusOr<Plan> plan = MakePlan(
        *problem,
        {.backend = words[1], .threads = threads_, .has_lanes = on_device, .backends = &backends_});
    if (!plan.ok()) return plan.status();
    Request request(*problem, *std::move(plan));
    absl::StatusOr<double> seconds = request.Attend(pool);  // compiles
    if (seconds.ok()) seconds = request.Attend(pool);
    if (!seconds.ok()) return seconds.status();
    const int runs = RunsFor(*seconds);
    double sum = 0;
    for (int n = 0; n < runs; ++n) sum += request.Attend(pool).value();
    if (absl::Status status = request.CheckBackend(); !status.ok()) return status;
    return {{sum / runs, request.plan().flops}};
  }

  Numbers Estimate(const Words& words) {
    const absl::StatusOr<Problem> problem = ParseProblem(words, 1);
    if (!problem.ok()) return problem.status();
    if (!is_measured_) {
      const absl::Status status = backend_.Measure(threads_, [] { return true; });
      if (!status.ok()) return status;
      is_measured_ = true;
    }
    const auto seconds = backend_.EstimateOf(*problem).value();
    return {{seconds.device, seconds.fallback}};
  }

  Numbers Pipeline(const Words& words) {
    const absl::StatusOr<Problem> problem = ParseProblem(words, 1);
    if (!problem.ok()) return problem.status();
    absl::StatusOr<Plan> plan =
        MakePlan(*problem, {.backend = "cudnn", .has_lanes = true, .backends = &backends_});
    if (!plan.ok()) return plan.status();
    Request request(*problem, *std::move(plan));
    const int64_t lanes = device_.lanes();
    request.AttendAll(lanes, waiting_);
    const double once = request.AttendAll(lanes, waiting_);
    const int64_t requests =
        lanes * (RunsFor(once) + 2);  // includes filling and draining the pipeline
    const double seconds = request.AttendAll(requests, waiting_);
    if (absl::Status status = request.CheckBackend(); !status.ok()) return status;
    return {{seconds / static_cast<double>(requests)}};
  }

  Numbers Joined(const Words& words) {
    const absl::StatusOr<Problem> problem = ParseProblem(words, 1);
    if (!problem.ok()) return problem.status();
    const absl::StatusOr<Plan> plan = MakePlan(
        *problem,
        {.backend = "cudnn", .threads = threads_, .has_lanes = true, .backends = &backends_});
    if (!plan.ok()) return plan.status();
    if (plan->batch_group() == nullptr) return absl::FailedPreconditionError("not joinable");
    const auto count = static_cast<size_t>(1 / plan->batch_group()->cost);
    std::deque<Request> requests;
    std::vector<Arguments> arguments(count);
    std::vector<Backend::BatchMember> members;
    for (size_t n = 0; n < count; ++n) {
      members.push_back(requests.emplace_back(*problem, *plan).ToMember(arguments[n]));
    }
    const auto run_one_by_one = [&] {
      for (size_t n = 0; n < count; ++n) requests[n].RunAlone(members[n]);
    };
    const auto run_joined = [&] {
      plan->routing.backend->RunBatch(absl::MakeSpan(members), /*worker=*/0);
    };
    const double alone = MeanSeconds(run_one_by_one);
    run_joined();
    while (backend_.state().plans.compiling > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const double joined = MeanSeconds(run_joined);
    for (const Backend::BatchMember& member : members) {
      if (!member.done) return absl::UnavailableError("the joined run was incomplete");
    }
    for (const Request& request : requests) {
      if (absl::Status status = request.CheckBackend(); !status.ok()) return status;
    }
    return {{static_cast<double>(count), alone, joined}};
  }

  // After two uncounted runs.
  static double MeanSeconds(absl::FunctionRef<void()> work) {
    work();
    const int runs = RunsFor(SecondsOf(work));
    double sum = 0;
    for (int n = 0; n < runs; ++n) sum += SecondsOf(work);
    return sum / runs;
  }

  const SteadyClock clock_;
  cudnn::Device& device_;  // the backend's
  const std::unique_ptr<DeviceMeter> meter_;
  const int threads_;
  bool is_measured_ = false;
  ThreadPool computing_;
  ThreadPool waiting_;  // one worker per lane
  std::map<std::string, cudnn::CompiledPlan> compiled_;
  cudnn::CudnnBackend backend_;
  const BackendSet backends_{{&backend_}};
};

bool ParseSettings(int argc, char** argv, Settings& settings) {
  for (int n = 1; n < argc; ++n) {
    absl::string_view flag = argv[n];
    if (absl::ConsumePrefix(&flag, "--libraries=")) {
      settings.libraries = std::string(flag);
    } else if (absl::ConsumePrefix(&flag, "--memory_bytes=")) {
      if (!absl::SimpleAtoi(flag, &settings.memory_bytes)) return false;
    } else if (!absl::ConsumePrefix(&flag, "--threads=") ||
               !absl::SimpleAtoi(flag, &settings.threads) || settings.threads < 1) {
      return false;
    }
  }
  return true;
}

void Say(const Numbers& answer) {
  if (answer.ok()) {
    std::printf("ok %s\n", absl::StrJoin(*answer, " ").c_str());
  } else {
    std::printf("error %s\n",
                absl::StrReplaceAll(answer.status().message(), {{"\n", " "}}).c_str());
  }
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  Settings settings;
  if (!ParseSettings(argc, argv, settings)) {
    std::fputs("usage: gpu_probe [--libraries=DIRECTORIES] [--memory_bytes=N] [--threads=N]\n",
               stderr);
    return 2;
  }
  absl::StatusOr<MeteredDevice> opened =
      OpenMeteredDevice(settings.libraries, settings.memory_bytes);
  if (!opened.ok()) {
    Say(opened.status());
    return 1;
  }
  Probe probe(*std::move(opened), settings);
  std::printf("ok %s\n", probe.Introduction().c_str());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const Words words = absl::StrSplit(line, ' ', absl::SkipWhitespace());
    Say(words.empty() ? InvalidCommand(words) : probe.Answer(words));
  }
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main(int argc, char** argv) { return rapt::bench::Main(argc, argv); }
