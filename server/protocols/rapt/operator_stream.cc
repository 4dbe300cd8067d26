#include "server/protocols/rapt/operator_stream.h"

#include <optional>

#include "absl/types/span.h"
#include "base/status_macros.h"
#include "server/protocols/response_size.h"

namespace rapt::native {

absl::StatusOr<Request> OperatorStream::Decode(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(OperatorCodec::Parsed parsed, codec_->Parse(message));
  const google::protobuf::Message& fields = *parsed.fields;
  Request& request = parsed.request;
  const bool is_first = operator_ == nullptr;
  if (is_first) {
    RAPT_RETURN_IF_ERROR(codec_->ReadAttributes(fields, *call_));
    priority_ = codec_->PriorityOf(fields);
  } else {
    RAPT_RETURN_IF_ERROR(codec_->CheckLaterMessage(fields));
  }
  request.priority = priority_;
  call_->inputs() = {};
  RAPT_RETURN_IF_ERROR(codec_->ReadTensors(fields, /*shared_tensors=*/nullptr, *call_, request));
  if (is_first) {
    Keep(request);
  } else {
    AddKept(request);
  }
  wanted_ = codec_->ReadWants(fields, *call_);
  codec_->schema().want_state(*call_);
  RAPT_ASSIGN_OR_RETURN(const BoundCall bound, call_->Bind());
  operator_ = bound.tensor_operator();
  request.SetOperator(operator_);
  for (const TensorSchema& output : codec_->schema().outputs) {
    wanted_.Add(output.slot,
                output.want == nullptr && operator_->outputs()[output.slot].has_value());
  }
  RAPT_RETURN_IF_ERROR(CheckResponseSize(OutputsOf(*operator_, wanted_)));
  return std::move(request);
}

// Copies the inputs that later messages do not have. The state is kept as outputs.
void OperatorStream::Keep(const Request& request) {
  SlotSet state;
  for (const TensorSchema& output : codec_->schema().outputs) {
    if (output.next_input) state.Add(*output.next_input);
  }
  for (const TensorSchema& input : codec_->schema().inputs) {
    const InputBytes& bytes = request.inputs[input.slot];
    if (input.per_token || state.contains(input.slot) || !bytes.present()) continue;
    Kept kept{input.slot, *call_->inputs()[input.slot], std::vector<std::byte>(bytes.size)};
    bytes.Copy(0, bytes.size, kept.bytes.data());
    kept_.push_back(std::move(kept));
  }
}

// Adds the tensors of earlier messages.
void OperatorStream::AddKept(Request& request) const {
  const auto add = [&](Slot slot, const TensorSpec& spec, absl::Span<const std::byte> bytes) {
    call_->inputs()[slot] = spec;
    request.inputs[slot] = InputBytes(bytes.data(), static_cast<int64_t>(bytes.size()));
  };
  for (const Kept& kept : kept_) add(kept.slot, kept.spec, kept.bytes);
  for (const auto& [output, buffer] : state_) {
    add(*output->next_input, *operator_->outputs()[output->slot], buffer.bytes);
  }
}

ResponseMessage OperatorStream::Encode(const Result& result) {
  state_.clear();
  for (const TensorSchema& output : codec_->schema().outputs) {
    if (!output.next_input || !operator_->outputs()[output.slot]) continue;
    state_.emplace_back(&output, result.outputs[output.slot]);
  }
  return codec_->Encode(*operator_, wanted_, result);
}

int64_t OperatorStream::kept_bytes() const {
  int64_t bytes = 0;
  for (const Kept& kept : kept_) bytes += static_cast<int64_t>(kept.bytes.size());
  return bytes;
}

}  // namespace rapt::native
