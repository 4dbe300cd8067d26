// The report a person needs when attention looks wrong: what came in, what each step of the
// computation made of it, what would run and why nothing else.
#ifndef RAPT_ATTENTION_DIAGNOSIS_H_
#define RAPT_ATTENTION_DIAGNOSIS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/field_names.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "base/mutex.h"
#include "base/thread_pool.h"

namespace rapt {

// The numbers of a tensor or of a step, summed up. Merging is commutative, so any order of tasks
// gives the same counts and bounds.
struct NumberSummary {
  int64_t finite = 0;
  int64_t nan = 0;
  int64_t positive_inf = 0;
  int64_t negative_inf = 0;
  double min = 0;  // of the finite ones; meaningless when there is none
  double max = 0;
  double sum = 0;

  void Add(double value);
  void Merge(const NumberSummary& other);
  int64_t count() const { return finite + nan + positive_inf + negative_inf; }
};

struct TensorSummary {
  std::string name;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> dims = {};
  NumberSummary numbers;
  bool only_zero_and_one = true;
};

// What a backend says to a problem under given options.
struct BackendChoice {
  std::string backend;
  bool chosen = false;
  std::string plan;  // empty when it can't run
  int64_t workspace_bytes = 0;
  std::string reason;  // why it can't run, or why it was not taken
};

struct DiagnosisReport {
  std::string problem;
  std::vector<TensorSummary> inputs;
  NumberSummary raw_scores;
  NumberSummary scaled_scores;  // after softcap
  double widest_row = 0;        // the largest distance of two finite scaled scores in one row
  NumberSummary biased_scores;
  int64_t hidden_by_position = 0;
  int64_t hidden_by_mask = 0;  // of those that position leaves visible
  NumberSummary weights;
  NumberSummary row_sums;  // of rows that see a key
  int64_t empty_rows = 0;
  std::vector<std::array<int64_t, 3>> first_empty_rows;  // (b, h, i), in order, a few
  NumberSummary output;
  std::vector<BackendChoice> backends;
  std::vector<std::string> warnings;
};

// "B=2 Hq=8 Hkv=2 Sq=128 Sk=128 P=0 D=64 Dv=64 FP32 causal window=[128,0]"
std::string Describe(const Problem& problem);

// Every backend's answer, in the order in which auto tries them. `problem` and `options` are valid.
std::vector<BackendChoice> ExplainChoice(const Problem& problem, const PlanOptions& options);

// A diagnosis in the making: independent tasks, as a plan has them. Tasks may run on any thread at
// once.
class Diagnosis {
 public:
  // Borrows all of them, valid as far as inputs go, until Finish() is over.
  Diagnosis(const Problem& problem, const Arguments& arguments,
            const FieldNames& names = kOnnxNames);

  int64_t tasks() const { return input_rows_ + query_rows_; }
  // What a worker needs to run a task, aligned to 8.
  static int64_t WorkerWorkspaceBytes(const Problem& problem);
  void RunTask(int64_t task, std::byte* worker_workspace);

  // When all tasks are done.
  DiagnosisReport Finish(const PlanOptions& options);

 private:
  struct Input {
    absl::string_view name;
    TensorView view;
    int64_t rows;
  };

  void SummariseInputRow(int64_t row);
  void SummariseQueryRow(int64_t row, std::byte* workspace);

  const Problem& problem_;
  const Arguments& arguments_;
  const FieldNames& names_;
  std::vector<Input> inputs_;
  int64_t input_rows_ = 0;
  int64_t query_rows_ = 0;

  Mutex mutex_;
  DiagnosisReport report_ ABSL_GUARDED_BY(mutex_);
};

// The whole of it, blocking; reads no outputs. InvalidArgument as MakePlan and Run give it.
absl::StatusOr<DiagnosisReport> Diagnose(const Problem& problem, const Arguments& arguments,
                                         const PlanOptions& options, ThreadPool& pool,
                                         const FieldNames& names = kOnnxNames);

}  // namespace rapt

#endif  // RAPT_ATTENTION_DIAGNOSIS_H_
