#include "client/rapt/codec.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/rapt/byte_size.h"

namespace rapt::client {
namespace {

// --- Enumerations
// ---------------------------------------------------------------------------------

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::FP32;
    case DType::kFloat16:
      return v1::FP16;
    case DType::kBFloat16:
      return v1::BF16;
    case DType::kFloat64:
      return v1::FP64;
    case DType::kBool:
      return v1::BOOL;
    case DType::kInt8:
      return v1::INT8;
    case DType::kUint8:
      return v1::UINT8;
    case DType::kInt32:
      return v1::INT32;
    case DType::kInt64:
      return v1::INT64;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

std::optional<DType> FromProto(v1::DataType dtype) {
  switch (dtype) {
    case v1::FP32:
      return DType::kFloat32;
    case v1::FP16:
      return DType::kFloat16;
    case v1::BF16:
      return DType::kBFloat16;
    case v1::FP64:
      return DType::kFloat64;
    case v1::BOOL:
      return DType::kBool;
    case v1::INT8:
      return DType::kInt8;
    case v1::UINT8:
      return DType::kUint8;
    case v1::INT32:
      return DType::kInt32;
    case v1::INT64:
      return DType::kInt64;
    default:  // of a newer server
      return std::nullopt;
  }
}

v1::Layout ToProto(Layout layout) {
  switch (layout) {
    case Layout::kByRank:
      return v1::LAYOUT_UNSPECIFIED;
    case Layout::kBhsd:
      return v1::BHSD;
    case Layout::kBshd:
      return v1::BSHD;
    case Layout::kBse:
      return v1::BSE;
  }
  return v1::LAYOUT_UNSPECIFIED;
}

v1::ScoreOutput ToProto(ScoreOutput output) {
  switch (output) {
    case ScoreOutput::kScores:
      return v1::SCORES;
    case ScoreOutput::kSoftcapped:
      return v1::SOFTCAPPED;
    case ScoreOutput::kBiased:
      return v1::BIASED;
    case ScoreOutput::kWeights:
      return v1::WEIGHTS;
  }
  return v1::SCORE_OUTPUT_NONE;
}

// --- A call
// ---------------------------------------------------------------------------------------

struct NamedTensor {
  const char* name;
  const TensorView* view;  // null: absent
  v1::Tensor* (v1::AttendRequest::*field)();
};

std::vector<NamedTensor> TensorsOf(const AttendCall& call) {
  const auto optional = [](const std::optional<TensorView>& view) {
    return view ? &*view : nullptr;
  };
  return {{"q", &call.q, &v1::AttendRequest::mutable_q},
          {"k", &call.k, &v1::AttendRequest::mutable_k},
          {"v", &call.v, &v1::AttendRequest::mutable_v},
          {"mask", optional(call.mask), &v1::AttendRequest::mutable_mask},
          {"past_key", optional(call.past_key), &v1::AttendRequest::mutable_past_key},
          {"past_value", optional(call.past_value), &v1::AttendRequest::mutable_past_value}};
}

absl::Status CheckData(const char* name, const TensorView& view) {
  const std::optional<int64_t> bytes = ByteSize(view.dtype, view.shape);
  if (!bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has shape %s; its axes must not be negative and its bytes must fit 63 bits", name,
        ToString(view.shape)));
  }
  if (*bytes != static_cast<int64_t>(view.data.size())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has shape %s of %s, which is %d bytes, but its data has %d", name,
                        ToString(view.shape), NameOf(view.dtype), *bytes, view.data.size()));
  }
  return absl::OkStatus();
}

absl::Status TooLarge(uint64_t bytes, int64_t max_bytes) {
  return absl::ResourceExhaustedError(
      absl::StrFormat("the request takes %d bytes; max_message_bytes is %d", bytes, max_bytes));
}

// What does not fit is refused before anything is copied.
absl::Status CheckTensors(const std::vector<NamedTensor>& tensors, int64_t max_bytes) {
  uint64_t bytes = 0;  // of memory that exists: no overflow
  for (const NamedTensor& tensor : tensors) {
    if (tensor.view == nullptr) continue;
    if (absl::Status status = CheckData(tensor.name, *tensor.view); !status.ok()) return status;
    bytes += tensor.view->data.size();
  }
  return bytes <= static_cast<uint64_t>(max_bytes) ? absl::OkStatus() : TooLarge(bytes, max_bytes);
}

void Write(const TensorView& view, v1::Tensor& tensor) {
  tensor.set_dtype(ToProto(view.dtype));
  tensor.mutable_shape()->Add(view.shape.begin(), view.shape.end());
  tensor.set_data(view.data.data(), view.data.size());
}

void WriteAttention(const AttendCall& call, v1::Attention& attention) {
  attention.set_layout(ToProto(call.layout));
  attention.set_query_heads(call.query_heads);
  attention.set_kv_heads(call.kv_heads);
  if (call.scale) attention.set_scale(*call.scale);
  attention.set_softcap(call.softcap);
  attention.set_causal(call.causal);
  attention.set_alignment(call.alignment == Alignment::kTopLeft ? v1::TOP_LEFT : v1::BOTTOM_RIGHT);
  if (call.window.left) attention.mutable_window()->set_left(*call.window.left);
  if (call.window.right) attention.mutable_window()->set_right(*call.window.right);
  attention.set_softmax_in_fp64(call.softmax_in_fp64);
  if (call.dropout) {
    attention.mutable_dropout()->set_probability(call.dropout->probability);
    attention.mutable_dropout()->set_seed(call.dropout->seed);
  }
}

// --- Its result
// -----------------------------------------------------------------------------------

absl::Status UnknownType(const std::string& name, v1::DataType dtype) {
  return absl::InternalError(absl::StrFormat(
      "the server answered with %s of a type that this client does not know, number %d", name,
      static_cast<int>(dtype)));
}

absl::StatusOr<Tensor> Read(const char* name, v1::Tensor& tensor) {
  const std::optional<DType> dtype = FromProto(tensor.dtype());
  if (!dtype) return UnknownType(name, tensor.dtype());
  Shape shape(tensor.shape().begin(), tensor.shape().end());
  if (ByteSize(*dtype, shape) != static_cast<int64_t>(tensor.data().size())) {
    return absl::InternalError(
        absl::StrFormat("the server answered with %s of shape %s of %s in %d bytes", name,
                        ToString(shape), NameOf(*dtype), tensor.data().size()));
  }
  return Tensor(*dtype, std::move(shape), std::move(*tensor.mutable_data()));
}

struct Output {
  const char* name;
  bool wanted;
  v1::Tensor* message;  // null: did not come
  std::optional<Tensor>& field;
};

absl::Status Read(const Output& output) {
  if (!output.wanted) return absl::OkStatus();
  if (output.message == nullptr) {
    return absl::InternalError(absl::StrCat("the server answered without ", output.name));
  }
  absl::StatusOr<Tensor> tensor = Read(output.name, *output.message);
  if (!tensor.ok()) return tensor.status();
  output.field = *std::move(tensor);
  return absl::OkStatus();
}

// --- Reports
// --------------------------------------------------------------------------------------

template <typename Message>
Range ReadRange(const Message& message) {
  Range range;
  if (message.has_min()) range.min = message.min();
  if (message.has_max()) range.max = message.max();
  range.nan_count = message.nan_count();
  range.positive_inf_count = message.positive_inf_count();
  range.negative_inf_count = message.negative_inf_count();
  return range;
}

BackendInfo Read(const v1::BackendInfo& message) {
  BackendInfo info{message.name(), message.available(), message.reason(), {}};
  for (const v1::InstructionSetInfo& set : message.instruction_sets()) {
    info.instruction_sets.push_back({set.name(), set.available(), set.in_use()});
  }
  return info;
}

}  // namespace

absl::StatusOr<v1::AttendRequest> Encode(const AttendCall& call, int64_t max_bytes) {
  const std::vector<NamedTensor> tensors = TensorsOf(call);
  if (absl::Status status = CheckTensors(tensors, max_bytes); !status.ok()) return status;
  v1::AttendRequest request;
  for (const NamedTensor& tensor : tensors) {
    if (tensor.view != nullptr) Write(*tensor.view, *(request.*tensor.field)());
  }
  request.mutable_key_lengths()->Add(call.key_lengths.begin(), call.key_lengths.end());
  WriteAttention(call, *request.mutable_attention());
  if (call.score_output) request.set_score_output(ToProto(*call.score_output));
  request.set_want_lse(call.wants_lse);
  request.set_want_present(call.wants_present);
  if (const size_t bytes = request.ByteSizeLong(); bytes > static_cast<uint64_t>(max_bytes)) {
    return TooLarge(bytes, max_bytes);
  }
  return request;
}

v1::EstimateMemoryRequest Encode(const MemoryQuestion& question) {
  v1::EstimateMemoryRequest request;
  request.set_batch(question.batch);
  request.set_query_heads(question.query_heads);
  request.set_kv_heads(question.kv_heads);
  request.mutable_lengths()->Add(question.lengths.begin(), question.lengths.end());
  request.set_head_size(question.head_size);
  request.set_value_head_size(question.value_head_size);
  request.set_dtype(ToProto(question.dtype));
  return request;
}

absl::StatusOr<AttendResult> Decode(const v1::AttendRequest& request,
                                    v1::AttendResponse&& response) {
  if (!response.has_y()) return absl::InternalError("the server answered without y");
  absl::StatusOr<Tensor> y = Read("y", *response.mutable_y());
  if (!y.ok()) return y.status();
  AttendResult result;
  result.y = *std::move(y);
  const Output outputs[] = {
      {"scores", request.score_output() != v1::SCORE_OUTPUT_NONE,
       response.has_scores() ? response.mutable_scores() : nullptr, result.scores},
      {"lse", request.want_lse(), response.has_lse() ? response.mutable_lse() : nullptr,
       result.lse},
      {"present_key", request.want_present(),
       response.has_present_key() ? response.mutable_present_key() : nullptr, result.present_key},
      {"present_value", request.want_present(),
       response.has_present_value() ? response.mutable_present_value() : nullptr,
       result.present_value}};
  for (const Output& output : outputs) {
    if (absl::Status status = Read(output); !status.ok()) return status;
  }
  result.backend = response.backend();
  result.plan = response.plan();
  result.queue_time = std::chrono::microseconds(response.timing().queue_us());
  result.compute_time = std::chrono::microseconds(response.timing().compute_us());
  return result;
}

absl::StatusOr<Diagnosis> Decode(const v1::DiagnoseResponse& response) {
  Diagnosis diagnosis;
  diagnosis.problem = response.problem();
  for (const v1::TensorReport& input : response.inputs()) {
    const std::optional<DType> dtype = FromProto(input.dtype());
    if (!dtype) return UnknownType(input.name(), input.dtype());
    diagnosis.inputs.push_back({input.name(), *dtype,
                                Shape(input.shape().begin(), input.shape().end()), input.elements(),
                                ReadRange(input), std::nullopt});
    if (input.has_mean()) diagnosis.inputs.back().mean = input.mean();
  }
  diagnosis.raw_scores = ReadRange(response.raw_scores());
  diagnosis.scaled_scores = ReadRange(response.scaled_scores());
  diagnosis.biased_scores = ReadRange(response.biased_scores());
  diagnosis.pairs = response.pairs();
  diagnosis.masked_by_mask = response.masked_by_mask();
  diagnosis.masked_by_position = response.masked_by_position();
  diagnosis.weights = ReadRange(response.weights());
  diagnosis.row_sums = ReadRange(response.row_sums());
  diagnosis.empty_rows = response.empty_rows().count();
  for (const v1::EmptyRows::Row& row : response.empty_rows().first()) {
    diagnosis.first_empty_rows.push_back({row.batch(), row.head(), row.query()});
  }
  diagnosis.output = ReadRange(response.output());
  for (const v1::BackendChoice& choice : response.backends()) {
    diagnosis.backends.push_back({choice.backend(), choice.chosen(), choice.plan(),
                                  choice.workspace_bytes(), choice.reason()});
  }
  diagnosis.warnings.assign(response.warnings().begin(), response.warnings().end());
  return diagnosis;
}

MemoryEstimates Decode(const v1::EstimateMemoryResponse& response) {
  MemoryEstimates estimates;
  estimates.chunk = response.chunk();
  for (const v1::MemoryEstimate& estimate : response.estimates()) {
    estimates.estimates.push_back({estimate.length(), estimate.tensor_bytes(),
                                   estimate.standard_bytes(), estimate.chunked_bytes(),
                                   estimate.fused_bytes(), estimate.plan()});
  }
  return estimates;
}

ServerInfo Decode(const v1::GetServerInfoResponse& response) {
  ServerInfo info;
  info.version = response.version();
  for (const v1::BackendInfo& backend : response.backends()) info.backends.push_back(Read(backend));
  info.backend = response.backend();
  info.isa = response.isa();
  info.compute_threads = response.compute_threads();
  info.memory_budget_bytes = response.memory_budget_bytes();
  info.memory_reserved_bytes = response.memory_reserved_bytes();
  info.max_message_bytes = response.max_message_bytes();
  return info;
}

}  // namespace rapt::client
