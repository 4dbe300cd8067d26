#include "attention/reference/reference_backend.h"

#include "attention/half.h"
#include "attention/mechanism/softmax/query_row.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "attention/present.h"
#include "attention/reference/backward.h"
#include "attention/rotary/rotate.h"
#include "attention/rotary/rotation.h"

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

  // One task per query row, with workspace for its T scores, Dv outputs and T biases. A rotary
  // embedding has a stage before.
  void PlanTasks(Plan& plan) const override {
    const Problem& p = plan.problem;
    if (p.backward) return PlanReferenceBackward(plan);
    plan.worker_workspace_bytes =
        (p.total_keys() + p.value_head_size) * kDouble + QueryRow::MemoryBytes(p);
    if (p.has_rotary()) {
      plan.present_stage = 1;
      plan.stages.push_back(Rotation::Tasks(p));
      plan.shared_workspace_bytes = Rotation::SharedBytes(p);
      plan.worker_workspace_bytes += Rotation::WorkerBytes(p);
    }
    plan.stages.push_back(PresentTasks(p) + Rows(p));
    plan.state_dtype = DType::kFloat64;
    plan.flops = 2.0 * static_cast<double>(Rows(p)) * static_cast<double>(p.total_keys()) *
                 static_cast<double>(p.head_size + p.value_head_size);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    const Problem& p = plan.problem;
    if (p.backward) {
      return RunReferenceBackward(plan, arguments, workspace, stage, task, worker, checkpoint);
    }
    std::byte* const own =
        workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
    if (!p.has_rotary()) return RunRow(p, arguments, nullptr, task, own);
    const Rotation rotation(p, workspace, RotateRow);
    if (stage == 0) return rotation.RunTask(arguments, task, own, checkpoint);
    RunRow(p, rotation.WithKeys(arguments), &rotation, task, own);
  }

 private:
  static void RunRow(const Problem& p, const Arguments& arguments, const Rotation* rotation,
                     int64_t task, std::byte* workspace) {
    if (task < PresentTasks(p)) return RunPresentTask(p, arguments, task);
    task -= PresentTasks(p);
    auto* numbers = reinterpret_cast<double*>(workspace);
    const absl::Span<double> scores(numbers, p.total_keys());
    const absl::Span<double> output(numbers + p.total_keys(), p.value_head_size);

    const int64_t i = task % p.query_length;
    const int64_t h = task / p.query_length % p.query_heads;
    const int64_t b = task / p.query_length / p.query_heads;
    auto* const memory = reinterpret_cast<std::byte*>(output.data() + output.size());
    const QueryRow row(p, arguments, rotation, b, h, i, memory);
    const double lse = row.Weigh(scores, [&](Step step, absl::Span<const double> s) {
      const std::optional<ScoreOutput> stage = OutputOf(step);
      if (stage && stage == p.score_output) StoreRow(arguments.outputs[Role::kScores], b, h, i, s);
    });
    row.Output(scores, lse, output);
    if (p.folds) return Fold(arguments.state, b, h, i, output, lse);
    StoreRow(arguments.outputs[Role::kY], b, h, i, output);
    if (p.wants_lse) StoreRow(arguments.outputs[Role::kLse], b, h, i, {lse});
  }

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
