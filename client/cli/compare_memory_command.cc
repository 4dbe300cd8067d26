#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "attention/attention.h"
#include "attention/mechanism/softmax/chunked.h"
#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/host_limits.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "client/cli/commands.h"
#include "client/console/json.h"
#include "client/console/text.h"

namespace rapt {
namespace {

// Generous for FP32 rounding over a few thousand keys.
constexpr float kTolerance = 1e-4f;

struct CompareFlags {
  std::vector<int64_t> lengths = {1024, 2048, 4096};
  int64_t heads = 4;
  int64_t head_size = 64;
  int64_t chunk = 512;
  bool json = false;
};

// Memory shared with child processes.
class SharedFloats {
 public:
  explicit SharedFloats(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(float)) {
    void* const data =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<float*>(data);
  }
  ~SharedFloats() { munmap(data_, bytes_); }
  SharedFloats(const SharedFloats&) = delete;
  SharedFloats& operator=(const SharedFloats&) = delete;

  float* data() const { return data_; }
  int64_t size() const { return static_cast<int64_t>(bytes_ / sizeof(float)); }

 private:
  size_t bytes_;
  float* data_;
};

// Self-attention of [1, heads, length, head size] in FP32.
struct Task {
  Task(const CompareFlags& flags, int64_t length_in)
      : heads(flags.heads),
        length(length_in),
        size(flags.head_size),
        chunk(flags.chunk),
        q(heads * length * size),
        k(q.size()),
        v(q.size()) {
    float phase = 0;
    for (const SharedFloats* tensor : {&q, &k, &v}) {
      phase += 1;
      for (int64_t i = 0; i < tensor->size(); ++i) {
        tensor->data()[i] = std::sin(phase + 0.37f * static_cast<float>(i % 99991));
      }
    }
  }

  const int64_t heads, length, size, chunk;
  const SharedFloats q, k, v;
};

// The standard algorithm: the full score matrix, its softmax, times V.
void AttendStandard(const Task& t, float* y, ThreadPool& pool) {
  const float scale = 1 / std::sqrt(static_cast<float>(t.size));
  std::vector<float> scores(static_cast<size_t>(t.heads * t.length * t.length));
  std::vector<float> k_columns(static_cast<size_t>(t.heads * t.size * t.length));
  pool.ParallelFor(t.heads, [&](int64_t head, int) {
    for (int64_t j = 0; j < t.length; ++j) {
      for (int64_t d = 0; d < t.size; ++d) {
        k_columns[(head * t.size + d) * t.length + j] =
            t.k.data()[(head * t.length + j) * t.size + d];
      }
    }
  });
  pool.ParallelFor(t.heads * t.length, [&](int64_t row, int) {
    const int64_t head = row / t.length;
    float* const score = scores.data() + row * t.length;
    for (int64_t d = 0; d < t.size; ++d) {
      const float q = t.q.data()[row * t.size + d] * scale;
      const float* const column = k_columns.data() + (head * t.size + d) * t.length;
      for (int64_t j = 0; j < t.length; ++j) score[j] += q * column[j];
    }
  });
  pool.ParallelFor(t.heads * t.length, [&](int64_t row, int) {
    float* const score = scores.data() + row * t.length;
    const float max = *std::max_element(score, score + t.length);
    float sum = 0;
    for (int64_t j = 0; j < t.length; ++j) sum += score[j] = std::exp(score[j] - max);
    for (int64_t j = 0; j < t.length; ++j) score[j] /= sum;
  });
  pool.ParallelFor(t.heads * t.length, [&](int64_t row, int) {
    const float* const weights = scores.data() + row * t.length;
    const float* const v = t.v.data() + row / t.length * t.length * t.size;
    float* const out = y + row * t.size;
    std::fill_n(out, t.size, 0.0f);
    for (int64_t j = 0; j < t.length; ++j) {
      for (int64_t d = 0; d < t.size; ++d) out[d] += weights[j] * v[j * t.size + d];
    }
  });
}

// A view of rows of a tensor of shape [1, heads, length, size].
TensorView RowsOf(const Task& t, const float* data, RowRange rows) {
  const std::array<int64_t, 4> whole = {1, t.heads, t.length, t.size};
  return {reinterpret_cast<const std::byte*>(data + rows.begin * t.size),
          DType::kFloat32,
          {1, t.heads, rows.count, t.size},
          RowMajorStrides(whole)};
}

// Processes chunks of keys one after another by online softmax, as AttendStream does.
void AttendChunked(const Task& t, float* y, ThreadPool& pool) {
  Problem problem;
  problem.batch = 1;
  problem.query_heads = problem.kv_heads = t.heads;
  problem.query_length = problem.key_length = t.length;
  problem.head_size = problem.value_head_size = t.size;
  const absl::StatusOr<ChunkedPlan> plan = MakeChunkedPlan(
      problem, {.streaming = Streaming::kKeys, .query_chunk = t.length, .key_chunk = t.chunk},
      {.threads = pool.workers()});
  RAPT_CHECK(plan.ok(), std::string(plan.status().message()).c_str());
  AlignedBuffer state_memory(static_cast<size_t>(plan->state_bytes));
  AlignedBuffer workspace(static_cast<size_t>(plan->workspace_bytes));
  Arguments arguments;
  arguments.inputs[Role::kQ] = RowsOf(t, t.q.data(), {0, t.length});
  arguments.state = StateIn(problem, plan->full.state_dtype, state_memory.data());
  ClearState(arguments.state);
  for (int64_t n = 0; n < plan->chunks(); ++n) {
    arguments.inputs[Role::kK] = RowsOf(t, t.k.data(), plan->Chunk(n));
    arguments.inputs[Role::kV] = RowsOf(t, t.v.data(), plan->Chunk(n));
    const absl::Status status = Run(plan->PlanOf(n), arguments, workspace.span(), pool);
    RAPT_CHECK(status.ok(), std::string(status.message()).c_str());
  }
  const std::array<int64_t, 4> dims = {1, t.heads, t.length, t.size};
  const MutableTensorView output = {reinterpret_cast<std::byte*>(y), DType::kFloat32, dims,
                                    RowMajorStrides(dims)};
  pool.ParallelFor(t.heads,
                   [&](int64_t head, int) { FinishRows(problem, arguments, 0, output, {}, head); });
}

// Returns bytes of this process: "VmHWM", the peak resident size, or "VmRSS", the current one.
int64_t MemoryOfProcess(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib;
    if (word == field + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

struct Cost {
  int64_t peak_bytes = 0;  // in addition to the tensors
  double seconds = 0;
};

// Runs `attend` in a child process, to measure its memory alone. Returns false if the child died.
bool Measure(const Task& task, void (*attend)(const Task&, float*, ThreadPool&),
             const SharedFloats& y, Cost& cost) {
  int results[2];
  if (pipe(results) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    ThreadPool pool(ReadHostLimits().cores);
    for (const SharedFloats* tensor : {&task.q, &task.k, &task.v, &y}) {
      volatile float* const data = tensor->data();
      for (int64_t i = 0; i < tensor->size(); i += 1024)
        data[i] = data[i];  // makes the page resident
    }
    const int64_t before = MemoryOfProcess("VmRSS");
    const auto begin = std::chrono::steady_clock::now();
    attend(task, y.data(), pool);
    Cost mine;
    mine.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    mine.peak_bytes = std::max<int64_t>(0, MemoryOfProcess("VmHWM") - before);
    _exit(write(results[1], &mine, sizeof(mine)) == sizeof(mine) ? 0 : 1);
  }
  close(results[1]);
  const bool received = child > 0 && read(results[0], &cost, sizeof(cost)) == sizeof(cost);
  close(results[0]);
  int status = 0;
  if (child > 0) waitpid(child, &status, 0);
  return received && status == 0;
}

struct Comparison {
  int64_t length = 0;
  Cost standard, chunked;
  float largest_difference = 0;

  bool matches() const { return largest_difference <= kTolerance; }
};

absl::StatusOr<Comparison> Compare(const CompareFlags& flags, int64_t length) {
  const Task task(flags, length);
  const SharedFloats standard(task.q.size()), chunked(task.q.size());
  Comparison comparison;
  comparison.length = length;
  if (!Measure(task, AttendStandard, standard, comparison.standard) ||
      !Measure(task, AttendChunked, chunked, comparison.chunked)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("length %d needs more memory than this machine has", length));
  }
  for (int64_t i = 0; i < standard.size(); ++i) {
    const float difference = std::abs(standard.data()[i] - chunked.data()[i]);
    // NaN must not match.
    if (!(difference <= comparison.largest_difference)) comparison.largest_difference = difference;
  }
  return comparison;
}

std::string Milliseconds(double seconds) { return absl::StrFormat("%.1f ms", seconds * 1e3); }

void PrintHead(const CompareFlags& flags) {
  absl::PrintF(
      "1 x %d heads x length^2, head size %d, fp32; memory in addition to Q, K, V and Y:\n\n",
      flags.heads, flags.head_size);
  absl::PrintF("%8s  %12s  %12s  %12s  %12s  %s\n", "", "standard", "", "chunked", "", "");
  absl::PrintF("%8s  %12s  %12s  %12s  %12s  %s\n", "length", "memory", "time", "memory", "time",
               "outputs");
}

void Print(const Comparison& c) {
  absl::PrintF("%8d  %12s  %12s  %12s  %12s  %s (%.1e)\n", c.length,
               HumanBytes(c.standard.peak_bytes), Milliseconds(c.standard.seconds),
               HumanBytes(c.chunked.peak_bytes), Milliseconds(c.chunked.seconds),
               c.matches() ? "match" : "differ", c.largest_difference);
  std::fflush(stdout);
}

void PrintTail(const CompareFlags& flags) {
  absl::PrintF(
      "\nmemory    measured peak of a process\n"
      "standard  the full score matrix, its softmax, times V\n"
      "chunked   %d keys at a time by online softmax, as AttendStream does\n",
      flags.chunk);
}

void WriteCost(const char* name, const Cost& cost, JsonWriter& json) {
  json.Key(name).BeginObject().Key("peak_bytes").Integer(cost.peak_bytes);
  json.Key("seconds").Number(cost.seconds).EndObject();
}

void PrintJson(const CompareFlags& flags, const std::vector<Comparison>& comparisons) {
  JsonWriter json;
  json.BeginObject().Key("heads").Integer(flags.heads).Key("head_size").Integer(flags.head_size);
  json.Key("chunk").Integer(flags.chunk).Key("lengths").BeginArray();
  for (const Comparison& c : comparisons) {
    json.BeginObject().Key("length").Integer(c.length);
    WriteCost("standard", c.standard, json);
    WriteCost("chunked", c.chunked, json);
    json.Key("largest_difference").Number(c.largest_difference);
    json.Key("match").Boolean(c.matches()).EndObject();
  }
  json.EndArray().EndObject();
  std::puts(json.Take().c_str());
}

ExitCode CompareAll(const CompareFlags& flags) {
  std::vector<Comparison> comparisons;
  if (!flags.json) PrintHead(flags);
  std::fflush(stdout);  // or the children would print it again
  for (const int64_t length : flags.lengths) {
    RAPT_ASSIGN_OR_EXIT(const Comparison comparison, FailCall, Compare(flags, length));
    comparisons.push_back(comparison);
    if (!flags.json) Print(comparison);
  }
  flags.json ? PrintJson(flags, comparisons) : PrintTail(flags);
  const bool match = std::all_of(comparisons.begin(), comparisons.end(),
                                 [](const Comparison& c) { return c.matches(); });
  return match ? ExitCode::kOk : Fail(ExitCode::kCallFailed, "the outputs differ");
}

absl::Status CheckFlags(const CompareFlags& flags) {
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("heads", flags.heads));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("head-size", flags.head_size));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("chunk", flags.chunk));
  for (const int64_t length : flags.lengths) {
    RAPT_RETURN_IF_ERROR(CheckAtLeastOne("seq", length));
    // The score matrix dominates.
    const double bytes = 4.0 * static_cast<double>(flags.heads) * static_cast<double>(length) *
                         static_cast<double>(std::max(length, flags.head_size));
    if (bytes > static_cast<double>(ReadHostLimits().memory_bytes) / 2) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--seq is %d; with %d heads it needs %.1e bytes of scores, more than "
                          "half of this machine's memory",
                          length, flags.heads, bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace

ExitCode RunCompareMemoryCommand(CommandArguments arguments) {
  CompareFlags flags;
  const CommandLine line{
      .usage = "rapt compare-memory [flags]",
      .summary =
          "Computes self-attention with the full score matrix and in chunks of keys, each in its "
          "own process, and compares memory, time and outputs. Needs no server.",
      .flags = {{"seq", "LIST", "lengths (default: 1024,2048,4096)", &flags.lengths},
                {"heads", "N", "heads (default: 4)", &flags.heads},
                {"head-size", "N", "head size (default: 64)", &flags.head_size},
                {"chunk", "N", "keys in a chunk (default: 512)", &flags.chunk},
                {"json", "", "print bytes and seconds as JSON", &flags.json}},
      .examples = {"rapt compare-memory", "rapt compare-memory --seq 512,1024 --chunk 128 --json"}};
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments)) return *done;
  RAPT_EXIT_IF_ERROR(FailUsage, CheckFlags(flags));
  return CompareAll(flags);
}

}  // namespace rapt
