#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "attention/diagnosis.h"
#include "attention/native_field_names.h"
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
// -------------------------------------------------------------------------------------

TensorSpec SpecOf(const client::TensorView& view) { return {ToLibrary(view.dtype), view.shape}; }

std::optional<TensorSpec> SpecOf(const std::optional<client::TensorView>& view) {
  return view ? std::optional(SpecOf(*view)) : std::nullopt;
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
  result.q = SpecOf(call.q);
  result.k = SpecOf(call.k);
  result.v = SpecOf(call.v);
  result.attn_mask = SpecOf(call.mask);
  result.past_key = SpecOf(call.past_key);
  result.past_value = SpecOf(call.past_value);
  if (!call.key_lengths.empty()) {
    result.nonpad_kv_seqlen =
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
  arguments.inputs[Role::kQ] = resolved.Query(call.q.data.data());
  arguments.inputs[Role::kK] = resolved.Key(call.k.data.data());
  arguments.inputs[Role::kV] = resolved.Value(call.v.data.data());
  if (call.mask) arguments.inputs[Role::kMask] = resolved.Mask(call.mask->data.data());
  if (call.past_key) {
    arguments.inputs[Role::kPastKey] = resolved.PastKey(call.past_key->data.data());
    arguments.inputs[Role::kPastValue] = resolved.PastValue(call.past_value->data.data());
  }
  arguments.key_lengths = call.key_lengths;
  return arguments;
}

// --- Its outputs
// ----------------------------------------------------------------------------------

// Zeros for an output, to be filled.
std::string RoomFor(const TensorSpec& spec) {
  const absl::StatusOr<int64_t> bytes = ByteSize("output", spec);
  RAPT_CHECK(bytes.ok(), "a resolved call has outputs whose sizes fit");
  return std::string(*bytes, '\0');
}

std::byte* DataOf(std::string& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); }

client::Tensor ToTensor(const TensorSpec& spec, std::string bytes) {
  return {FromLibrary(spec.dtype), spec.shape, std::move(bytes)};
}

// --- The diagnosis
// --------------------------------------------------------------------------------

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

// As it was given, not as the library sees it.
const client::TensorView& FindTensor(const client::AttendCall& call, absl::string_view name) {
  if (name == kNativeNames.q) return call.q;
  if (name == kNativeNames.k) return call.k;
  if (name == kNativeNames.v) return call.v;
  if (name == kNativeNames.mask) return *call.mask;
  if (name == kNativeNames.past_key) return *call.past_key;
  RAPT_CHECK(name == kNativeNames.past_value, "a diagnosis names the tensors of its call");
  return *call.past_value;
}

client::TensorReport ReportOf(const client::AttendCall& call, const TensorSummary& summary) {
  const client::TensorView& tensor = FindTensor(call, summary.name);
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

    const Problem& problem = resolved->problem;
    Arguments arguments = InputsOf(call, *resolved);
    std::string y = RoomFor(resolved->y);
    std::string scores, lse, present_key, present_value;
    arguments.outputs[Role::kY] = resolved->Output(DataOf(y));
    if (problem.score_output) {
      scores = RoomFor(resolved->scores);
      arguments.outputs[Role::kScores] = resolved->Scores(DataOf(scores));
    }
    if (problem.wants_lse) {
      lse = RoomFor(resolved->lse);
      arguments.outputs[Role::kLse] = resolved->Lse(DataOf(lse));
    }
    if (problem.wants_present) {
      present_key = RoomFor(resolved->present_key);
      present_value = RoomFor(resolved->present_value);
      arguments.outputs[Role::kPresentKey] = resolved->PresentKey(DataOf(present_key));
      arguments.outputs[Role::kPresentValue] = resolved->PresentValue(DataOf(present_value));
    }

    AlignedBuffer workspace(plan->workspace_bytes());
    const auto start = std::chrono::steady_clock::now();
    if (absl::Status ran = Run(*plan, arguments, workspace.span(), pool_); !ran.ok()) return ran;
    client::AttendResult result;
    result.compute_time = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::steady_clock::now() - start);
    result.y = ToTensor(resolved->y, std::move(y));
    if (problem.score_output) result.scores = ToTensor(resolved->scores, std::move(scores));
    if (problem.wants_lse) result.lse = ToTensor(resolved->lse, std::move(lse));
    if (problem.wants_present) {
      result.present_key = ToTensor(resolved->present_key, std::move(present_key));
      result.present_value = ToTensor(resolved->present_value, std::move(present_value));
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
