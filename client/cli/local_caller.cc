#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "attention/attention.h"
#include "attention/attributes.h"
#include "attention/bound_call.h"
#include "attention/diagnosis.h"
#include "attention/field_names.h"
#include "attention/operator.h"
#include "base/check.h"
#include "base/host_limits.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "client/cli/attention_caller.h"
#include "client/cli/operator_call.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

// --- The call ---

TensorSpec SpecOf(const client::TensorView& view) { return {view.dtype, view.shape}; }

// Returns the tensor of this role, or null if the call has none.
const client::TensorView* TensorOf(const client::AttendCall& call, Role role) {
  return client::FindCallTensor(kNativeNames[role])->In(call);
}

const client::TensorView* TensorOf(const client::BackwardCall& call, Role role) {
  const client::BackwardTensor* const row = client::FindBackwardTensor(kNativeNames[role]);
  return row != nullptr ? row->In(call) : TensorOf(call.call, role);
}

template <typename T>
void Assign(const T& value, T& out) {
  out = value;
}
template <typename T>
void Assign(const std::optional<T>& value, T& out) {
  if (value) out = *value;
}
template <typename T>
void Assign(const T& value, std::optional<T>& out) {
  if (value != 0) out = value;
}

const AttributeInfo& AttributeOf(absl::string_view native) {
  const auto info = std::find_if(Attributes().begin(), Attributes().end(),
                                 [&](const AttributeInfo& i) { return i.native == native; });
  RAPT_CHECK(info != Attributes().end(), "the library has no such attribute");
  return *info;
}

void CopyAttributes(const client::AttendCall& call, OperatorCall& result) {
  for (const client::CallAttribute& own : client::CallAttributes()) {
    const AttributeInfo& info = AttributeOf(own.name);
    own.Visit(call, [&](const auto& value) {
      const auto assign = [&](const auto& field) {
        if constexpr (requires { Assign(value, result.*field.call); }) {
          Assign(value, result.*field.call);
        } else {
          RAPT_CHECK(false, "the library's attribute has another type than the client's");
        }
      };
      std::visit(assign, info.field);
    });
  }
}

OperatorCall LibraryCall(const client::AttendCall& call) {
  OperatorCall result;
  for (Role role : kInputTensors) {
    const client::TensorView* tensor = TensorOf(call, role);
    if (tensor != nullptr) result.inputs[role] = SpecOf(*tensor);
  }
  if (!call.key_lengths.empty()) {
    result.inputs[Role::kKeyLengths] =
        TensorSpec{DType::kInt64, {static_cast<int64_t>(call.key_lengths.size())}};
  }
  CopyAttributes(call, result);
  result.layout = call.layout;
  result.alignment = call.alignment;
  result.softmax_in_fp64 = call.softmax_in_fp64;
  if (call.dropout) result.dropout = Dropout{call.dropout->probability, call.dropout->seed};
  if (call.score_output) result.score_output = *call.score_output;
  result.wants_lse = call.wants_lse;
  result.wants_present = call.wants_present;
  return result;
}

absl::StatusOr<OperatorCall> LibraryCall(const client::BackwardCall& call) {
  RAPT_RETURN_IF_ERROR(CheckGradients(call));
  OperatorCall result = LibraryCall(call.call);
  for (Role role : kBackwardInputs) {
    const client::TensorView* tensor = TensorOf(call, role);
    if (tensor != nullptr) result.inputs[role] = SpecOf(*tensor);
  }
  const client::WantedGradients wanted = GradientsWantedBy(call);
  RoleSet& gradients = result.gradients.emplace();
  for (Role role : kGradients) {
    const client::GradientField* const row = client::FindGradient(kNativeNames[role]);
    gradients.Add(role, std::find(wanted.begin(), wanted.end(), row) != wanted.end());
  }
  return result;
}

absl::Span<const int64_t> KeyLengthsOf(const client::AttendCall& call) { return call.key_lengths; }
absl::Span<const int64_t> KeyLengthsOf(const client::BackwardCall& call) {
  return call.call.key_lengths;
}

template <typename Call>
Arguments InputsOf(const Call& call, const ResolvedCall& resolved) {
  Arguments arguments;
  for (Role role : InputTensorsOf(resolved.problem)) {
    arguments.inputs[role] = resolved.Input(role, TensorOf(call, role)->data.data());
  }
  arguments.key_lengths = KeyLengthsOf(call);
  return arguments;
}

// --- Its outputs ---

void Set(Role output, client::Tensor tensor, client::AttendResult& result) {
  const client::CallOutput* row = client::FindCallOutput(kNativeNames[output]);
  RAPT_CHECK(row != nullptr, "the client has no such output");
  row->Set(result, std::move(tensor));
}

void Set(Role gradient, client::Tensor tensor, client::BackwardResult& result) {
  result.*client::FindGradient(kNativeNames[gradient])->member = std::move(tensor);
}

// --- The diagnosis ---

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

template <typename Call>
client::TensorReport ReportOf(const Call& call, const TensorSummary& summary) {
  const client::TensorView& tensor = *TensorOf(call, summary.role);  // in the caller's type
  const NumberSummary& numbers = summary.numbers;
  client::TensorReport report{summary.name,    tensor.dtype,     tensor.shape,
                              numbers.count(), RangeOf(numbers), std::nullopt};
  if (numbers.finite > 0) report.mean = numbers.sum / static_cast<double>(numbers.finite);
  return report;
}

template <typename Call>
client::Diagnosis ToDiagnosis(const Call& call, const DiagnosisReport& report) {
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
  diagnosis.masked_by_block_mask = report.hidden_by_block_mask;
  diagnosis.masked_by_selection = report.hidden_by_selection;
  diagnosis.weights = RangeOf(report.weights);
  diagnosis.row_sums = RangeOf(report.row_sums);
  diagnosis.empty_rows = report.empty_rows;
  for (const auto& [batch, head, query] : report.first_empty_rows) {
    diagnosis.first_empty_rows.push_back({batch, head, query});
  }
  diagnosis.output = RangeOf(report.output);
  for (const GradientSummary& gradient : report.gradients) {
    diagnosis.gradients.push_back(
        {gradient.name, RangeOf(gradient.numbers), gradient.norm, gradient.position_norms});
  }
  for (const BackendChoice& choice : report.backends) {
    diagnosis.backends.push_back(
        {choice.backend, choice.chosen, choice.plan, choice.workspace_bytes, choice.reason});
  }
  diagnosis.warnings = report.warnings;
  diagnosis.estimates = report.estimates;
  if (const EstimateFit& fit = report.estimate_fit; fit.rows > 0) {
    diagnosis.favor_squared_norm = fit.squared_norms / static_cast<double>(fit.rows);
    diagnosis.lsh_reachable_weight = fit.reachable_weights / static_cast<double>(fit.rows);
  }
  return diagnosis;
}

class LocalCaller : public AttentionCaller {
 public:
  LocalCaller() : pool_(ReadHostLimits().cores) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    return Compute<client::AttendResult>(call, LibraryCall(call));
  }

  absl::StatusOr<client::BackwardResult> AttendBackward(const client::BackwardCall& call) override {
    RAPT_ASSIGN_OR_RETURN(const OperatorCall backward, LibraryCall(call));
    return Compute<client::BackwardResult>(call, backward);
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall& call) override {
    return Explain(call, LibraryCall(call));
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::BackwardCall& call) override {
    RAPT_ASSIGN_OR_RETURN(const OperatorCall backward, LibraryCall(call));
    return Explain(call, backward);
  }

 private:
  template <typename Call>
  absl::StatusOr<client::Diagnosis> Explain(const Call& call, const OperatorCall& in_library) {
    RAPT_ASSIGN_OR_RETURN(const ResolvedCall resolved, Resolve(in_library, kNativeNames));
    RAPT_ASSIGN_OR_RETURN(const DiagnosisReport report,
                          rapt::Diagnose(resolved.problem, InputsOf(call, resolved),
                                         {.threads = pool_.workers()}, pool_, kNativeNames));
    return ToDiagnosis(call, report);
  }

  template <typename Result, typename Call>
  absl::StatusOr<Result> Compute(const Call& call, const OperatorCall& in_library) {
    RAPT_ASSIGN_OR_RETURN(const ResolvedCall resolved, Resolve(in_library, kNativeNames));
    RAPT_ASSIGN_OR_RETURN(OperatorResult computed,
                          RunHere(BoundCall(resolved), InputsOf(call, resolved), pool_));
    Result result;
    result.compute_time = computed.compute_time;
    for (Role role : OutputsOf(resolved.problem)) {
      Set(role, *std::move(computed.outputs[role]), result);
    }
    result.backend = std::move(computed.backend);
    result.plan = std::move(computed.plan);
    return result;
  }

  ThreadPool pool_;
};

}  // namespace

std::unique_ptr<AttentionCaller> NewLocalCaller() { return std::make_unique<LocalCaller>(); }

}  // namespace rapt
