#include "attention/reference/reference_backend.h"

#include "attention/half.h"
#include "attention/mechanism/softmax/query_row.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "attention/present.h"

namespace rapt {
namespace {

constexpr int64_t kDouble = sizeof(double);

// Returns the score output of a step of the definition, if any.
std::optional<ScoreOutput> OutputOf(Step step) {
  switch (step) {
    case Step::kScaled:
      return ScoreOutput::kScores;
    case Step::kSoftcapped:
      return ScoreOutput::kSoftcapped;
    case Step::kBiased:
      return ScoreOutput::kBiased;
    case Step::kWeights:
      return ScoreOutput::kWeights;
    default:
      return std::nullopt;
  }
}

void StoreRow(const MutableTensorView& tensor, int64_t b, int64_t h, int64_t i,
              absl::Span<const double> values) {
  std::byte* row = tensor.Row(b, h, i);
  for (size_t n = 0; n < values.size(); ++n) StoreElement(row, tensor.dtype, n, values[n]);
}

class Reference final : public Backend {
 public:
  absl::string_view name() const override { return "reference"; }

  bool Reads(Source) const override { return true; }
  absl::Status Supports(const Problem&) const override { return absl::OkStatus(); }

  // One task per query row, with workspace for its T scores, Dv outputs and T biases.
  void PlanTasks(Plan& plan) const override {
    const Problem& p = plan.problem;
    plan.stages = {Rows(p) + PresentTasks(p)};
    plan.worker_workspace_bytes =
        (p.total_keys() + p.value_head_size) * kDouble + QueryRow::MemoryBytes(p);
    plan.state_dtype = DType::kFloat64;
    plan.flops = 2.0 * static_cast<double>(Rows(p)) * static_cast<double>(p.total_keys()) *
                 static_cast<double>(p.head_size + p.value_head_size);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int /*stage*/,
               int64_t task, int worker, const Checkpoint&) const override {
    const Problem& p = plan.problem;
    if (task >= Rows(p)) return RunPresentTask(p, arguments, task - Rows(p));
    auto* numbers = reinterpret_cast<double*>(workspace + worker * plan.worker_workspace_bytes);
    const absl::Span<double> scores(numbers, p.total_keys());
    const absl::Span<double> output(numbers + p.total_keys(), p.value_head_size);

    const int64_t i = task % p.query_length;
    const int64_t h = task / p.query_length % p.query_heads;
    const int64_t b = task / p.query_length / p.query_heads;
    auto* const memory = reinterpret_cast<std::byte*>(output.data() + output.size());
    const QueryRow row(p, arguments, b, h, i, memory);
    const double lse = row.Weigh(scores, [&](Step step, absl::Span<const double> s) {
      const std::optional<ScoreOutput> stage = OutputOf(step);
      if (stage && stage == p.score_output) StoreRow(arguments.outputs[Role::kScores], b, h, i, s);
    });
    row.Output(scores, lse, output);
    if (p.folds) return Fold(arguments.state, b, h, i, output, lse);
    StoreRow(arguments.outputs[Role::kY], b, h, i, output);
    if (p.wants_lse) StoreRow(arguments.outputs[Role::kLse], b, h, i, {lse});
  }

 private:
  static void Fold(const Arguments::State& state, int64_t b, int64_t h, int64_t i,
                   absl::Span<const double> output, double lse) {
    const auto row = [&](const MutableTensorView& view) {
      return reinterpret_cast<double*>(view.Row(b, h, i));
    };
    FoldInto(absl::Span<double>(row(state.output), output.size()), *row(state.max), *row(state.sum),
             output, lse);
  }

  static int64_t Rows(const Problem& p) { return p.batch * p.query_heads * p.query_length; }
};

}  // namespace

const Backend& ReferenceBackend() {
  static const Reference backend;
  return backend;
}

}  // namespace rapt
