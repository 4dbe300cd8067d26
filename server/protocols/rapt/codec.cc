#include "server/protocols/rapt/codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/field_names.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/clock.h"
#include "server/protocols/response_size.h"
#include "server/protocols/shared_tensors.h"

namespace rapt::native {
namespace {

using Message = v1::AttendRequest;

constexpr size_t kMaxRank = 4;

constexpr int kDataField = 3;  // of Tensor
constexpr int kCallField = 1;  // of DiagnoseRequest

constexpr wire::PayloadField kTensorFields[] = {{kDataField, nullptr}};
constexpr wire::MessageSchema kTensorSchema = {kTensorFields};

// The protocol's column in the table of roles: the tensors of AttendRequest, in its order.
struct InputColumn {
  Role role;
  int field;
  bool (Message::*has)() const;
  const v1::Tensor& (Message::*tensor)() const;
};

constexpr InputColumn kInputColumns[] = {
    {Role::kQ, Message::kQFieldNumber, &Message::has_q, &Message::q},
    {Role::kK, Message::kKFieldNumber, &Message::has_k, &Message::k},
    {Role::kV, Message::kVFieldNumber, &Message::has_v, &Message::v},
    {Role::kMask, Message::kMaskFieldNumber, &Message::has_mask, &Message::mask},
    {Role::kPastKey, Message::kPastKeyFieldNumber, &Message::has_past_key, &Message::past_key},
    {Role::kPastValue, Message::kPastValueFieldNumber, &Message::has_past_value,
     &Message::past_value},
    {Role::kBias, Message::kAttentionBiasFieldNumber, &Message::has_attention_bias,
     &Message::attention_bias},
    {Role::kHeadSink, Message::kHeadSinkFieldNumber, &Message::has_head_sink, &Message::head_sink},
};
static_assert(std::size(kInputColumns) == kInputTensors.size());

// Likewise the tensors of AttendResponse, and their destinations in OutputPlaces.
struct OutputColumn {
  Role role;
  int field;
  bool (v1::OutputPlaces::*has_place)() const;
  const v1::SharedMemory& (v1::OutputPlaces::*place)() const;

  // Returns null if the output goes into the response.
  const v1::SharedMemory* PlaceIn(const v1::OutputPlaces& places) const {
    return (places.*has_place)() ? &(places.*place)() : nullptr;
  }
};

using v1::AttendResponse;
constexpr OutputColumn kOutputColumns[] = {
    {Role::kY, AttendResponse::kYFieldNumber, &v1::OutputPlaces::has_y, &v1::OutputPlaces::y},
    {Role::kScores, AttendResponse::kScoresFieldNumber, &v1::OutputPlaces::has_scores,
     &v1::OutputPlaces::scores},
    {Role::kLse, AttendResponse::kLseFieldNumber, &v1::OutputPlaces::has_lse,
     &v1::OutputPlaces::lse},
    {Role::kPresentKey, AttendResponse::kPresentKeyFieldNumber, &v1::OutputPlaces::has_present_key,
     &v1::OutputPlaces::present_key},
    {Role::kPresentValue, AttendResponse::kPresentValueFieldNumber,
     &v1::OutputPlaces::has_present_value, &v1::OutputPlaces::present_value},
};
static_assert(std::size(kOutputColumns) == kOutputs.size());

const InputColumn& ColumnOf(Role role) {
  const auto* column = std::find_if(std::begin(kInputColumns), std::end(kInputColumns),
                                    [&](const InputColumn& c) { return c.role == role; });
  RAPT_CHECK(column != std::end(kInputColumns), "the message has no such tensor");
  return *column;
}

constexpr std::array kAttendFields = [] {
  std::array<wire::PayloadField, std::size(kInputColumns)> fields;
  for (size_t n = 0; n < fields.size(); ++n) fields[n] = {kInputColumns[n].field, &kTensorSchema};
  return fields;
}();
constexpr wire::MessageSchema kAttendSchema = {kAttendFields};
constexpr wire::PayloadField kDiagnoseFields[] = {{kCallField, &kAttendSchema}};
constexpr wire::MessageSchema kDiagnoseSchema = {kDiagnoseFields};

struct ElementType {
  v1::DataType code;
  int64_t bytes;
  std::optional<DType> dtype;  // none: integers, which the library reads as bool
};

constexpr ElementType kElementTypes[] = {
    {v1::FP32, 4, DType::kFloat32}, {v1::FP16, 2, DType::kFloat16}, {v1::BF16, 2, DType::kBFloat16},
    {v1::FP64, 8, DType::kFloat64}, {v1::BOOL, 1, DType::kBool},    {v1::INT8, 1, std::nullopt},
    {v1::UINT8, 1, std::nullopt},   {v1::INT32, 4, std::nullopt},   {v1::INT64, 8, std::nullopt},
};

const ElementType* FindElementType(v1::DataType code) {
  const auto type = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                 [&](const ElementType& t) { return t.code == code; });
  return type == std::end(kElementTypes) ? nullptr : type;
}

v1::DataType CodeOf(DType dtype) {
  const auto type = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                 [&](const ElementType& t) { return t.dtype == dtype; });
  RAPT_CHECK(type != std::end(kElementTypes), "rapt.v1 has no such type");
  return type->code;
}

absl::StatusOr<const ElementType*> ReadType(Role role, v1::DataType code) {
  const bool is_mask = role == Role::kMask;
  const ElementType* type = FindElementType(code);
  if (type != nullptr && (type->dtype || is_mask)) return type;
  return absl::InvalidArgumentError(absl::StrCat(
      kNativeNames[role], " has dtype ", NameOf(code), "; it must be FP32, FP16, BF16 or FP64",
      is_mask ? ", or BOOL, INT8, UINT8, INT32 or INT64 for a mask of 0 and 1" : ""));
}

absl::StatusOr<int64_t> CountBytes(absl::string_view name, const Shape& shape,
                                   const ElementType& type) {
  const absl::StatusOr<int64_t> count = ByteSize(name, {DType::kBool, shape});
  if (!count.ok()) return count.status();
  const std::optional<int64_t> bytes = CheckedMul(*count, type.bytes);
  if (bytes) return *bytes;
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", ToString(shape), "; its size overflows 64 bits"));
}

SharedReference ReferenceOf(const v1::SharedMemory& part) {
  return {part.region(), part.offset(), part.byte_size()};
}

// Points `data` to the tensor's bytes in shared memory.
absl::Status FindShared(absl::string_view name, const v1::SharedMemory& part, int64_t bytes,
                        SharedTensors& shared_tensors, InputBytes& data) {
  if (data.size > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has data although it is in shared memory"));
  }
  absl::StatusOr<InputBytes> found =
      shared_tensors.FindInput(std::string(name), ReferenceOf(part), bytes);
  if (!found.ok()) return found.status();
  data = *found;
  return absl::OkStatus();
}

// `data` is the tensor's data field; set to the bytes in shared memory if the tensor is there.
absl::StatusOr<TensorSpec> ReadTensor(Role role, const v1::Tensor& tensor,
                                      SharedTensors& shared_tensors, InputBytes& data) {
  const absl::string_view name = kNativeNames[role];
  const absl::StatusOr<const ElementType*> type = ReadType(role, tensor.dtype());
  if (!type.ok()) return type.status();
  // Checked before the shape is copied and printed: it may be as long as a message.
  if (static_cast<size_t>(tensor.shape_size()) > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has a shape of rank ", tensor.shape_size(), "; it must be at most 4"));
  }
  TensorSpec spec = {(*type)->dtype.value_or(DType::kBool),
                     Shape(tensor.shape().begin(), tensor.shape().end())};
  const absl::StatusOr<int64_t> bytes = CountBytes(name, spec.shape, **type);
  if (!bytes.ok()) return bytes.status();
  if (tensor.has_shared_memory()) {
    absl::Status status = FindShared(name, tensor.shared_memory(), *bytes, shared_tensors, data);
    if (!status.ok()) return status;
  }
  if (data.size != *bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", data.size, " bytes of data; its shape ", ToString(spec.shape),
                     " of ", NameOf(tensor.dtype()), " needs ", *bytes));
  }
  return spec;
}

absl::Status ReadTensors(const Message& message, SharedTensors& shared_tensors,
                         InputMap<InputBytes>& inputs, OperatorCall& call) {
  for (const InputColumn& column : kInputColumns) {
    if (!(message.*column.has)()) continue;
    absl::StatusOr<TensorSpec> spec =
        ReadTensor(column.role, (message.*column.tensor)(), shared_tensors, inputs[column.role]);
    if (!spec.ok()) return spec.status();
    call.inputs[column.role] = *std::move(spec);
  }
  if (message.key_lengths_size() > 0) {
    call.inputs[Role::kKeyLengths] = {DType::kInt64, {message.key_lengths_size()}};
  }
  return absl::OkStatus();
}

absl::Status ReadLayout(v1::Layout layout, Layout& out) {
  switch (layout) {
    case v1::LAYOUT_UNSPECIFIED:
      out = Layout::kByRank;
      return absl::OkStatus();
    case v1::BHSD:
      out = Layout::kBhsd;
      return absl::OkStatus();
    case v1::BSHD:
      out = Layout::kBshd;
      return absl::OkStatus();
    case v1::BSE:
      out = Layout::kBse;
      return absl::OkStatus();
    default:
      return UnknownValue("attention.layout", layout,
                          "LAYOUT_UNSPECIFIED (0), BHSD (1), BSHD (2) or BSE (3)");
  }
}

absl::Status ReadAlignment(v1::Alignment alignment, Alignment& out) {
  switch (alignment) {
    case v1::TOP_LEFT:
      out = Alignment::kTopLeft;
      return absl::OkStatus();
    case v1::BOTTOM_RIGHT:
      out = Alignment::kBottomRight;
      return absl::OkStatus();
    default:
      return UnknownValue("attention.alignment", alignment, "TOP_LEFT (0) or BOTTOM_RIGHT (1)");
  }
}

// The library's -1 stands for an absent side, so it must not be accepted as a size.
absl::Status ReadWindowSide(absl::string_view field, bool is_present, int64_t size, int64_t& out) {
  if (!is_present) return absl::OkStatus();
  if (size < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, " is ", size, "; it must be at least 0, or absent for no bound on that side"));
  }
  out = size;
  return absl::OkStatus();
}

std::optional<int64_t> UnlessZero(int64_t heads) {
  if (heads == 0) return std::nullopt;
  return heads;
}

// "[0, 2, 1]": the position of the element at `index`.
std::string PlaceOf(int64_t index, const v1::Tensor& tensor) {
  Shape place(tensor.shape_size());
  for (int axis = tensor.shape_size() - 1; axis >= 0; --axis) {
    place[axis] = index % tensor.shape(axis);
    index /= tensor.shape(axis);
  }
  return ToString(place);
}

// A mask of integers 0 and 1.
struct IntegerMask {
  InputBytes data;
  v1::Tensor fields;  // without data

  template <typename Int>
  absl::Status Convert(absl::Span<std::byte> bools) const {
    constexpr int64_t kBlock = 1024;
    Int values[kBlock];
    for (int64_t begin = 0; begin < static_cast<int64_t>(bools.size()); begin += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, bools.size() - begin);
      absl::Status status = data.Fetch(begin * sizeof(Int), count * sizeof(Int),
                                       reinterpret_cast<std::byte*>(values));
      if (!status.ok()) return status;
      for (int64_t n = 0; n < count; ++n) {
        if (values[n] != 0 && values[n] != 1) return NotABool(begin + n, values[n]);
        bools[begin + n] = static_cast<std::byte>(values[n]);
      }
    }
    return absl::OkStatus();
  }

  absl::Status NotABool(int64_t index, int64_t value) const {
    return absl::InvalidArgumentError(
        absl::StrCat(kNativeNames[Role::kMask], PlaceOf(index, fields), " is ", value, "; ",
                     NameOf(fields.dtype()), " masks hold only 0 (hidden) and 1 (visible)"));
  }

  absl::Status WriteTo(absl::Span<std::byte> bools) const {
    switch (fields.dtype()) {
      case v1::INT8:
        return Convert<int8_t>(bools);
      case v1::UINT8:
        return Convert<uint8_t>(bools);
      case v1::INT32:
        return Convert<int32_t>(bools);
      default:
        return Convert<int64_t>(bools);
    }
  }
};

// Arranges for a mask of integers to be converted to a boolean one.
void ConvertIntegerMask(const Message& message, Request& request) {
  const ElementType* type = FindElementType(message.mask().dtype());
  if (!message.has_mask() || type->dtype) return;
  InputBytes& mask = request.inputs[Role::kMask];
  request.write_mask = [integers = IntegerMask{mask, message.mask()}](absl::Span<std::byte> bools) {
    return integers.WriteTo(bools);
  };
  mask = InputBytes(nullptr, mask.size / type->bytes);
}

// A message without its tensors' data, and the location of the data.
struct Parts {
  std::string rest;
  InputMap<InputBytes> inputs;
};

absl::StatusOr<Parts> SplitMessage(const MessageBytes& bytes, const wire::MessageSchema& schema) {
  absl::StatusOr<wire::SplitMessage> split = wire::Split(bytes.bytes, bytes.size, schema);
  if (!split.ok()) return split.status();
  Parts parts;
  parts.rest = std::move(split->rest);
  for (const wire::Payload& payload : split->payloads) {
    const int field = payload.path[payload.path.size() - 2];
    const auto* column = std::find_if(std::begin(kInputColumns), std::end(kInputColumns),
                                      [&](const InputColumn& c) { return c.field == field; });
    parts.inputs[column->role] = bytes.Part(payload.begin, payload.size);  // the last one wins
  }
  return parts;
}

bool IsWanted(const OutputColumn& column, const Problem& problem) {
  return InfoOf(column.role).wanted(problem);
}

absl::Status PlaceOutputs(const Message& message, SharedTensors& shared_tensors, Request& request) {
  for (const OutputColumn& column : kOutputColumns) {
    const v1::SharedMemory* part = column.PlaceIn(message.places());
    if (part == nullptr || !IsWanted(column, request.call.problem)) continue;
    const absl::StatusOr<OutputPlace> place =
        shared_tensors.FindOutput(std::string(kNativeNames[column.role]), ReferenceOf(*part),
                                  request.call.outputs[column.role]);
    if (!place.ok()) return place.status();
    request.places[column.role] = *place;
  }
  return absl::OkStatus();
}

absl::StatusOr<DecodedCall> DecodeCall(Message fields, InputMap<InputBytes> inputs,
                                       const SharedMemory& shared_memory) {
  OperatorCall call;
  SharedTensors shared_tensors(shared_memory);
  absl::Status status = ReadTensors(fields, shared_tensors, inputs, call);
  if (status.ok()) status = ReadAttention(fields.attention(), call);
  if (status.ok()) status = ReadScoreOutput(fields.score_output(), call.score_output);
  if (!status.ok()) return status;
  call.wants_lse = fields.want_lse();
  call.wants_present = fields.want_present();
  absl::StatusOr<ResolvedCall> resolved = Resolve(call, kNativeNames);
  if (!resolved.ok()) return resolved.status();
  DecodedCall decoded;
  decoded.request.call = *std::move(resolved);
  decoded.request.inputs = inputs;
  decoded.request.key_lengths.assign(fields.key_lengths().begin(), fields.key_lengths().end());
  decoded.request.priority = fields.priority();
  ConvertIntegerMask(fields, decoded.request);
  status = PlaceOutputs(fields, shared_tensors, decoded.request);
  if (!status.ok()) return status;
  std::move(shared_tensors).TransferTo(decoded.request);
  decoded.fields = std::move(fields);
  return decoded;
}

}  // namespace

const wire::MessageSchema& AttendSchema() { return kAttendSchema; }
const wire::MessageSchema& DiagnoseSchema() { return kDiagnoseSchema; }

absl::StatusOr<DecodedCall> DecodeAttend(const MessageBytes& message,
                                         const SharedMemory& shared_memory) {
  absl::StatusOr<Parts> parts = SplitMessage(message, kAttendSchema);
  if (!parts.ok()) return parts.status();
  v1::AttendRequest fields;
  if (!fields.ParseFromString(parts->rest)) {
    return absl::InvalidArgumentError("not a rapt.v1.AttendRequest");
  }
  return DecodeCall(std::move(fields), parts->inputs, shared_memory);
}

absl::StatusOr<DecodedCall> DecodeDiagnose(const MessageBytes& message,
                                           const SharedMemory& shared_memory) {
  absl::StatusOr<Parts> parts = SplitMessage(message, kDiagnoseSchema);
  if (!parts.ok()) return parts.status();
  v1::DiagnoseRequest fields;
  if (!fields.ParseFromString(parts->rest)) {
    return absl::InvalidArgumentError("not a rapt.v1.DiagnoseRequest");
  }
  return DecodeCall(std::move(*fields.mutable_call()), parts->inputs, shared_memory);
}

absl::Status CheckAnswerSize(const DecodedCall& decoded) {
  const ResolvedCall& call = decoded.request.call;
  absl::InlinedVector<const TensorSpec*, 5> outputs;
  for (const OutputColumn& column : kOutputColumns) {
    if (!IsWanted(column, call.problem)) continue;
    if (column.PlaceIn(decoded.fields.places()) != nullptr) continue;
    outputs.push_back(&call.outputs[column.role]);
  }
  return CheckResponseSize(outputs);
}

AnswerMessage EncodeResult(const ResolvedCall& call, const v1::OutputPlaces& places,
                           const Result& result) {
  AnswerMessage answer;
  for (const OutputColumn& column : kOutputColumns) {
    if (!IsWanted(column, call.problem)) continue;
    const TensorSpec& spec = call.outputs[column.role];
    OutputBuffer payload = result.outputs[column.role];
    v1::Tensor fields;
    fields.set_dtype(CodeOf(spec.dtype));
    fields.mutable_shape()->Assign(spec.shape.begin(), spec.shape.end());
    if (const v1::SharedMemory* part = column.PlaceIn(places)) {
      *fields.mutable_shared_memory() = *part;
      fields.mutable_shared_memory()->set_byte_size(static_cast<int64_t>(payload.bytes.size()));
      payload = {};  // already written there
    }
    const auto payload_size = static_cast<int64_t>(payload.bytes.size());
    std::string tensor = fields.SerializeAsString();
    wire::AppendFieldHeader(kDataField, payload_size, tensor);
    std::string header;
    wire::AppendFieldHeader(column.field, static_cast<int64_t>(tensor.size()) + payload_size,
                            header);
    answer.Append(header + tensor);
    answer.Append(payload);
  }
  v1::AttendResponse fields;
  fields.set_backend(NamesOf(result.routing));
  fields.set_plan(result.plan);
  WriteTiming(result.queue_time, result.compute_time, *fields.mutable_timing());
  answer.Append(fields.SerializeAsString());
  return answer;
}

absl::Status ReadAttention(const v1::Attention& attention, OperatorCall& call) {
  absl::Status status = ReadLayout(attention.layout(), call.layout);
  if (status.ok()) status = ReadAlignment(attention.alignment(), call.alignment);
  const v1::Window& window = attention.window();
  if (status.ok()) {
    status = ReadWindowSide(kNativeNames[Attribute::kLeftWindow], window.has_left(), window.left(),
                            call.left_window_size);
  }
  if (status.ok()) {
    status = ReadWindowSide(kNativeNames[Attribute::kRightWindow], window.has_right(),
                            window.right(), call.right_window_size);
  }
  if (!status.ok()) return status;
  call.q_num_heads = UnlessZero(attention.query_heads());
  call.kv_num_heads = UnlessZero(attention.kv_heads());
  if (attention.has_scale()) call.scale = attention.scale();
  call.softcap = attention.softcap();
  call.is_causal = attention.causal();
  call.softmax_in_fp64 = attention.softmax_in_fp64();
  if (attention.has_dropout()) {
    call.dropout = {attention.dropout().probability(), attention.dropout().seed()};
  }
  return absl::OkStatus();
}

absl::Status ReadScoreOutput(v1::ScoreOutput output, std::optional<ScoreOutput>& out) {
  switch (output) {
    case v1::SCORE_OUTPUT_NONE:
      return absl::OkStatus();
    case v1::SCORES:
      out = ScoreOutput::kScores;
      return absl::OkStatus();
    case v1::SOFTCAPPED:
      out = ScoreOutput::kSoftcapped;
      return absl::OkStatus();
    case v1::BIASED:
      out = ScoreOutput::kBiased;
      return absl::OkStatus();
    case v1::WEIGHTS:
      out = ScoreOutput::kWeights;
      return absl::OkStatus();
    default:
      return UnknownValue(
          "score_output", output,
          "SCORE_OUTPUT_NONE (0), SCORES (1), SOFTCAPPED (2), BIASED (3) or WEIGHTS (4)");
  }
}

absl::Status UnknownValue(absl::string_view field, int value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be ", allowed));
}

std::string NameOf(v1::DataType code) {
  const std::string& name = v1::DataType_Name(code);
  return name.empty() ? absl::StrCat(static_cast<int>(code)) : name;
}

void WriteTiming(std::chrono::nanoseconds queue_time, std::chrono::nanoseconds compute_time,
                 v1::Timing& timing) {
  timing.set_queue_us(Microseconds(queue_time));
  timing.set_compute_us(Microseconds(compute_time));
}

const v1::Tensor& TensorOf(const Message& message, Role role) {
  return (message.*ColumnOf(role).tensor)();
}

std::optional<DType> ToDType(v1::DataType code) {
  const ElementType* type = FindElementType(code);
  return type == nullptr ? std::nullopt : type->dtype;
}

}  // namespace rapt::native
