#include "server/protocols/rapt/reports.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/layer/layer_estimate.h"
#include "attention/memory_estimate.h"
#include "base/invalid.h"
#include "base/range.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "server/protocols/rapt/codec.h"

namespace rapt::native {
namespace {

// Sufficient for tables; each length costs a plan.
constexpr int kMaxLengths = 1024;

template <typename Report>
void EncodeBounds(const NumberSummary& numbers, Report& report) {
  report.set_nan_count(numbers.nan);
  report.set_positive_inf_count(numbers.positive_inf);
  report.set_negative_inf_count(numbers.negative_inf);
  if (numbers.finite == 0) return;
  report.set_min(numbers.min);
  report.set_max(numbers.max);
}

void EncodeTensor(const v1::Tensor& sent, const TensorSummary& summary, v1::TensorReport& report) {
  report.set_name(summary.name);
  report.set_dtype(sent.dtype());
  *report.mutable_shape() = sent.shape();
  report.set_elements(summary.numbers.count());
  EncodeBounds(summary.numbers, report);
  if (summary.numbers.finite > 0) {
    report.set_mean(summary.numbers.sum / static_cast<double>(summary.numbers.finite));
  }
}

void EncodeEmptyRows(const DiagnosisReport& report, v1::EmptyRows& rows) {
  rows.set_count(report.empty_rows);
  for (const auto& [batch, head, query] : report.first_empty_rows) {
    v1::EmptyRows::Row& row = *rows.add_first();
    row.set_batch(batch);
    row.set_head(head);
    row.set_query(query);
  }
}

void EncodeChoice(const BackendChoice& choice, v1::BackendChoice& message) {
  message.set_backend(choice.backend);
  message.set_chosen(choice.chosen);
  message.set_plan(choice.plan);
  message.set_workspace_bytes(choice.workspace_bytes);
  message.set_reason(choice.reason);
}

int64_t OrDefault(int64_t size, int64_t value) { return size == 0 ? value : size; }

absl::StatusOr<DType> ReadType(const v1::EstimateMemoryRequest& request, DType unspecified) {
  const v1::DataType code = request.dtype();
  if (code == v1::DATA_TYPE_UNSPECIFIED) return unspecified;
  return ReadFloatType("dtype", code);
}

absl::StatusOr<MemoryQuestion> ReadQuestion(const v1::EstimateMemoryRequest& request) {
  RAPT_ASSIGN_OR_RETURN(const DType dtype, ReadType(request, DType::kFloat32));
  const int64_t heads = request.query_heads();
  // A layer's estimate has none.
  RAPT_RETURN_IF_ERROR(CheckRange("query_heads", heads, {1, kMaxAxis}));
  if (request.kv_heads() != 0 && heads % request.kv_heads() != 0) {
    return Invalid("query_heads is ", heads, ", kv_heads is ", request.kv_heads(),
                   "; query_heads must be a multiple of kv_heads");
  }
  const MemoryQuestion usual;
  return MemoryQuestion{
      .batch = request.batch(),
      .query_heads = heads,
      .kv_heads = request.kv_heads(),
      .lengths = {request.lengths().begin(), request.lengths().end()},
      .head_size = OrDefault(request.head_size(), usual.head_size),
      .value_head_size = request.value_head_size(),
      .dtype = dtype,
      .inputs = {.block_q = request.block_q(),
                 .block_k = request.block_k(),
                 .selected_indices = request.selected_indices(),
                 .alibi = request.alibi(),
                 .bias_table = request.bias_table(),
                 .relative_bias = request.relative_bias(),
                 .per_head = request.per_head()},
      .linear_time = {.lsh_hashes = OrDefault(request.lsh_hashes(), usual.linear_time.lsh_hashes),
                      .lsh_chunk_length =
                          OrDefault(request.lsh_chunk_length(), usual.linear_time.lsh_chunk_length),
                      .favor_features = request.favor_features()}};
}

void EncodeOperator(const OperatorEstimate& estimate, v1::OperatorEstimate& message) {
  message.set_workspace_bytes(estimate.workspace_bytes);
  message.set_state_bytes(estimate.state_bytes);
  message.set_plan(estimate.plan);
  message.set_refusal(estimate.refusal);
}

void EncodeEstimate(const MemoryEstimate& estimate, v1::MemoryEstimate& message) {
  message.set_length(estimate.length);
  message.set_tensor_bytes(estimate.tensor_bytes);
  message.set_fused_bytes(estimate.fused_bytes);
  message.set_plan(estimate.plan);
  if (estimate.layer) {
    message.mutable_layer()->set_weight_bytes(estimate.layer->weight_bytes);
    message.mutable_layer()->set_charged_bytes(estimate.layer->charged_bytes);
    return;
  }
  message.set_standard_bytes(estimate.standard_bytes);
  message.set_chunked_bytes(estimate.chunked_bytes);
  for (const InputEstimate& input : estimate.inputs) {
    v1::InputEstimate& input_message = *message.add_inputs();
    input_message.set_name(input.name);
    input_message.set_bytes(input.bytes);
    input_message.set_saved_bytes(input.saved_bytes);
  }
  EncodeOperator(estimate.lsh, *message.mutable_lsh());
  EncodeOperator(estimate.linear, *message.mutable_linear());
}

absl::Status CheckLengths(const v1::EstimateMemoryRequest& request) {
  const int count = request.lengths_size();
  if (count >= 1 && count <= kMaxLengths) return absl::OkStatus();
  return Invalid("lengths has ", count, " entries; it must have 1 to ", kMaxLengths);
}

// The fields of a layer's estimate.
absl::Status CheckLayerFields(const v1::EstimateMemoryRequest& request) {
  static const auto* const kAllowed =
      new std::set<std::string>{"batch", "lengths", "dtype", "model"};
  std::vector<const google::protobuf::FieldDescriptor*> given;
  v1::EstimateMemoryRequest::GetReflection()->ListFields(request, &given);
  for (const auto* field : given) {
    if (kAllowed->contains(field->name())) continue;
    return Invalid(field->name(),
                   " is set, and so is model; with it only batch, lengths and dtype may be");
  }
  return CheckLengths(request);
}

absl::Status EstimateLayers(const v1::EstimateMemoryRequest& request, const PlanOptions& options,
                            const ModelRepository* repository,
                            v1::EstimateMemoryResponse& response) {
  RAPT_RETURN_IF_ERROR(CheckLayerFields(request));
  const ModelInfoPtr model = repository == nullptr ? nullptr : repository->Find(request.model());
  if (model == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("model is '", request.model(), "'; the server has no layer of this name"));
  }
  RAPT_ASSIGN_OR_RETURN(const DType dtype, ReadType(request, model->layer->dtype()));
  for (const int64_t length : request.lengths()) {
    RAPT_ASSIGN_OR_RETURN(const MemoryEstimate estimate,
                          EstimateLayer(model->layer, dtype, request.batch(), length, options));
    EncodeEstimate(estimate, *response.add_estimates());
  }
  return absl::OkStatus();
}

void DescribeBackend(const Backend& backend, const PlanOptions& options, v1::BackendInfo& info) {
  const absl::Status available = backend.Available();
  info.set_name(std::string(backend.name()));
  info.set_available(available.ok());
  info.set_reason(std::string(available.message()));
  const std::string isa = available.ok() ? ChooseIsa(backend, options.isa) : "";
  for (const InstructionSet& set : backend.instruction_sets()) {
    v1::InstructionSetInfo& set_info = *info.add_instruction_sets();
    set_info.set_name(std::string(set.name));
    set_info.set_available(set.available);
    set_info.set_in_use(set.name == isa);
  }
}

}  // namespace

void EncodeDiagnosis(const v1::AttendRequest& call, const v1::AttendBackwardRequest& backward,
                     const DiagnosisReport& report, v1::DiagnoseResponse& response) {
  const auto sent = [&](Role role) -> const v1::Tensor& {
    const bool is_forward = std::find(kInputs.begin(), kInputs.end(), role) != kInputs.end();
    return is_forward ? TensorOf(call, role) : TensorOf(backward, role);
  };
  EncodeDiagnosis(report, sent, response);
}

void EncodeDiagnosis(const DiagnosisReport& report, absl::FunctionRef<const v1::Tensor&(Role)> sent,
                     v1::DiagnoseResponse& response) {
  response.set_problem(report.problem);
  for (const TensorSummary& input : report.inputs) {
    EncodeTensor(sent(input.role), input, *response.add_inputs());
  }
  EncodeBounds(report.raw_scores, *response.mutable_raw_scores());
  EncodeBounds(report.scaled_scores, *response.mutable_scaled_scores());
  EncodeBounds(report.biased_scores, *response.mutable_biased_scores());
  response.set_pairs(report.raw_scores.count());
  response.set_masked_by_mask(report.hidden_by_mask);
  response.set_masked_by_position(report.hidden_by_position);
  response.set_masked_by_block_mask(report.hidden_by_block_mask);
  response.set_masked_by_selection(report.hidden_by_selection);
  EncodeBounds(report.weights, *response.mutable_weights());
  EncodeBounds(report.row_sums, *response.mutable_row_sums());
  EncodeEmptyRows(report, *response.mutable_empty_rows());
  EncodeBounds(report.output, *response.mutable_output());
  for (const GradientSummary& gradient : report.gradients) {
    v1::GradientReport& message = *response.add_gradients();
    message.set_name(gradient.name);
    EncodeBounds(gradient.numbers, *message.mutable_range());
    message.set_norm(gradient.norm);
    message.mutable_position_norms()->Assign(gradient.position_norms.begin(),
                                             gradient.position_norms.end());
  }
  for (const BackendChoice& choice : report.backends) {
    EncodeChoice(choice, *response.add_backends());
  }
  for (const std::string& warning : report.warnings) response.add_warnings(warning);
  for (const std::string& estimate : report.estimates) response.add_estimates(estimate);
  const EstimateFit& fit = report.estimate_fit;
  if (fit.rows == 0) return;
  response.set_favor_squared_norm(fit.squared_norms / static_cast<double>(fit.rows));
  response.set_lsh_reachable_weight(fit.reachable_weights / static_cast<double>(fit.rows));
}

absl::Status EstimateMemory(const v1::EstimateMemoryRequest& request, const PlanOptions& options,
                            const ModelRepository* repository,
                            v1::EstimateMemoryResponse& response) {
  if (!request.model().empty()) return EstimateLayers(request, options, repository, response);
  RAPT_ASSIGN_OR_RETURN(const MemoryQuestion question, ReadQuestion(request));
  RAPT_RETURN_IF_ERROR(CheckLengths(request));
  for (const int64_t length : question.lengths) {
    const Problem problem = SelfAttention(question, length);
    RAPT_ASSIGN_OR_RETURN(const MemoryEstimate estimate,
                          rapt::EstimateMemory(problem, options, question.linear_time));
    EncodeEstimate(estimate, *response.add_estimates());
  }
  response.set_chunk(kEstimateChunk);
  return absl::OkStatus();
}

void DescribeServer(const PlanOptions& options, v1::GetServerInfoResponse& response) {
  response.set_version(std::string(Version()));
  for (const Backend* backend : *options.backends) {
    DescribeBackend(*backend, options, *response.add_backends());
  }
  response.set_backend(options.backend);
  response.set_isa(options.isa);
  response.set_compute_threads(options.threads);
}

}  // namespace rapt::native
