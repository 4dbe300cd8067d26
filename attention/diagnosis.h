// A report for debugging attention that looks wrong: statistics of the inputs and of every step of
// the computation, and which backend is chosen and why. Of a problem with Problem::backward also
// how the gradient flows, in which case its backward.gradients do not matter.
#ifndef RAPT_ATTENTION_DIAGNOSIS_H_
#define RAPT_ATTENTION_DIAGNOSIS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/checkpoint.h"
#include "attention/estimate_fit.h"
#include "attention/field_names.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/rotary/rotation.h"
#include "attention/tensor_operator.h"
#include "base/mutex.h"
#include "base/thread_pool.h"

namespace rapt {

// Statistics of the values of a tensor or a step. Merging is commutative: counts and bounds do not
// depend on the order of tasks.
struct NumberSummary {
  int64_t finite = 0;
  int64_t nan = 0;
  int64_t positive_inf = 0;
  int64_t negative_inf = 0;
  double min = 0;  // of the finite values; undefined if there are none
  double max = 0;
  double sum = 0;

  void Add(double value);
  void Merge(const NumberSummary& other);
  int64_t count() const { return finite + nan + positive_inf + negative_inf; }
};

struct TensorSummary {
  Role role = Role::kQ;
  std::string name;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> dims = {};
  NumberSummary numbers = {};
  bool only_zero_and_one = true;
  // The indices of the first NaN and the first infinity, in the order of `dims`.
  std::optional<std::array<int64_t, 4>> first_nan = {}, first_infinity = {};
};

// Whether a backend is chosen for a problem under given options, and if not, why.
struct BackendChoice {
  std::string backend;
  bool chosen = false;
  std::string plan;  // empty if it cannot run
  int64_t workspace_bytes = 0;
  std::string reason;  // why it cannot run or was not chosen
};
// The gradient of Q, K or V.
struct GradientSummary {
  Role role = Role::kDQ;
  std::string name;
  NumberSummary numbers;
  double norm = 0;                     // of the finite numbers
  std::vector<double> position_norms;  // of each query, or of each key, past ones first
};

struct DiagnosisReport {
  std::string problem;
  std::vector<TensorSummary> inputs;
  NumberSummary raw_scores;     // Q K^T, with relative_keys
  NumberSummary scaled_scores;  // after softcap
  double widest_row = 0;        // the largest range of the finite scaled scores of a row
  NumberSummary biased_scores;
  int64_t hidden_by_position = 0;
  // Of those visible by position: by the block mask; else because they are not selected; else by
  // mask or biases.
  int64_t hidden_by_block_mask = 0;
  int64_t hidden_by_selection = 0;
  int64_t hidden_by_mask = 0;
  NumberSummary weights;
  NumberSummary row_sums;  // of rows that see a key
  int64_t empty_rows = 0;
  std::vector<std::array<int64_t, 3>> first_empty_rows;  // the first few (b, h, i)
  NumberSummary output;
  std::vector<GradientSummary> gradients;
  std::vector<BackendChoice> backends;
  std::vector<std::string> warnings;
  // Of up to 64 rows, evenly spaced; without rows unless HasEstimates(), and if gradients flow.
  EstimateFit estimate_fit;
  std::vector<std::string> estimates;  // what Explain() says
};

// "B=2 Hq=8 Hkv=2 Sq=128 Sk=128 P=0 D=64 Dv=64 FP32 scale=0.125 causal left_window=128"
std::string Describe(const Problem& problem);

// Returns the choice for every backend, in auto's order. REQUIRES: both arguments are valid.
std::vector<BackendChoice> ExplainChoice(const Problem& problem, const PlanOptions& options);
std::vector<BackendChoice> ExplainChoice(const TensorOperator& op, const PlanOptions& options);

// Computes a report in stages of independent tasks, like a plan. The tasks of a stage may run
// concurrently on any threads.
class Diagnosis {
 public:
  // Borrows all arguments until Finish() returns. `workers` as in WorkspaceBytes(). REQUIRES: the
  // problem and the inputs are valid; the data of the inputs may be set until the first task runs.
  // With Problem::q8_0, the last axis of K and V counts numbers, not the bytes of their rows.
  Diagnosis(const Problem& problem, const Arguments& arguments, int workers,
            const FieldNames& names = kOnnxNames);

  // The tasks of each stage.
  absl::InlinedVector<int64_t, 6> stages() const;
  // The workspace: a shared part, then one for each worker; aligned to 64.
  static int64_t WorkspaceBytes(const Problem& problem, int workers);
  void RunTask(int stage, int64_t task, int worker, std::byte* workspace,
               const Checkpoint& checkpoint);

  // REQUIRES: all tasks are done.
  DiagnosisReport Finish(const PlanOptions& options);

 private:
  struct Input {
    Role role;
    int64_t rows;
  };

  void RunBackwardTask(int stage, int64_t task, int worker, std::byte* workspace,
                       const Checkpoint& checkpoint) const;
  void SummarizeGradient(Role role, std::byte* workspace);
  void SummarizeRow(int64_t task, const Arguments& arguments, const Rotation* rotation,
                    std::byte* workspace);
  void SummarizeInputRow(int64_t row);
  void SummarizeQueryRow(int64_t index, const Arguments& arguments, const Rotation* rotation,
                         std::byte* workspace);

  const Problem& problem_;
  const FieldNames& names_;
  const Arguments& arguments_;
  std::vector<Input> inputs_;
  int64_t input_rows_ = 0;
  int64_t query_rows_ = 0;
  int64_t estimate_stride_ = 0;   // every so many rows the fit of estimates is measured; 0: never
  std::optional<Plan> backward_;  // of the gradients

  Mutex mutex_;
  DiagnosisReport report_ ABSL_GUARDED_BY(mutex_);
  // Of each query position: whether some row sees two keys or more, so that Q matters.
  std::vector<bool> chooses_ ABSL_GUARDED_BY(mutex_);
};

// Runs all tasks and returns the report. Does not access outputs. Returns InvalidArgument as
// MakePlan and Run do.
absl::StatusOr<DiagnosisReport> Diagnose(const Problem& problem, const Arguments& arguments,
                                         const PlanOptions& options, ThreadPool& pool,
                                         const FieldNames& names = kOnnxNames);

}  // namespace rapt

#endif  // RAPT_ATTENTION_DIAGNOSIS_H_
