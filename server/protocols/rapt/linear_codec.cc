#include "server/protocols/rapt/linear_codec.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/inlined_vector.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/bounds.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/response_size.h"
#include "server/protocols/shared_tensors.h"

namespace rapt::native {
namespace {

using Message = v1::LinearAttendRequest;
using Response = v1::LinearAttendResponse;

struct InputField {
  int number;
  Role role;
  bool (Message::*has)() const;
  const v1::Tensor& (Message::*get)() const;
};
constexpr InputField kInputFields[] = {
    {Message::kQueryFieldNumber, Role::kQ, &Message::has_query, &Message::query},
    {Message::kKeyFieldNumber, Role::kK, &Message::has_key, &Message::key},
    {Message::kValueFieldNumber, Role::kV, &Message::has_value, &Message::value},
    {Message::kPastStateFieldNumber, linear::kPastState, &Message::has_past_state,
     &Message::past_state},
    {Message::kDecayFieldNumber, linear::kDecay, &Message::has_decay, &Message::decay},
    {Message::kBetaFieldNumber, linear::kBeta, &Message::has_beta, &Message::beta},
    {Message::kProjectionFieldNumber, linear::kProjection, &Message::has_projection,
     &Message::projection},
    {Message::kPastNormalizerFieldNumber, linear::kPastNormalizer, &Message::has_past_normalizer,
     &Message::past_normalizer},
};
constexpr std::pair<int, Role> kOutputFields[] = {
    {Response::kOutputFieldNumber, Role::kY},
    {Response::kPresentStateFieldNumber, linear::kPresentState},
    {Response::kPresentNormalizerFieldNumber, linear::kPresentNormalizer},
    {Response::kRelativeErrorFieldNumber, linear::kRelativeError},
};

const InputField& FieldAt(int number) {
  return *std::find_if(std::begin(kInputFields), std::end(kInputFields),
                       [&](const InputField& field) { return field.number == number; });
}

absl::Status ReadAttributes(const Message& fields, LinearAttentionCall& call) {
  RAPT_RETURN_IF_ERROR(ReadChoice("update_rule", fields.update_rule(), call.update_rule));
  RAPT_RETURN_IF_ERROR(ReadChoice("feature_map", fields.feature_map(), call.feature_map));
  if (fields.state_type() != v1::DATA_TYPE_UNSPECIFIED) {
    RAPT_ASSIGN_OR_RETURN(call.state_type, ReadFloatType("state_type", fields.state_type()));
  }
  call.q_num_heads = fields.q_num_heads();
  call.kv_num_heads = fields.kv_num_heads();
  call.scale = fields.scale();
  if (fields.chunk_size() != 0) call.chunk_size = fields.chunk_size();
  if (fields.has_is_causal()) call.is_causal = fields.is_causal();
  call.normalize = fields.normalize();
  if (fields.has_num_features()) call.num_features = fields.num_features();
  if (fields.has_seed()) call.seed = fields.seed();
  call.error_rows = fields.error_rows();
  call.wants_present_state = fields.want_present_state();
  call.wants_present_normalizer = fields.want_present_normalizer();
  return absl::OkStatus();
}

// Null `shared_tensors`: no tensor may be in shared memory.
absl::Status ReadTensors(const Message& fields, SharedTensors* shared_tensors,
                         LinearAttentionCall& call, Request& request) {
  for (const InputField& field : kInputFields) {
    if (!(fields.*field.has)()) continue;
    RAPT_ASSIGN_OR_RETURN(call.inputs[field.role],
                          ReadTensor(field.role, linear::NameOf(field.role), (fields.*field.get)(),
                                     shared_tensors, request.inputs[field.role]));
  }
  if (fields.nonpad_kv_seqlen().empty()) return absl::OkStatus();
  call.inputs[Role::kKeyLengths] = {DType::kInt64, {fields.nonpad_kv_seqlen_size()}};
  request.key_lengths.assign(fields.nonpad_kv_seqlen().begin(), fields.nonpad_kv_seqlen().end());
  return absl::OkStatus();
}

// A message whose payloads are the inputs of a request.
struct ParsedMessage {
  Message fields;  // without the tensors' data
  Request request;
};

absl::StatusOr<ParsedMessage> Parse(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split,
                        wire::Split(message.bytes, message.size, LinearSchema()));
  ParsedMessage parsed;
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, parsed.fields));
  parsed.request.model = Model::kLinearAttention;
  for (const wire::Payload& payload : split.payloads) {
    parsed.request.inputs[FieldAt(payload.path[0]).role] =
        message.Part(payload.begin, payload.size);
  }
  return parsed;
}

ResponseMessage Encode(const TensorOperator& op, RoleSet wanted, const Result& result) {
  ResponseMessage response;
  for (const auto& [number, role] : kOutputFields) {
    if (!wanted.contains(role)) continue;
    AppendTensor(number, *op.outputs()[role], /*place=*/nullptr, result.outputs[role], response);
  }
  response.Append(EndOf<Response>(result));
  response.KeepEncodingMemory(result.encoding_memory);
  return response;
}

RoleSet PresentOutputs(const LinearAttentionCall& call) {
  RoleSet roles;
  roles.Add(linear::kPresentState, call.wants_present_state);
  roles.Add(linear::kPresentNormalizer, call.wants_present_normalizer);
  return roles;
}

// --- Streams ---

// The fields of each message of a stream. Only the first message sets others.
constexpr int kFieldsOfEachMessage[] = {
    Message::kQueryFieldNumber,
    Message::kKeyFieldNumber,
    Message::kValueFieldNumber,
    Message::kDecayFieldNumber,
    Message::kBetaFieldNumber,
    Message::kNonpadKvSeqlenFieldNumber,
    Message::kWantPresentStateFieldNumber,
    Message::kWantPresentNormalizerFieldNumber,
};

absl::Status CheckLaterMessage(const Message& fields) {
  std::vector<const google::protobuf::FieldDescriptor*> set;
  Message::GetReflection()->ListFields(fields, &set);
  for (const google::protobuf::FieldDescriptor* field : set) {
    if (absl::c_linear_search(kFieldsOfEachMessage, field->number())) continue;
    return Invalid(field->name(),
                   " is set in a later message; only the first message of a stream sets it");
  }
  return absl::OkStatus();
}

}  // namespace

const wire::MessageSchema& LinearSchema() {
  static const auto* const kFields = [] {
    auto* fields = new std::vector<wire::PayloadField>;
    for (const InputField& field : kInputFields) fields->push_back({field.number, &TensorSchema()});
    return fields;
  }();
  static const wire::MessageSchema kSchema = {*kFields};
  return kSchema;
}

absl::StatusOr<Request> DecodeLinear(const MessageBytes& message,
                                     const SharedMemory& shared_memory) {
  RAPT_ASSIGN_OR_RETURN(ParsedMessage parsed, Parse(message));
  Request& request = parsed.request;
  request.priority = parsed.fields.priority();
  LinearAttentionCall call;
  SharedTensors shared_tensors(shared_memory);
  RAPT_RETURN_IF_ERROR(ReadAttributes(parsed.fields, call));
  RAPT_RETURN_IF_ERROR(ReadTensors(parsed.fields, &shared_tensors, call, request));
  RAPT_ASSIGN_OR_RETURN(auto op, MakeLinearAttention(call));
  request.SetOperator(std::move(op));
  RAPT_RETURN_IF_ERROR(CheckResponseSize(OutputsOf(*request.tensor_operator, request.Outputs())));
  std::move(shared_tensors).TransferTo(request);
  return std::move(request);
}

ResponseMessage EncodeLinear(const TensorOperator& op, const Result& result) {
  RoleSet all;
  for (const auto& [number, role] : kOutputFields) all.Add(role, op.outputs()[role].has_value());
  return Encode(op, all, result);
}

absl::StatusOr<Request> LinearStream::Decode(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(ParsedMessage parsed, Parse(message));
  const Message& fields = parsed.fields;
  Request& request = parsed.request;
  const bool is_first = operator_ == nullptr;
  absl::Status status = is_first ? ReadAttributes(fields, call_) : CheckLaterMessage(fields);
  if (is_first) priority_ = fields.priority();
  request.priority = priority_;
  LinearAttentionCall call = call_;
  if (status.ok()) status = ReadTensors(fields, /*shared_tensors=*/nullptr, call, request);
  if (!status.ok()) return status;
  if (is_first) {
    KeepProjection(call, request);
  } else {
    AddKept(call, request);
  }
  call.wants_present_state = fields.want_present_state();
  call.wants_present_normalizer = fields.want_present_normalizer();
  const RoleSet asked = PresentOutputs(call);
  call.wants_present_state = true;
  if (IsNormalized(call)) call.wants_present_normalizer = true;
  RAPT_ASSIGN_OR_RETURN(operator_, MakeLinearAttention(call));
  request.SetOperator(operator_);
  wanted_ = asked;
  for (Role role : {Role::kY, linear::kRelativeError}) {
    wanted_.Add(role, request.Outputs().contains(role));
  }
  RAPT_RETURN_IF_ERROR(CheckResponseSize(OutputsOf(*operator_, wanted_)));
  return std::move(request);
}

void LinearStream::KeepProjection(const LinearAttentionCall& call, Request& request) {
  call_.inputs[linear::kProjection] = call.inputs[linear::kProjection];
  InputBytes& bytes = request.inputs[linear::kProjection];
  if (!bytes.present()) return;
  projection_.resize(static_cast<size_t>(bytes.size));
  bytes.Copy(0, bytes.size, projection_.data());
}

// Adds the tensors of earlier messages.
void LinearStream::AddKept(LinearAttentionCall& call, Request& request) const {
  const auto add = [&](Role role, const std::optional<TensorSpec>& spec,
                       absl::Span<const std::byte> bytes) {
    if (!spec) return;
    call.inputs[role] = spec;
    request.inputs[role] = InputBytes(bytes.data(), static_cast<int64_t>(bytes.size()));
  };
  add(linear::kProjection, call_.inputs[linear::kProjection], projection_);
  add(linear::kPastState, operator_->outputs()[linear::kPresentState], state_.bytes);
  add(linear::kPastNormalizer, operator_->outputs()[linear::kPresentNormalizer], normalizer_.bytes);
}

ResponseMessage LinearStream::Encode(const Result& result) {
  state_ = result.outputs[linear::kPresentState];
  normalizer_ = result.outputs[linear::kPresentNormalizer];
  return native::Encode(*operator_, wanted_, result);
}

}  // namespace rapt::native
