#include <algorithm>
#include <cstdio>
#include <thread>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/json.h"
#include "server/attention/memory_estimate.h"

namespace rapt {
namespace {

struct MemoryFlags {
  int64_t batch = 1;
  int64_t heads = 8;
  std::optional<int64_t> kv_heads;
  std::vector<int64_t> lengths = {512, 1024, 2048, 4096, 8192, 16384};
  int64_t head_size = 64;
  std::string dtype = "fp32";
  bool json = false;
};

absl::StatusOr<DType> ParseDType(const std::string& name) {
  if (name == "fp32") return DType::kFloat32;
  if (name == "fp16") return DType::kFloat16;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp64") return DType::kFloat64;
  return absl::InvalidArgumentError(
      absl::StrFormat("--dtype is '%s'; it takes fp32, fp16, bf16 or fp64", name));
}

absl::Status CheckAtLeastOne(const char* flag, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %d; it must be at least 1", flag, value));
}

absl::StatusOr<std::vector<MemoryEstimate>> Estimate(const MemoryFlags& flags) {
  const absl::StatusOr<DType> dtype = ParseDType(flags.dtype);
  if (!dtype.ok()) return dtype.status();
  absl::Status checked = CheckAtLeastOne("--batch", flags.batch);
  if (checked.ok()) checked = CheckAtLeastOne("--heads", flags.heads);
  for (const int64_t length : flags.lengths) {
    if (checked.ok()) checked = CheckAtLeastOne("--seq", length);
  }
  if (!checked.ok()) return checked;
  const PlanOptions options{
      .threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};
  std::vector<MemoryEstimate> estimates;
  for (const int64_t length : flags.lengths) {
    Problem problem;
    problem.dtype = *dtype;
    problem.batch = flags.batch;
    problem.query_heads = flags.heads;
    problem.kv_heads = flags.kv_heads.value_or(flags.heads);
    problem.query_length = problem.key_length = length;
    problem.head_size = problem.value_head_size = flags.head_size;
    absl::StatusOr<MemoryEstimate> estimate = EstimateMemory(problem, options);
    if (!estimate.ok()) return estimate.status();
    estimates.push_back(*std::move(estimate));
  }
  return estimates;
}

// "256 MiB", "1.5 GiB"
std::string Human(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024; ++unit) value /= 1024;
  return absl::StrFormat("%.4g %s", value, kUnits[unit]);
}

void Print(const MemoryFlags& flags, const std::vector<MemoryEstimate>& estimates) {
  absl::PrintF("batch %d, %d heads, head size %d, %s; beside Q, K, V and Y themselves:\n\n",
               flags.batch, flags.heads, flags.head_size, flags.dtype);
  absl::PrintF("%8s  %12s  %12s  %12s  %12s\n", "length", "Q, K, V, Y", "standard", "chunked",
               "fused");
  for (size_t i = 0; i < estimates.size(); ++i) {
    const MemoryEstimate& estimate = estimates[i];
    absl::PrintF("%8d  %12s  %12s  %12s  %12s\n", flags.lengths[i], Human(estimate.tensor_bytes),
                 Human(estimate.standard_bytes), Human(estimate.chunked_bytes),
                 Human(estimate.fused_bytes));
  }
  absl::PrintF(
      "\nstandard  the whole score matrix, heads x length x length\n"
      "chunked   scores of %d keys at a time, folded together by online softmax\n"
      "fused     the exact workspace of this machine's plan: %s\n",
      kEstimateChunk, estimates.back().plan);
}

void PrintJson(const MemoryFlags& flags, const std::vector<MemoryEstimate>& estimates) {
  JsonWriter json;
  json.BeginObject().Key("batch").Integer(flags.batch).Key("heads").Integer(flags.heads);
  json.Key("head_size").Integer(flags.head_size).Key("dtype").String(flags.dtype);
  json.Key("lengths").BeginArray();
  for (size_t i = 0; i < estimates.size(); ++i) {
    const MemoryEstimate& estimate = estimates[i];
    json.BeginObject().Key("length").Integer(flags.lengths[i]);
    json.Key("tensor_bytes").Integer(estimate.tensor_bytes);
    json.Key("standard_bytes").Integer(estimate.standard_bytes);
    json.Key("chunked_bytes").Integer(estimate.chunked_bytes);
    json.Key("fused_bytes").Integer(estimate.fused_bytes);
    json.Key("plan").String(estimate.plan).EndObject();
  }
  json.EndArray().EndObject();
  std::puts(json.Take().c_str());
}

}  // namespace

ExitCode RunMemoryCommand(CommandArguments arguments) {
  MemoryFlags flags;
  const CommandLine line{
      .usage = "rapt memory [flags]",
      .summary =
          "Estimates how many bytes self-attention needs beside its tensors, at several "
          "lengths: with the whole score matrix, in chunks of keys, and fused as rapt runs "
          "it here. Needs no server.",
      .flags = {{"batch", "N", "(default: 1)", &flags.batch},
                {"heads", "N", "query heads (default: 8)", &flags.heads},
                {"kv-heads", "N", "key and value heads (default: as many)", &flags.kv_heads},
                {"seq", "LIST", "lengths (default: 512,1024,2048,4096,8192,16384)", &flags.lengths},
                {"head-size", "N", "(default: 64)", &flags.head_size},
                {"dtype", "TYPE", "fp32, fp16, bf16 or fp64 (default: fp32)", &flags.dtype},
                {"json", "", "print the bytes as JSON", &flags.json}},
      .examples = {"rapt memory --batch 32 --heads 8 --seq 512,1024,2048,4096,8192,16384",
                   "rapt memory --heads 32 --kv-heads 8 --head-size 128 --dtype bf16 --json"}};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  const absl::StatusOr<std::vector<MemoryEstimate>> estimates = Estimate(flags);
  if (!estimates.ok()) return FailUsage(estimates.status());
  if (flags.json) {
    PrintJson(flags, *estimates);
  } else {
    Print(flags, *estimates);
  }
  return ExitCode::kOk;
}

}  // namespace rapt
