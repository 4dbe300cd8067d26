#include "server/protocols/rapt/codec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "attention/attributes.h"
#include "attention/field_names.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/clock.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "server/protocols/bounds.h"
#include "server/protocols/integer_mask.h"
#include "server/protocols/response_size.h"
#include "server/protocols/shared_tensors.h"

namespace rapt::native {
namespace {

using Message = v1::AttendRequest;
using BackwardMessage = v1::AttendBackwardRequest;

constexpr int kDataField = 3;      // of Tensor
constexpr int kCallField = 1;      // of AttendBackwardRequest and DiagnoseRequest
constexpr int kBackwardField = 2;  // of DiagnoseRequest

constexpr wire::PayloadField kTensorFields[] = {{kDataField, nullptr}};
constexpr wire::MessageSchema kTensorSchema = {kTensorFields};

namespace pb = google::protobuf;
using Field = pb::FieldDescriptor;
using pb::Descriptor;

// The field of `message` that a row of the tables names. REQUIRES: it exists.
const Field* FieldIn(const Descriptor& message, absl::string_view name) {
  const Field* field = message.FindFieldByName(std::string(name));
  RAPT_CHECK(field != nullptr, "rapt.v1 lacks a field of the table of roles or attributes");
  return field;
}

// The protocol's columns of the tables: for a tensor, its field in the request or response of
// Attend or AttendBackward; for an attribute, the path of fields from Attention.
struct Columns {
  RoleMap<const Field*> tensors;
  OutputMap<const Field*> places;  // in OutputPlaces
  AttributeMap<absl::InlinedVector<const Field*, 2>> attributes;
  std::vector<wire::PayloadField> attend;
  wire::MessageSchema attend_schema;
  std::vector<wire::PayloadField> backward;
  wire::MessageSchema backward_schema;
  std::vector<wire::PayloadField> diagnose;
  wire::MessageSchema diagnose_schema;
};

const Columns& ColumnsOfTables() {
  static const Columns* const columns = [] {
    auto* c = new Columns;
    for (Role role : kInputTensors) {
      c->tensors[role] = FieldIn(*Message::descriptor(), kNativeNames[role]);
      c->attend.push_back({c->tensors[role]->number(), &kTensorSchema});
    }
    for (Role role : kOutputs) {
      c->tensors[role] = FieldIn(*v1::AttendResponse::descriptor(), kNativeNames[role]);
      c->places[role] = FieldIn(*v1::OutputPlaces::descriptor(), kNativeNames[role]);
    }
    c->backward.push_back({kCallField, &c->attend_schema});
    for (Role role : kBackwardInputs) {
      c->tensors[role] = FieldIn(*BackwardMessage::descriptor(), kNativeNames[role]);
      c->backward.push_back({c->tensors[role]->number(), &kTensorSchema});
    }
    for (Role role : kGradients) {
      c->tensors[role] = FieldIn(*v1::AttendBackwardResponse::descriptor(), kNativeNames[role]);
    }
    for (const AttributeInfo& info : Attributes()) {
      const Descriptor* message = v1::Attention::descriptor();
      for (auto name : absl::StrSplit(absl::StripPrefix(info.native, "attention."), '.')) {
        c->attributes[info.attribute].push_back(FieldIn(*message, name));
        message = c->attributes[info.attribute].back()->message_type();
      }
    }
    c->attend_schema = {c->attend};
    c->backward_schema = {c->backward};
    c->diagnose = {{kCallField, &c->attend_schema}, {kBackwardField, &c->backward_schema}};
    c->diagnose_schema = {c->diagnose};
    return c;
  }();
  return *columns;
}

// Returns the message in a field of `message`, or null if it is absent.
template <typename Part>
const Part* PartOf(const pb::Message& message, const Field* field) {
  const pb::Reflection& fields = *message.GetReflection();
  if (!fields.HasField(message, field)) return nullptr;
  return pb::DynamicCastToGenerated<Part>(&fields.GetMessage(message, field));
}

// Returns null if the output is sent in the response, as every gradient is.
const v1::SharedMemory* PlaceOf(const v1::OutputPlaces& places, Role output) {
  const Field* field = ColumnsOfTables().places[output];
  return field == nullptr ? nullptr : PartOf<v1::SharedMemory>(places, field);
}

absl::StatusOr<DType> ReadType(const TensorField& field, v1::DataType code) {
  const bool is_index = field.dtype == DType::kInt32;
  const std::optional<DType> type = ToDType(code);
  if (field.dtype == DType::kInt64) {
    if (type == DType::kInt64) return *type;
    return Invalid(field.name, " has dtype ", NameOf(code), "; it must be INT64");
  }
  const bool is_allowed_integer = field.is_mask || (is_index && type == DType::kInt32);
  if (type && (!IsInteger(*type) || is_allowed_integer)) return *type;
  return Invalid(
      field.name, " has dtype ", NameOf(code), "; it must be ",
      is_index ? "INT32" : "FP32, FP16, BF16 or FP64",
      field.is_mask ? ", or BOOL, INT8, UINT8, INT32 or INT64 for a mask of 0 and 1" : "");
}

absl::StatusOr<int64_t> CountBytes(absl::string_view name, const Shape& shape, DType type) {
  RAPT_ASSIGN_OR_RETURN(const int64_t count, ByteSize(name, {DType::kBool, shape}));
  const std::optional<int64_t> bytes = CheckedMul(count, SizeOf(type));
  if (bytes) return *bytes;
  return Invalid(name, " has shape ", ToString(shape), "; its size overflows 64 bits");
}

SharedReference ReferenceOf(const v1::SharedMemory& part) {
  return {part.region(), part.offset(), part.byte_size()};
}

// Points `data` to the tensor's bytes in shared memory.
absl::Status FindShared(absl::string_view name, const v1::SharedMemory& part, int64_t bytes,
                        SharedTensors& shared_tensors, InputBytes& data) {
  if (data.size > 0) {
    return Invalid(name, " has data although it is in shared memory");
  }
  RAPT_ASSIGN_OR_RETURN(data,
                        shared_tensors.FindInput(std::string(name), ReferenceOf(part), bytes));
  return absl::OkStatus();
}

absl::Status ReadTensors(const pb::Message& message, absl::Span<const Role> roles,
                         SharedTensors& shared_tensors, InputMap<InputBytes>& inputs,
                         OperatorCall& call) {
  for (Role role : roles) {
    const auto* tensor = PartOf<v1::Tensor>(message, ColumnsOfTables().tensors[role]);
    if (tensor == nullptr) continue;
    RAPT_ASSIGN_OR_RETURN(call.inputs[role], ReadTensor(TensorFieldOf(role, kNativeNames[role]),
                                                        *tensor, &shared_tensors, inputs[role]));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status ReadValue(const pb::Message& message, const Field* field, const AttributeInfo& info,
                       T& out) {
  const pb::Reflection& fields = *message.GetReflection();
  if constexpr (requires { out.emplace(); }) {
    return ReadValue(message, field, info, out.emplace());
  } else if constexpr (std::is_same_v<T, bool>) {
    out = fields.GetBool(message, field);
  } else if constexpr (std::is_same_v<T, double>) {
    out = fields.GetDouble(message, field);
  } else if constexpr (std::is_enum_v<T>) {
    const int value = fields.GetEnumValue(message, field);
    if (field->enum_type()->FindValueByNumber(value) == nullptr) {
      return UnknownValue(info.native, value, ChoicesOf(*field->enum_type()));
    }
    out = static_cast<T>(value);
  } else {
    out = fields.GetInt64(message, field);
    if (info.absent && out <= *info.absent) {
      return Invalid(info.native, " is ", out, "; it must be at least ", *info.absent + 1,
                     ", or absent");
    }
  }
  return absl::OkStatus();
}

// A field that is absent, or 0 without presence, keeps the default.
absl::Status ReadAttribute(const AttributeInfo& info, const v1::Attention& attention,
                           OperatorCall& call) {
  const pb::Message* message = &attention;
  for (const Field* field : ColumnsOfTables().attributes[info.attribute]) {
    const pb::Reflection& fields = *message->GetReflection();
    if (!fields.HasField(*message, field)) break;
    if (field->message_type() != nullptr) {
      message = &fields.GetMessage(*message, field);
      continue;
    }
    const auto read = [&](const auto& member) {
      if (member.call == nullptr) return absl::OkStatus();
      return ReadValue(*message, field, info, call.*member.call);
    };
    return std::visit(read, info.field);
  }
  return absl::OkStatus();
}

// A message without its tensors' data, and the location of the data.
struct Parts {
  std::string rest;
  InputMap<InputBytes> inputs;
};

// The input whose data is at `path` from `message`. REQUIRES: a schema of the message has the path.
Role RoleAt(absl::Span<const int> path, const Descriptor* message) {
  const absl::Span<const int> outer = path.subspan(0, path.size() - 2);
  for (int number : outer) message = message->FindFieldByNumber(number)->message_type();
  const Field* field = message->FindFieldByNumber(path[outer.size()]);
  return *std::find_if(kAllInputs.begin(), kAllInputs.end(),
                       [&](Role role) { return ColumnsOfTables().tensors[role] == field; });
}

absl::StatusOr<Parts> SplitMessage(const MessageBytes& bytes, const wire::MessageSchema& schema,
                                   const Descriptor* message) {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split, wire::Split(bytes.bytes, bytes.size, schema));
  Parts parts;
  parts.rest = std::move(split.rest);
  for (const wire::Payload& payload : split.payloads) {
    const Role role = RoleAt(payload.path, message);
    parts.inputs[role] = bytes.Part(payload.begin, payload.size);  // the last one wins
  }
  return parts;
}

absl::Status PlaceOutputs(const Message& message, SharedTensors& shared_tensors, Request& request) {
  for (Role role : OutputsOf(request.call.problem)) {
    const v1::SharedMemory* part = PlaceOf(message.places(), role);
    if (part == nullptr) continue;
    RAPT_ASSIGN_OR_RETURN(
        request.places[role],
        shared_tensors.FindOutput(std::string(kNativeNames[role]), ReferenceOf(*part),
                                  request.call.outputs[role]));
  }
  return absl::OkStatus();
}

// The gradients by name; without names those of Q, K and V.
absl::Status ReadGradients(const BackwardMessage& message, OperatorCall& call) {
  RoleSet& gradients = call.gradients.emplace();
  if (message.gradients().empty()) gradients = UsualGradients(call);
  for (const std::string& name : message.gradients()) {
    const auto gradient = std::find_if(kGradients.begin(), kGradients.end(),
                                       [&](Role role) { return kNativeNames[role] == name; });
    if (gradient == kGradients.end()) {
      return Invalid("gradients has '", name, "'; the gradients are ",
                     absl::StrJoin(kGradients, ", ", [](std::string* out, Role role) {
                       absl::StrAppend(out, kNativeNames[role]);
                     }));
    }
    gradients.Add(*gradient);
  }
  return absl::OkStatus();
}

absl::Status CheckNoOutputs(const Message& fields) {
  const std::pair<absl::string_view, bool> outputs[] = {
      {"score_output", fields.score_output() != v1::SCORE_OUTPUT_NONE},
      {"want_lse", fields.want_lse()},
      {"want_present", fields.want_present()},
      {"places", fields.has_places()}};
  for (const auto& [name, is_set] : outputs) {
    if (!is_set) continue;
    return Invalid(name, " is set; AttendBackward returns gradients alone, in its response");
  }
  return absl::OkStatus();
}

// What a backward pass has besides its call.
absl::Status ReadBackward(const BackwardMessage& message, const Message& fields,
                          SharedTensors& shared_tensors, InputMap<InputBytes>& inputs,
                          OperatorCall& call) {
  RAPT_RETURN_IF_ERROR(CheckNoOutputs(fields));
  RAPT_RETURN_IF_ERROR(ReadTensors(message, kBackwardInputs, shared_tensors, inputs, call));
  return ReadGradients(message, call);
}

void ReadIntegerMask(const v1::Tensor& mask, Request& request) {
  const std::optional<DType> type = ToDType(mask.dtype());
  if (!type || !IsInteger(*type)) return;
  ConvertIntegerMask(std::string(kNativeNames[Role::kMask]),
                     {*type, Shape(mask.shape().begin(), mask.shape().end())}, request);
}

// `backward` is null in the forward pass, and otherwise moved from.
absl::StatusOr<DecodedCall> DecodeCall(Message fields, InputMap<InputBytes> inputs,
                                       const SharedMemory& shared_memory,
                                       BackwardMessage* backward = nullptr) {
  OperatorCall call;
  SharedTensors shared_tensors(shared_memory);
  RAPT_RETURN_IF_ERROR(ReadTensors(fields, kInputTensors, shared_tensors, inputs, call));
  RAPT_RETURN_IF_ERROR(ReadAttention(fields.attention(), call));
  RAPT_RETURN_IF_ERROR(ReadScoreOutput(fields.score_output(), call.score_output));
  if (backward != nullptr) {
    RAPT_RETURN_IF_ERROR(ReadBackward(*backward, fields, shared_tensors, inputs, call));
  }
  if (fields.key_lengths_size() > 0) {
    call.inputs[Role::kKeyLengths] = {DType::kInt64, {fields.key_lengths_size()}};
  }
  call.wants_lse = fields.want_lse();
  call.wants_present = fields.want_present();
  RAPT_ASSIGN_OR_RETURN(ResolvedCall resolved, Resolve(call, kNativeNames));
  DecodedCall decoded;
  if (backward != nullptr) {
    decoded.request.model = Model::kAttentionBackward;
    decoded.backward = std::move(*backward);
  }
  decoded.request.call = std::move(resolved);
  decoded.request.inputs = inputs;
  decoded.request.key_lengths.assign(fields.key_lengths().begin(), fields.key_lengths().end());
  decoded.request.priority = fields.priority();
  ReadIntegerMask(fields.mask(), decoded.request);
  RAPT_RETURN_IF_ERROR(PlaceOutputs(fields, shared_tensors, decoded.request));
  std::move(shared_tensors).TransferTo(decoded.request);
  decoded.fields = std::move(fields);
  return decoded;
}

}  // namespace

const wire::MessageSchema& TensorDataSchema() { return kTensorSchema; }
const wire::MessageSchema& AttendSchema() { return ColumnsOfTables().attend_schema; }
const wire::MessageSchema& BackwardSchema() { return ColumnsOfTables().backward_schema; }
const wire::MessageSchema& DiagnoseSchema() { return ColumnsOfTables().diagnose_schema; }

absl::StatusOr<DecodedCall> DecodeAttend(const MessageBytes& message,
                                         const SharedMemory& shared_memory) {
  RAPT_ASSIGN_OR_RETURN(Parts parts, SplitMessage(message, AttendSchema(), Message::descriptor()));
  v1::AttendRequest fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(parts.rest, fields));
  return DecodeCall(std::move(fields), parts.inputs, shared_memory);
}

absl::StatusOr<DecodedCall> DecodeBackward(const MessageBytes& message,
                                           const SharedMemory& shared_memory) {
  RAPT_ASSIGN_OR_RETURN(Parts parts,
                        SplitMessage(message, BackwardSchema(), BackwardMessage::descriptor()));
  BackwardMessage fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(parts.rest, fields));
  return DecodeCall(std::move(*fields.mutable_call()), parts.inputs, shared_memory, &fields);
}

absl::StatusOr<DecodedCall> DecodeDiagnose(const MessageBytes& message,
                                           const SharedMemory& shared_memory) {
  RAPT_ASSIGN_OR_RETURN(Parts parts,
                        SplitMessage(message, DiagnoseSchema(), v1::DiagnoseRequest::descriptor()));
  v1::DiagnoseRequest fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(parts.rest, fields));
  if (!fields.has_backward()) {
    return DecodeCall(std::move(*fields.mutable_call()), parts.inputs, shared_memory);
  }
  if (fields.has_call()) {
    return Invalid("call and backward are both set; backward has the call of the forward pass");
  }
  BackwardMessage& backward = *fields.mutable_backward();
  return DecodeCall(std::move(*backward.mutable_call()), parts.inputs, shared_memory, &backward);
}

absl::InlinedVector<const TensorSpec*, 5> OutputsInResponse(const DecodedCall& decoded) {
  const ResolvedCall& call = decoded.request.call;
  absl::InlinedVector<const TensorSpec*, 5> outputs;
  for (Role role : OutputsOf(call.problem)) {
    if (PlaceOf(decoded.fields.places(), role) != nullptr) continue;
    outputs.push_back(&call.outputs[role]);
  }
  return outputs;
}

ResponseMessage EncodeResult(const ResolvedCall& call, const v1::OutputPlaces& places,
                             const Result& result) {
  ResponseMessage response;
  for (Role role : OutputsOf(call.problem)) {
    AppendTensor(ColumnsOfTables().tensors[role]->number(), call.outputs[role],
                 PlaceOf(places, role), result.outputs[role], response);
  }
  response.Append(EndOf(call.problem.backward ? kEndFields<v1::AttendBackwardResponse>
                                              : kEndFields<v1::AttendResponse>,
                        result));
  response.KeepEncodingMemory(result.encoding_memory);
  return response;
}

void AppendTensor(int field, const TensorSpec& spec, const v1::SharedMemory* place,
                  OutputBuffer payload, ResponseMessage& response) {
  v1::Tensor fields;
  fields.set_dtype(CodeOf(spec.dtype));
  fields.mutable_shape()->Assign(spec.shape.begin(), spec.shape.end());
  if (place != nullptr) {
    *fields.mutable_shared_memory() = *place;
    fields.mutable_shared_memory()->set_byte_size(static_cast<int64_t>(payload.bytes.size()));
    payload = {};  // already written there
  }
  const auto payload_size = static_cast<int64_t>(payload.bytes.size());
  std::string tensor = fields.SerializeAsString();
  wire::AppendFieldHeader(kDataField, payload_size, tensor);
  std::string header;
  wire::AppendFieldHeader(field, static_cast<int64_t>(tensor.size()) + payload_size, header);
  response.Append(header + tensor);
  response.Append(payload);
}

TensorField TensorFieldOf(Role role, absl::string_view name) {
  return {.name = name, .dtype = InfoOf(role).usual_dtype, .is_mask = role == Role::kMask};
}

absl::StatusOr<TensorSpec> ReadTensor(const TensorField& field, const v1::Tensor& tensor,
                                      SharedTensors* shared_tensors, InputBytes& data) {
  const absl::string_view name = field.name;
  RAPT_ASSIGN_OR_RETURN(const DType type, ReadType(field, tensor.dtype()));
  // Checked before the shape is copied and printed: it may be as long as a message.
  if (static_cast<size_t>(tensor.shape_size()) > field.max_rank) {
    return Invalid(name, " has a shape of rank ", tensor.shape_size(), "; it must be at most ",
                   field.max_rank);
  }
  const bool is_converted = field.is_mask && IsInteger(type);
  TensorSpec spec = {is_converted ? DType::kBool : type,
                     Shape(tensor.shape().begin(), tensor.shape().end())};
  RAPT_ASSIGN_OR_RETURN(const int64_t bytes, CountBytes(name, spec.shape, type));
  if (tensor.has_shared_memory()) {
    if (shared_tensors == nullptr) {
      return Invalid(name, " is in shared memory; it must be in the message");
    }
    RAPT_RETURN_IF_ERROR(FindShared(name, tensor.shared_memory(), bytes, *shared_tensors, data));
  }
  if (data.size != bytes) {
    return Invalid(name, " has ", data.size, " bytes of data; its shape ", ToString(spec.shape),
                   " of ", NameOf(tensor.dtype()), " needs ", bytes);
  }
  return spec;
}

absl::Status ReadAttention(const v1::Attention& attention, OperatorCall& call) {
  RAPT_RETURN_IF_ERROR(ReadChoice("attention.layout", attention.layout(), call.layout));
  RAPT_RETURN_IF_ERROR(ReadChoice("attention.alignment", attention.alignment(), call.alignment));
  for (const AttributeInfo& info : Attributes()) {
    RAPT_RETURN_IF_ERROR(ReadAttribute(info, attention, call));
  }
  call.softmax_in_fp64 = attention.softmax_in_fp64();
  if (attention.has_dropout()) {
    call.dropout = {attention.dropout().probability(), attention.dropout().seed()};
  }
  return absl::OkStatus();
}

absl::Status ReadScoreOutput(v1::ScoreOutput output, std::optional<ScoreOutput>& out) {
  if (output == v1::SCORE_OUTPUT_NONE) return absl::OkStatus();
  return ReadChoice("score_output", output, out.emplace(), v1::SCORES);
}

std::string ChoicesOf(const pb::EnumDescriptor& type) {
  std::string text;
  for (int n = 0; n < type.value_count(); ++n) {
    const char* separator = n == 0 ? "" : n + 1 == type.value_count() ? " or " : ", ";
    absl::StrAppend(&text, separator, type.value(n)->name(), " (", type.value(n)->number(), ")");
  }
  return text;
}

absl::Status UnknownValue(absl::string_view field, int value, absl::string_view allowed) {
  return Invalid(field, " is ", value, "; it must be ", allowed);
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

std::string EndOf(const EndFields& fields, const Result& result) {
  v1::Timing timing;
  WriteTiming(result.queue_time, result.compute_time, timing);
  std::string end;
  const auto append = [&end](int field, const std::string& bytes) {
    wire::AppendFieldHeader(field, static_cast<int64_t>(bytes.size()), end);
    end += bytes;
  };
  append(fields.backend, NamesOf(result.routing));
  append(fields.plan, result.plan);
  append(fields.timing, timing.SerializeAsString());
  return end;
}

const v1::Tensor& TensorOf(const pb::Message& message, Role role) {
  return *PartOf<v1::Tensor>(message, ColumnsOfTables().tensors[role]);
}

v1::DataType CodeOf(DType dtype) {
  return static_cast<v1::DataType>(v1::FP32 + static_cast<int>(dtype));
}

std::optional<DType> ToDType(v1::DataType code) {
  if (code < v1::FP32 || !v1::DataType_IsValid(code)) return std::nullopt;
  return static_cast<DType>(code - v1::FP32);
}

absl::StatusOr<DType> ReadFloatType(absl::string_view field, v1::DataType code) {
  const std::optional<DType> dtype = ToDType(code);
  if (dtype && IsFloat(*dtype)) return *dtype;
  return Invalid(field, " is ", NameOf(code), "; it must be FP32, FP16, BF16 or FP64");
}

}  // namespace rapt::native
