#include "server/protocols/rapt/linear_stream.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "attention/operator_schema.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/rapt/operator_codec.h"
#include "server/protocols/response_size.h"

namespace rapt::native {
namespace {

using Message = v1::LinearAttendRequest;

const OperatorCodec& Codec() {
  static const OperatorCodec& codec = CodecOf("LinearAttend");
  return codec;
}

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

absl::StatusOr<Request> LinearStream::Decode(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(OperatorCodec::Parsed parsed, Codec().Parse(message));
  const auto& fields = static_cast<const Message&>(*parsed.fields);
  Request& request = parsed.request;
  const bool is_first = operator_ == nullptr;
  const std::unique_ptr<SchemaCall> read = Codec().schema().new_call();
  LinearAttentionCall& call = static_cast<TypedCall<LinearAttentionCall>&>(*read).call;
  if (is_first) {
    RAPT_RETURN_IF_ERROR(Codec().ReadAttributes(fields, *read));
    call_ = call;
    priority_ = fields.priority();
  } else {
    RAPT_RETURN_IF_ERROR(CheckLaterMessage(fields));
    call = call_;
  }
  request.priority = priority_;
  RAPT_RETURN_IF_ERROR(Codec().ReadTensors(fields, /*shared_tensors=*/nullptr, *read, request));
  if (is_first) {
    KeepProjection(call, request);
  } else {
    AddKept(call, request);
  }
  wanted_ = Codec().ReadWants(fields, *read);
  call.wants_present_state = true;
  if (IsNormalized(call)) call.wants_present_normalizer = true;
  RAPT_ASSIGN_OR_RETURN(const BoundCall bound, read->Bind());
  operator_ = bound.tensor_operator();
  request.SetOperator(operator_);
  for (Slot slot : {Slot(Role::kY), linear::kRelativeError}) {
    wanted_.Add(slot, request.Outputs().contains(slot));
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
  const auto add = [&](Slot slot, const std::optional<TensorSpec>& spec,
                       absl::Span<const std::byte> bytes) {
    if (!spec) return;
    call.inputs[slot] = spec;
    request.inputs[slot] = InputBytes(bytes.data(), static_cast<int64_t>(bytes.size()));
  };
  add(linear::kProjection, call_.inputs[linear::kProjection], projection_);
  add(linear::kPastState, operator_->outputs()[linear::kPresentState], state_.bytes);
  add(linear::kPastNormalizer, operator_->outputs()[linear::kPresentNormalizer], normalizer_.bytes);
}

ResponseMessage LinearStream::Encode(const Result& result) {
  state_ = result.outputs[linear::kPresentState];
  normalizer_ = result.outputs[linear::kPresentNormalizer];
  return Codec().Encode(*operator_, wanted_, result);
}

}  // namespace rapt::native
