#include "client/cpp/codec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/status_macros.h"
#include "base/wire_format.h"
#include "client/cpp/byte_size.h"
#include "client/cpp/call_fields.h"

namespace rapt::client {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::Message;
using Field = google::protobuf::FieldDescriptor;

// --- Enumerations --------------------------------------------------------------------------------

// Enumerations have the protocol's order, where those without a value for "unset" begin at 1;
// tests/client/cpp/codec_test.cc compares them.
template <typename Code>
constexpr Code CodeOf(auto value, int first = 0) {
  return static_cast<Code>(static_cast<int>(value) + first);
}

// --- Request -------------------------------------------------------------------------------------

// The field of `message` that a row of the tables names. REQUIRES: it exists.
const Field* FieldIn(const Descriptor& message, absl::string_view name) {
  const Field* field = message.FindFieldByName(std::string(name));
  RAPT_CHECK(field != nullptr, "rapt.v1 lacks a field of the tables in call_fields.cc");
  return field;
}

int NumberOf(const CallTensor& tensor) {
  return FieldIn(*v1::AttendRequest::descriptor(), tensor.name)->number();
}

int NumberOf(const BackwardTensor& tensor) {
  return FieldIn(*v1::AttendBackwardRequest::descriptor(), tensor.name)->number();
}

// Appends the tensor of a row of the tables, if `call` has it.
template <typename Row, typename Call>
absl::Status Append(const Row& tensor, const Call& call, RequestMessage& message) {
  const TensorView* const given = tensor.In(call);
  if (given == nullptr) return absl::OkStatus();
  return AppendTensor(tensor.name, NumberOf(tensor), *given, message);
}

// Returns the size of Y, or nullopt if the shapes are inconsistent.
std::optional<int64_t> BytesOfY(const AttendCall& call) {
  const Shape& q = call.q.shape;
  Shape v = call.v.shape;
  if (call.v_head_size) {
    v = call.k.shape;
    const bool is_3d = v.size() == 3;
    const std::optional<int64_t> size =
        is_3d ? CheckedMul(*call.v_head_size, std::max<int64_t>(call.kv_heads, 1))
              : call.v_head_size;
    if (v.empty() || !size || *size < 0) return std::nullopt;
    v.back() = *size;
  }
  if (q.size() != v.size() || q.size() < 3 || q.size() > 4) return std::nullopt;
  const bool has_heads = q.size() == 3 && call.query_heads > 0 && call.kv_heads > 0;
  std::optional<int64_t> bytes = SizeOf(call.q.dtype);
  for (size_t axis = 0; axis + 1 < q.size() && bytes; ++axis) bytes = CheckedMul(*bytes, q[axis]);
  if (bytes) bytes = CheckedMul(*bytes, has_heads ? v.back() / call.kv_heads : v.back());
  return bytes && has_heads ? CheckedMul(*bytes, call.query_heads) : bytes;
}

constexpr int64_t kSharedAlignment = 64;

std::optional<int64_t> AddAligned(int64_t offset, int64_t bytes) {
  const std::optional<int64_t> sum = CheckedAdd(offset, bytes);
  if (!sum) return std::nullopt;
  const std::optional<int64_t> end = CheckedAdd(*sum, kSharedAlignment - 1);
  if (!end) return std::nullopt;
  return *end / kSharedAlignment * kSharedAlignment;
}

void SetPart(const std::string& region, int64_t offset, int64_t bytes, v1::SharedMemory& part) {
  part.set_region(region);
  part.set_offset(offset);
  part.set_byte_size(bytes);
}

// Copies the tensor into the region at `offset` and appends the reference to it.
void AppendShared(const CallTensor& tensor, const TensorView& view, const SharedRegion& region,
                  int64_t offset, RequestMessage& message) {
  v1::Tensor fields;
  Describe(view, fields);
  if (!view.data.empty()) {
    std::memcpy(region.bytes().data() + offset, view.data.data(), view.data.size());
    SetPart(region.name(), offset, static_cast<int64_t>(view.data.size()),
            *fields.mutable_shared_memory());
  }
  const std::string bytes = fields.SerializeAsString();
  std::string header;
  wire::AppendFieldHeader(NumberOf(tensor), static_cast<int64_t>(bytes.size()), header);
  message.Append(header + bytes);
}

template <typename T>
void Set(Message& message, const Field* field, const T& value) {
  const google::protobuf::Reflection& fields = *message.GetReflection();
  if constexpr (std::is_same_v<T, bool>) {
    fields.SetBool(&message, field, value);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    fields.SetInt64(&message, field, value);
  } else if constexpr (std::is_enum_v<T>) {
    fields.SetEnumValue(&message, field, static_cast<int>(value));
  } else {
    fields.SetDouble(&message, field, value);
  }
}

// Sets the field that the attribute names.
void Write(const CallAttribute& attribute, const AttendCall& call, v1::AttendRequest& request) {
  attribute.Visit(call, [&](const auto& value) {
    if (value == std::decay_t<decltype(value)>{}) return;
    Message* message = &request;
    for (absl::string_view name : absl::StrSplit(attribute.name, '.')) {
      const Field* field = FieldIn(*message->GetDescriptor(), name);
      if (field->message_type() != nullptr) {
        message = message->GetReflection()->MutableMessage(message, field);
      } else if constexpr (requires { *value; }) {
        Set(*message, field, *value);
      } else {
        Set(*message, field, value);
      }
    }
  });
}

void WriteAttention(const AttendCall& call, v1::AttendRequest& request) {
  for (const CallAttribute& attribute : CallAttributes()) Write(attribute, call, request);
  v1::Attention& attention = *request.mutable_attention();
  attention.set_layout(CodeOf<v1::Layout>(call.layout));
  attention.set_alignment(CodeOf<v1::Alignment>(call.alignment));
  attention.set_softmax_in_fp64(call.softmax_in_fp64);
  if (call.dropout) {
    attention.mutable_dropout()->set_probability(call.dropout->probability);
    attention.mutable_dropout()->set_seed(call.dropout->seed);
  }
}

// --- Response ------------------------------------------------------------------------------------

constexpr wire::PayloadField kTensorFields[] = {{v1::Tensor::kDataFieldNumber, nullptr}};
constexpr wire::MessageSchema kTensorSchema = {kTensorFields};

template <typename Row>
std::vector<wire::PayloadField> PayloadsOf(const Descriptor& message, absl::Span<const Row> rows) {
  std::vector<wire::PayloadField> fields;
  for (const Row& row : rows)
    fields.push_back({FieldIn(message, row.name)->number(), &kTensorSchema});
  return fields;
}

const wire::MessageSchema& SchemaOf(const v1::AttendResponse& /*response*/) {
  static const auto* const fields = new std::vector<wire::PayloadField>(
      PayloadsOf(*v1::AttendResponse::descriptor(), CallOutputs()));
  static const wire::MessageSchema schema = {*fields};
  return schema;
}

const wire::MessageSchema& SchemaOf(const v1::AttendBackwardResponse& /*response*/) {
  static const auto* const fields = new std::vector<wire::PayloadField>(
      PayloadsOf(*v1::AttendBackwardResponse::descriptor(), Gradients()));
  static const wire::MessageSchema schema = {*fields};
  return schema;
}

// A response whose tensor data is still in the received buffers.
template <typename Response>
struct ReceivedResponse {
  SlicedBytes bytes;
  wire::Payloads payloads;
  Response fields;                     // without that data
  absl::Span<const std::byte> region;  // may contain outputs instead

  // Returns the data of the tensor in `field`, the last one if there are several. Null if empty.
  const wire::Payload* DataOf(int field) const {
    const auto data = std::find_if(payloads.rbegin(), payloads.rend(),
                                   [field](const auto& p) { return p.path.front() == field; });
    return data == payloads.rend() ? nullptr : &*data;
  }

  // Returns the tensor in `field` without its data. Null if absent.
  const v1::Tensor* TensorIn(const Field* field) const {
    const google::protobuf::Reflection& reflection = *Response::GetReflection();
    if (!reflection.HasField(fields, field)) return nullptr;
    return google::protobuf::DynamicCastToGenerated<v1::Tensor>(
        &reflection.GetMessage(fields, field));
  }
};

bool IsWithin(const v1::SharedMemory& part, absl::Span<const std::byte> region) {
  const auto size = static_cast<int64_t>(region.size());
  return part.offset() >= 0 && part.byte_size() >= 0 && part.offset() <= size &&
         part.byte_size() <= size - part.offset();
}

// Copies the tensor in the field `name`. Allocates no more memory than was received.
template <typename Response>
absl::StatusOr<Tensor> Read(const ReceivedResponse<Response>& response, const char* name) {
  const Field* field = FieldIn(*Response::descriptor(), name);
  const v1::Tensor* message = response.TensorIn(field);
  if (message == nullptr) return MalformedResponse(absl::StrCat("no ", name));
  RAPT_ASSIGN_OR_RETURN(const DType dtype, FromProto(name, message->dtype()));
  Shape shape(message->shape().begin(), message->shape().end());
  const v1::SharedMemory& part = message->shared_memory();
  const wire::Payload* data = response.DataOf(field->number());
  const bool is_shared = message->has_shared_memory() && (data == nullptr || data->size == 0);
  const int64_t bytes = is_shared ? part.byte_size() : data == nullptr ? 0 : data->size;
  if (is_shared && !IsWithin(part, response.region)) {
    return MalformedResponse(absl::StrCat(name, " is outside the shared memory"));
  }
  RAPT_RETURN_IF_ERROR(CheckReceived(name, dtype, shape, bytes));
  const auto buffer = std::make_shared<AlignedBuffer>(bytes);
  if (is_shared) {
    std::memcpy(buffer->data(), response.region.data() + part.offset(), static_cast<size_t>(bytes));
  } else if (bytes > 0) {
    response.bytes.Copy(data->begin, bytes, buffer->data());
  }
  return Tensor(dtype, std::move(shape), buffer, buffer->span());
}

template <typename Response>
absl::StatusOr<ReceivedResponse<Response>> SplitResponse(const SlicedBytes& bytes, int64_t size,
                                                         absl::Span<const std::byte> region) {
  absl::StatusOr<wire::SplitMessage> split =
      wire::Split(bytes, size, SchemaOf(Response::default_instance()));
  if (!split.ok()) return MalformedResponse(split.status().message());
  ReceivedResponse<Response> response{bytes, std::move(split->payloads), {}, region};
  if (!response.fields.ParseFromString(split->rest))
    return MalformedResponse("its fields cannot be parsed");
  return response;
}

// --- Reports -------------------------------------------------------------------------------------

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

OperatorEstimate Read(const v1::OperatorEstimate& message) {
  return {message.workspace_bytes(), message.state_bytes(), message.plan(), message.refusal()};
}

MemoryEstimate Read(const v1::MemoryEstimate& message) {
  MemoryEstimate estimate{.length = message.length(),
                          .tensor_bytes = message.tensor_bytes(),
                          .standard_bytes = message.standard_bytes(),
                          .chunked_bytes = message.chunked_bytes(),
                          .fused_bytes = message.fused_bytes(),
                          .plan = message.plan()};
  for (const v1::InputEstimate& input : message.inputs()) {
    estimate.inputs.push_back({input.name(), input.bytes(), input.saved_bytes()});
  }
  estimate.lsh = Read(message.lsh());
  estimate.linear = Read(message.linear());
  if (message.has_layer()) {
    estimate.layer = {message.layer().weight_bytes(), message.layer().charged_bytes()};
  }
  return estimate;
}

BackendInfo Read(const v1::BackendInfo& message) {
  BackendInfo info{message.name(), message.available(), message.reason(), {}};
  for (const v1::InstructionSetInfo& set : message.instruction_sets()) {
    info.instruction_sets.push_back({set.name(), set.available(), set.in_use()});
  }
  return info;
}

AdmissionLimits Read(const v1::AdmissionLimits& limits) {
  using Milliseconds = std::chrono::milliseconds;
  return {.max_open_calls = limits.max_open_calls(),
          .max_calls_per_caller = limits.max_calls_per_caller(),
          .max_compute_bytes = limits.max_compute_bytes(),
          .max_queued_requests = limits.max_queued_requests(),
          .max_queue_delay = Milliseconds(limits.max_queue_delay_ms()),
          .min_receive_bytes_per_second = limits.min_receive_bytes_per_second(),
          .default_deadline = Milliseconds(limits.default_deadline_ms()),
          .max_deadline = Milliseconds(limits.max_deadline_ms())};
}

CacheLimits Read(const v1::CacheLimits& limits) {
  using Milliseconds = std::chrono::milliseconds;
  return {.max_bytes = limits.max_bytes(),
          .max_bytes_per_caller = limits.max_bytes_per_caller(),
          .max_caches_per_caller = limits.max_caches_per_caller(),
          .default_lease = Milliseconds(limits.default_lease_ms()),
          .max_lease = Milliseconds(limits.max_lease_ms())};
}

}  // namespace

absl::StatusOr<DType> FromProto(absl::string_view name, v1::DataType dtype) {
  if (dtype < v1::FP32 || dtype > v1::INT64) {
    return MalformedResponse(
        absl::StrFormat("%s has the unknown data type %d", name, static_cast<int>(dtype)));
  }
  return static_cast<DType>(dtype - v1::FP32);
}

absl::Status CheckSize(int64_t bytes, int64_t max_bytes) {
  if (bytes <= max_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrFormat("the request takes %d bytes; max_message_bytes is %d", bytes, max_bytes));
}

absl::Status AppendTensor(absl::string_view name, int number, const TensorView& view,
                          RequestMessage& message) {
  RAPT_RETURN_IF_ERROR(CheckData(name, view));
  v1::Tensor fields;
  Describe(view, fields);
  std::string bytes = fields.SerializeAsString();
  const auto data_bytes = static_cast<int64_t>(view.data.size());
  if (data_bytes > 0) wire::AppendFieldHeader(v1::Tensor::kDataFieldNumber, data_bytes, bytes);
  std::string header;
  wire::AppendFieldHeader(number, static_cast<int64_t>(bytes.size()) + data_bytes, header);
  message.Append(header + bytes);
  message.AppendPayload(view.data);
  return absl::OkStatus();
}

absl::Status CheckData(absl::string_view name, const TensorView& view) {
  const std::optional<int64_t> bytes = ByteSize(view.dtype, view.shape);
  if (!bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has shape %s; its axes must not be negative and its size must fit into 63 bits", name,
        ToString(view.shape)));
  }
  if (*bytes != static_cast<int64_t>(view.data.size())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has shape %s of %s, which is %d bytes, but its data has %d", name,
                        ToString(view.shape), NameOf(view.dtype), *bytes, view.data.size()));
  }
  return absl::OkStatus();
}

void Describe(const TensorView& view, v1::Tensor& tensor) {
  tensor.set_dtype(ToProto(view.dtype));
  tensor.mutable_shape()->Add(view.shape.begin(), view.shape.end());
}

absl::Status MalformedResponse(absl::string_view why) {
  return absl::InternalError(absl::StrCat("malformed response from server: ", why));
}

absl::Status CheckReceived(absl::string_view name, DType dtype, const Shape& shape, int64_t bytes) {
  if (ByteSize(dtype, shape) == bytes) return absl::OkStatus();
  return MalformedResponse(absl::StrFormat("%s of shape %s of %s in %d bytes", name,
                                           ToString(shape), NameOf(dtype), bytes));
}

absl::StatusOr<Tensor> TakeTensor(absl::string_view name, v1::Tensor& message) {
  RAPT_ASSIGN_OR_RETURN(const DType dtype, FromProto(name, message.dtype()));
  Shape shape(message.shape().begin(), message.shape().end());
  const auto bytes = static_cast<int64_t>(message.data().size());
  RAPT_RETURN_IF_ERROR(CheckReceived(name, dtype, shape, bytes));
  return Tensor(dtype, std::move(shape), std::move(*message.mutable_data()));
}

v1::DataType ToProto(DType dtype) { return CodeOf<v1::DataType>(dtype, 1); }

v1::AttendRequest WithoutTensors(const AttendCall& call) {
  v1::AttendRequest rest;
  rest.mutable_key_lengths()->Add(call.key_lengths.begin(), call.key_lengths.end());
  WriteAttention(call, rest);
  if (call.score_output) rest.set_score_output(CodeOf<v1::ScoreOutput>(*call.score_output, 1));
  rest.set_want_lse(call.wants_lse);
  rest.set_want_present(call.wants_present);
  rest.set_priority(call.priority);
  return rest;
}

std::optional<int64_t> BytesInRegion(const AttendCall& call) {
  std::optional<int64_t> end = 0;
  for (const CallTensor& tensor : CallTensors()) {
    const TensorView* view = tensor.In(call);
    if (view == nullptr) continue;
    if (!CheckData(tensor.name, *view).ok()) return std::nullopt;
    if (end) end = AddAligned(*end, static_cast<int64_t>(view->data.size()));
  }
  const std::optional<int64_t> y_bytes = BytesOfY(call);
  if (!end || !y_bytes) return std::nullopt;
  return AddAligned(*end, *y_bytes);
}

RequestMessage EncodeAttendIn(const SharedRegion& region, const AttendCall& call) {
  RequestMessage message;
  int64_t offset = 0;
  for (const CallTensor& tensor : CallTensors()) {
    const TensorView* view = tensor.In(call);
    if (view == nullptr) continue;
    AppendShared(tensor, *view, region, offset, message);
    offset = *AddAligned(offset, static_cast<int64_t>(view->data.size()));
  }
  v1::AttendRequest rest = WithoutTensors(call);
  SetPart(region.name(), offset, *BytesOfY(call), *rest.mutable_places()->mutable_y());
  message.Append(rest.SerializeAsString());
  return message;
}

absl::StatusOr<RequestMessage> EncodeAttend(const AttendCall& call, int64_t max_bytes) {
  RequestMessage message;
  for (const CallTensor& tensor : CallTensors()) {
    RAPT_RETURN_IF_ERROR(Append(tensor, call, message));
  }
  message.Append(WithoutTensors(call).SerializeAsString());
  RAPT_RETURN_IF_ERROR(CheckSize(message.size(), max_bytes));
  return message;
}

absl::StatusOr<RequestMessage> EncodeBackward(const BackwardCall& call, int64_t max_bytes) {
  RAPT_RETURN_IF_ERROR(CheckGradients(call));
  RAPT_ASSIGN_OR_RETURN(RequestMessage message, EncodeAttend(call.call, max_bytes));
  std::string header;
  wire::AppendFieldHeader(v1::AttendBackwardRequest::kCallFieldNumber, message.size(), header);
  message.Prepend(header);
  for (const BackwardTensor& tensor : BackwardTensors()) {
    RAPT_RETURN_IF_ERROR(Append(tensor, call, message));
  }
  v1::AttendBackwardRequest rest;
  rest.mutable_gradients()->Add(call.gradients.begin(), call.gradients.end());
  message.Append(rest.SerializeAsString());
  RAPT_RETURN_IF_ERROR(CheckSize(message.size(), max_bytes));
  return message;
}

namespace {

// A DiagnoseRequest with `message` in one field.
absl::StatusOr<RequestMessage> DiagnoseWith(int field, absl::StatusOr<RequestMessage> message,
                                            int64_t max_bytes) {
  if (!message.ok()) return message;
  std::string header;
  wire::AppendFieldHeader(field, message->size(), header);
  message->Prepend(header);
  RAPT_RETURN_IF_ERROR(CheckSize(message->size(), max_bytes));
  return message;
}

}  // namespace

absl::StatusOr<RequestMessage> EncodeDiagnose(const AttendCall& call, int64_t max_bytes) {
  return DiagnoseWith(v1::DiagnoseRequest::kCallFieldNumber, EncodeAttend(call, max_bytes),
                      max_bytes);
}

absl::StatusOr<RequestMessage> EncodeDiagnose(const BackwardCall& call, int64_t max_bytes) {
  return DiagnoseWith(v1::DiagnoseRequest::kBackwardFieldNumber, EncodeBackward(call, max_bytes),
                      max_bytes);
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
  const CompactInputs& inputs = question.inputs;
  request.set_block_q(inputs.block_q);
  request.set_block_k(inputs.block_k);
  request.set_selected_indices(inputs.selected_indices);
  request.set_alibi(inputs.alibi);
  request.set_bias_table(inputs.bias_table);
  request.set_relative_bias(inputs.relative_bias);
  request.set_per_head(inputs.per_head);
  request.set_lsh_hashes(question.linear_time.lsh_hashes);
  request.set_lsh_chunk_length(question.linear_time.lsh_chunk_length);
  request.set_favor_features(question.linear_time.favor_features);
  return request;
}

v1::EstimateMemoryRequest Encode(const LayerMemoryQuestion& question) {
  v1::EstimateMemoryRequest request;
  request.set_model(question.model);
  request.set_batch(question.batch);
  request.mutable_lengths()->Add(question.lengths.begin(), question.lengths.end());
  if (question.dtype) request.set_dtype(ToProto(*question.dtype));
  return request;
}

WantedOutputs WantedBy(const AttendCall& call) {
  WantedOutputs wanted;
  for (const CallOutput& output : CallOutputs()) {
    if (output.wanted(call)) wanted.push_back(&output);
  }
  return wanted;
}

absl::StatusOr<AttendResult> DecodeAttend(const WantedOutputs& wanted, const SlicedBytes& bytes,
                                          int64_t size, absl::Span<const std::byte> region) {
  RAPT_ASSIGN_OR_RETURN(const auto response,
                        SplitResponse<v1::AttendResponse>(bytes, size, region));
  AttendResult result;
  for (const CallOutput* output : wanted) {
    RAPT_ASSIGN_OR_RETURN(Tensor tensor, Read(response, output->name));
    output->Set(result, std::move(tensor));
  }
  ReadPlan(response.fields, result);
  return result;
}

absl::StatusOr<BackwardResult> DecodeBackward(const WantedGradients& wanted,
                                              const SlicedBytes& bytes, int64_t size) {
  RAPT_ASSIGN_OR_RETURN(const auto response,
                        SplitResponse<v1::AttendBackwardResponse>(bytes, size, {}));
  BackwardResult result;
  for (const GradientField* gradient : wanted) {
    RAPT_ASSIGN_OR_RETURN(result.*gradient->member, Read(response, gradient->name));
  }
  ReadPlan(response.fields, result);
  return result;
}

absl::StatusOr<Diagnosis> Decode(const v1::DiagnoseResponse& response) {
  Diagnosis diagnosis;
  diagnosis.problem = response.problem();
  for (const v1::TensorReport& input : response.inputs()) {
    RAPT_ASSIGN_OR_RETURN(const DType dtype, FromProto(input.name(), input.dtype()));
    diagnosis.inputs.push_back({input.name(), dtype,
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
  diagnosis.masked_by_block_mask = response.masked_by_block_mask();
  diagnosis.masked_by_selection = response.masked_by_selection();
  diagnosis.weights = ReadRange(response.weights());
  diagnosis.row_sums = ReadRange(response.row_sums());
  diagnosis.empty_rows = response.empty_rows().count();
  for (const v1::EmptyRows::Row& row : response.empty_rows().first()) {
    diagnosis.first_empty_rows.push_back({row.batch(), row.head(), row.query()});
  }
  diagnosis.output = ReadRange(response.output());
  for (const v1::GradientReport& gradient : response.gradients()) {
    diagnosis.gradients.push_back(
        {gradient.name(),
         ReadRange(gradient.range()),
         gradient.norm(),
         {gradient.position_norms().begin(), gradient.position_norms().end()}});
  }
  for (const v1::BackendChoice& choice : response.backends()) {
    diagnosis.backends.push_back({choice.backend(), choice.chosen(), choice.plan(),
                                  choice.workspace_bytes(), choice.reason()});
  }
  diagnosis.warnings.assign(response.warnings().begin(), response.warnings().end());
  diagnosis.estimates.assign(response.estimates().begin(), response.estimates().end());
  if (response.has_favor_squared_norm()) {
    diagnosis.favor_squared_norm = response.favor_squared_norm();
  }
  if (response.has_lsh_reachable_weight()) {
    diagnosis.lsh_reachable_weight = response.lsh_reachable_weight();
  }
  return diagnosis;
}

MemoryEstimates Decode(const v1::EstimateMemoryResponse& response) {
  MemoryEstimates estimates;
  estimates.chunk = response.chunk();
  for (const v1::MemoryEstimate& estimate : response.estimates()) {
    estimates.estimates.push_back(Read(estimate));
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
  info.admission = Read(response.admission());
  if (response.has_caches()) info.caches = Read(response.caches());
  return info;
}

}  // namespace rapt::client
