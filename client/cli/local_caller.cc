#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "attention/diagnosis.h"
#include "attention/field_names.h"
#include "attention/operator.h"
#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/host_limits.h"
#include "base/thread_pool.h"
#include "client/cli/attention_caller.h"
#include "client/cli/library_types.h"

namespace rapt {
namespace {

// --- The call
// --------------------------------------------------------------------------------------

TensorSpec SpecOf(const client::TensorView& view) { return {ToLibrary(view.dtype), view.shape}; }

// The tensor of a call by its role; null if the call has none.
const client::TensorView* TensorOf(const client::AttendCall& call, Role role) {
  const auto optional = [](const std::optional<client::TensorView>& tensor) {
    return tensor ? &*tensor : nullptr;
  };
  switch (role) {
    case Role::kQ:
      return &call.q;
    case Role::kK:
      return &call.k;
    case Role::kV:
      return &call.v;
    case Role::kMask:
      return optional(call.mask);
    case Role::kPastKey:
      return optional(call.past_key);
    case Role::kPastValue:
      return optional(call.past_value);
    case Role::kBias:
      return optional(call.attention_bias);
    case Role::kHeadSink:
      return optional(call.head_sink);
    default:
      RAPT_CHECK(false, "the role is not one of kInputTensors");
  }
}

Layout ToLibrary(client::Layout layout) {
  switch (layout) {
    case client::Layout::kByRank:
      return Layout::kByRank;
    case client::Layout::kBhsd:
      return Layout::kBhsd;
    case client::Layout::kBshd:
      return Layout::kBshd;
    case client::Layout::kBse:
      return Layout::kBse;
  }
  RAPT_CHECK(false, "unknown Layout");
}

ScoreOutput ToLibrary(client::ScoreOutput output) {
  switch (output) {
    case client::ScoreOutput::kScores:
      return ScoreOutput::kScores;
    case client::ScoreOutput::kSoftcapped:
      return ScoreOutput::kSoftcapped;
    case client::ScoreOutput::kBiased:
      return ScoreOutput::kBiased;
    case client::ScoreOutput::kWeights:
      return ScoreOutput::kWeights;
  }
  RAPT_CHECK(false, "unknown ScoreOutput");
}

OperatorCall ToLibrary(const client::AttendCall& call) {
  OperatorCall result;
  for (Role role : kInputTensors) {
    const client::TensorView* tensor = TensorOf(call, role);
    if (tensor != nullptr) result.inputs[role] = SpecOf(*tensor);
  }
  if (!call.key_lengths.empty()) {
    result.inputs[Role::kKeyLengths] =
        TensorSpec{DType::kInt64, {static_cast<int64_t>(call.key_lengths.size())}};
  }
  result.layout = ToLibrary(call.layout);
  if (call.query_heads != 0) result.q_num_heads = call.query_heads;
  if (call.kv_heads != 0) result.kv_num_heads = call.kv_heads;
  result.scale = call.scale;
  result.softcap = call.softcap;
  result.is_causal = call.causal;
  result.alignment =
      call.alignment == client::Alignment::kTopLeft ? Alignment::kTopLeft : Alignment::kBottomRight;
  result.left_window_size = call.window.left.value_or(-1);
  result.right_window_size = call.window.right.value_or(-1);
  result.softmax_in_fp64 = call.softmax_in_fp64;
  if (call.dropout) result.dropout = Dropout{call.dropout->probability, call.dropout->seed};
  if (call.score_output) result.score_output = ToLibrary(*call.score_output);
  result.wants_lse = call.wants_lse;
  result.wants_present = call.wants_present;
  return result;
}

Arguments InputsOf(const client::AttendCall& call, const ResolvedCall& resolved) {
  Arguments arguments;
  for (Role role : kInputTensors) {
    if (!InfoOf(role).wanted(resolved.problem)) continue;
    arguments.inputs[role] = resolved.Input(role, TensorOf(call, role)->data.data());
  }
  arguments.key_lengths = call.key_lengths;
  return arguments;
}

// --- Its outputs
// -----------------------------------------------------------------------------------

// A buffer for an output.
std::string RoomFor(const TensorSpec& spec) {
  const absl::StatusOr<int64_t> bytes = ByteSize("output", spec);
  RAPT_CHECK(bytes.ok(), "a resolved call has outputs whose sizes fit");
  return std::string(*bytes, '\0');
}

client::Tensor ToTensor(const TensorSpec& spec, std::string bytes) {
  return {FromLibrary(spec.dtype), spec.shape, std::move(bytes)};
}

// --- The diagnosis
// ---------------------------------------------------------------------------------

client::Range RangeOf(const NumberSummary& numbers) {
  client::Range range;
  if (numbers.finite > 0) {
    range.min = numbers.min;
    range.max = numbers.max;
  }
  range.nan_count = numbers.nan;
  range.positive_inf_count = numbers.positive_inf;
  range.negative_inf_count = numbers.negative_inf;
  return range;
}

client::TensorReport ReportOf(const client::AttendCall& call, const TensorSummary& summary) {
  const client::TensorView& tensor = *TensorOf(call, summary.role);  // in the caller's type
  const NumberSummary& numbers = summary.numbers;
  client::TensorReport report{summary.name,    tensor.dtype,     tensor.shape,
                              numbers.count(), RangeOf(numbers), std::nullopt};
  if (numbers.finite > 0) report.mean = numbers.sum / static_cast<double>(numbers.finite);
  return report;
}

client::Diagnosis ToDiagnosis(const client::AttendCall& call, const DiagnosisReport& report) {
  client::Diagnosis diagnosis;
  diagnosis.problem = report.problem;
  for (const TensorSummary& input : report.inputs) {
    diagnosis.inputs.push_back(ReportOf(call, input));
  }
  diagnosis.raw_scores = RangeOf(report.raw_scores);
  diagnosis.scaled_scores = RangeOf(report.scaled_scores);
  diagnosis.biased_scores = RangeOf(report.biased_scores);
  diagnosis.pairs = report.raw_scores.count();
  diagnosis.masked_by_mask = report.hidden_by_mask;
  diagnosis.masked_by_position = report.hidden_by_position;
  diagnosis.weights = RangeOf(report.weights);
  diagnosis.row_sums = RangeOf(report.row_sums);
  diagnosis.empty_rows = report.empty_rows;
  for (const auto& [batch, head, query] : report.first_empty_rows) {
    diagnosis.first_empty_rows.push_back({batch, head, query});
  }
  diagnosis.output = RangeOf(report.output);
  for (const BackendChoice& choice : report.backends) {
    diagnosis.backends.push_back(
        {choice.backend, choice.chosen, choice.plan, choice.workspace_bytes, choice.reason});
  }
  diagnosis.warnings = report.warnings;
  return diagnosis;
}

class LocalCaller : public AttentionCaller {
 public:
  LocalCaller() : pool_(ReadHostLimits().cores) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    const absl::StatusOr<ResolvedCall> resolved = Resolve(ToLibrary(call), kNativeNames);
    if (!resolved.ok()) return resolved.status();
    const absl::StatusOr<Plan> plan = MakePlan(resolved->problem, options());
    if (!plan.ok()) return plan.status();

    Arguments arguments = InputsOf(call, *resolved);
    OutputMap<std::string> outputs;
    for (Role role : kOutputs) {
      if (!InfoOf(role).wanted(resolved->problem)) continue;
      outputs[role] = RoomFor(resolved->outputs[role]);
      arguments.outputs[role] =
          resolved->Output(role, reinterpret_cast<std::byte*>(outputs[role].data()));
    }

    AlignedBuffer workspace(plan->workspace_bytes());
    const auto start = std::chrono::steady_clock::now();
    if (absl::Status ran = Run(*plan, arguments, workspace.span(), pool_); !ran.ok()) return ran;
    client::AttendResult result;
    result.compute_time = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::steady_clock::now() - start);
    const auto take = [&](Role role) {
      return ToTensor(resolved->outputs[role], std::move(outputs[role]));
    };
    const Problem& problem = resolved->problem;
    result.y = take(Role::kY);
    if (problem.score_output) result.scores = take(Role::kScores);
    if (problem.wants_lse) result.lse = take(Role::kLse);
    if (problem.wants_present) {
      result.present_key = take(Role::kPresentKey);
      result.present_value = take(Role::kPresentValue);
    }
    result.backend =
        plan->routing.backend == nullptr ? "" : std::string(plan->routing.backend->name());
    result.plan = plan->Describe();
    return result;
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall& call) override {
    const absl::StatusOr<ResolvedCall> resolved = Resolve(ToLibrary(call), kNativeNames);
    if (!resolved.ok()) return resolved.status();
    const absl::StatusOr<DiagnosisReport> report = rapt::Diagnose(
        resolved->problem, InputsOf(call, *resolved), options(), pool_, kNativeNames);
    if (!report.ok()) return report.status();
    return ToDiagnosis(call, *report);
  }

 private:
  PlanOptions options() const { return {.threads = pool_.workers()}; }

  ThreadPool pool_;
};

}  // namespace

std::unique_ptr<AttentionCaller> NewLocalCaller() { return std::make_unique<LocalCaller>(); }

}  // namespace rapt
