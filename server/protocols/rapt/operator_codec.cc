#include "server/protocols/rapt/operator_codec.h"

#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/bounds.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/response_size.h"

namespace rapt::native {
namespace {

namespace pb = google::protobuf;

// Of positional_encoding.
constexpr size_t kMaxRank = 8;

absl::StatusOr<AttributeValue> ReadValue(const pb::Message& fields,
                                         const pb::FieldDescriptor* field,
                                         const AttributeValue& kind) {
  const pb::Reflection& get = *fields.GetReflection();
  const auto read = [&](auto type) -> absl::StatusOr<AttributeValue> {
    using Type = decltype(type);
    if constexpr (std::is_same_v<Type, bool>) {
      return get.GetBool(fields, field);
    } else if constexpr (std::is_same_v<Type, int64_t>) {
      return get.GetInt64(fields, field);
    } else if constexpr (std::is_same_v<Type, uint64_t>) {
      return get.GetUInt64(fields, field);
    } else if constexpr (std::is_same_v<Type, double>) {
      return get.GetDouble(fields, field);
    } else if constexpr (std::is_same_v<Type, DType>) {
      return ReadFloatType(field->name(),
                           static_cast<v1::DataType>(get.GetEnumValue(fields, field)));
    } else {
      const int value = get.GetEnumValue(fields, field);
      if (field->enum_type()->FindValueByNumber(value) != nullptr) {
        return static_cast<uint8_t>(value);
      }
      return UnknownValue(field->name(), value, ChoicesOf(*field->enum_type()));
    }
  };
  return std::visit(read, kind);
}

// Whether a field can hold values of the attribute.
bool Holds(const pb::FieldDescriptor& field, const AttributeSchema& attribute) {
  constexpr pb::FieldDescriptor::CppType kTypes[] = {
      pb::FieldDescriptor::CPPTYPE_BOOL,   pb::FieldDescriptor::CPPTYPE_INT64,
      pb::FieldDescriptor::CPPTYPE_UINT64, pb::FieldDescriptor::CPPTYPE_DOUBLE,
      pb::FieldDescriptor::CPPTYPE_ENUM,   pb::FieldDescriptor::CPPTYPE_ENUM};
  if (field.is_repeated() || field.cpp_type() != kTypes[attribute.kind.index()]) return false;
  return attribute.choices.empty() ||
         attribute.choices.size() == static_cast<size_t>(field.enum_type()->value_count());
}

// An empty request or response of the method.
const pb::Message& PrototypeOf(const OperatorSchema& schema,
                               const pb::Descriptor* (pb::MethodDescriptor::*type)() const) {
  const pb::MethodDescriptor* const method = v1::Tensor::descriptor()
                                                 ->file()
                                                 ->FindServiceByName("AttentionService")
                                                 ->FindMethodByName(std::string(schema.method));
  RAPT_CHECK(method != nullptr, "the service has the method of each operator");
  return *pb::MessageFactory::generated_factory()->GetPrototype((method->*type)());
}

}  // namespace

OperatorCodec::OperatorCodec(const OperatorSchema& schema)
    : schema_(schema),
      request_(PrototypeOf(schema, &pb::MethodDescriptor::input_type)),
      response_(PrototypeOf(schema, &pb::MethodDescriptor::output_type)),
      priority_(FieldOf(request_, "priority")),
      end_{FieldOf(response_, "backend")->number(), FieldOf(response_, "plan")->number(),
           FieldOf(response_, "timing")->number()} {
  for (const TensorSchema& input : schema_.inputs) {
    inputs_.push_back({&input, FieldOf(request_, input.name)});
    if (input.slot == Role::kKeyLengths) continue;
    payloads_.push_back({inputs_.back().field->number(), &TensorDataSchema()});
  }
  for (const AttributeSchema& attribute : schema_.attributes) {
    attributes_.push_back({&attribute, FieldOf(request_, attribute.name)});
    RAPT_CHECK(Holds(*attributes_.back().field, attribute), "the field holds the attribute");
  }
  for (const TensorSchema& output : schema_.outputs) {
    outputs_.push_back({&output, FieldOf(response_, output.name)});
    if (output.want == nullptr) continue;
    wants_.push_back({&output, FieldOf(request_, absl::StrCat("want_", output.name))});
  }
}

const pb::FieldDescriptor* OperatorCodec::FieldOf(const pb::Message& message,
                                                  absl::string_view name) const {
  const pb::FieldDescriptor* const field =
      message.GetDescriptor()->FindFieldByName(absl::AsciiStrToLower(name));
  RAPT_CHECK(field != nullptr, "the message has the field of each row");
  return field;
}

absl::StatusOr<OperatorCodec::Parsed> OperatorCodec::Parse(const MessageBytes& message) const {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split,
                        wire::Split(message.bytes, message.size, payloads()));
  Parsed parsed{.fields = std::unique_ptr<pb::Message>(request_.New()), .request = {}};
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, *parsed.fields));
  parsed.request.model = ModelId(schema_);
  for (const wire::Payload& payload : split.payloads) {
    for (const auto& [input, field] : inputs_) {
      if (field->number() != payload.path[0]) continue;
      parsed.request.inputs[input->slot] = message.Part(payload.begin, payload.size);
    }
  }
  return parsed;
}

absl::Status OperatorCodec::CheckLaterMessage(const pb::Message& fields) const {
  std::vector<const pb::FieldDescriptor*> set;
  fields.GetReflection()->ListFields(fields, &set);
  for (const pb::FieldDescriptor* field : set) {
    const auto is_it = [field](const Column<TensorSchema>& column) {
      return column.field == field && (column.schema->per_token || column.schema->want != nullptr);
    };
    if (absl::c_any_of(inputs_, is_it) || absl::c_any_of(wants_, is_it)) continue;
    return Invalid(field->name(),
                   " is set in a later message; only the first message of a stream sets it");
  }
  return absl::OkStatus();
}

uint64_t OperatorCodec::PriorityOf(const pb::Message& fields) const {
  return fields.GetReflection()->GetUInt64(fields, priority_);
}

absl::Status OperatorCodec::ReadAttributes(const pb::Message& fields, SchemaCall& call) const {
  for (const auto& [attribute, field] : attributes_) {
    // A field that is 0 without presence stands for the default.
    if (!fields.GetReflection()->HasField(fields, field)) continue;
    RAPT_ASSIGN_OR_RETURN(const AttributeValue value, ReadValue(fields, field, attribute->kind));
    attribute->set(call, value);
  }
  return absl::OkStatus();
}

SlotSet OperatorCodec::ReadWants(const pb::Message& fields, SchemaCall& call) const {
  SlotSet wanted;
  for (const auto& [output, field] : wants_) {
    if (!fields.GetReflection()->GetBool(fields, field)) continue;
    output->want(call);
    wanted.Add(output->slot);
  }
  return wanted;
}

absl::Status OperatorCodec::ReadTensors(const pb::Message& fields, SharedTensors* shared_tensors,
                                        SchemaCall& call, Request& request) const {
  const pb::Reflection& get = *fields.GetReflection();
  for (const auto& [input, field] : inputs_) {
    if (input->slot == Role::kKeyLengths) {
      const int count = get.FieldSize(fields, field);
      for (int n = 0; n < count; ++n) {
        request.key_lengths.push_back(get.GetRepeatedInt64(fields, field, n));
      }
      if (count > 0) call.inputs()[input->slot] = TensorSpec{DType::kInt64, {count}};
    } else if (get.HasField(fields, field)) {
      const auto& tensor = static_cast<const v1::Tensor&>(get.GetMessage(fields, field));
      RAPT_ASSIGN_OR_RETURN(
          call.inputs()[input->slot],
          ReadTensor({.name = field->name(), .dtype = input->dtype, .max_rank = kMaxRank}, tensor,
                     shared_tensors, request.inputs[input->slot]));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Request> OperatorCodec::Decode(const MessageBytes& message,
                                              const SharedMemory& shared_memory) const {
  RAPT_ASSIGN_OR_RETURN(Parsed parsed, Parse(message));
  const pb::Message& fields = *parsed.fields;
  Request& request = parsed.request;
  request.priority = PriorityOf(fields);
  const std::unique_ptr<SchemaCall> call = schema_.new_call();
  SharedTensors shared_tensors(shared_memory);
  RAPT_RETURN_IF_ERROR(ReadAttributes(fields, *call));
  ReadWants(fields, *call);
  RAPT_RETURN_IF_ERROR(ReadTensors(fields, &shared_tensors, *call, request));
  RAPT_ASSIGN_OR_RETURN(const BoundCall bound, call->Bind());
  request.SetOperator(bound.tensor_operator());
  RAPT_RETURN_IF_ERROR(CheckResponseSize(OutputsOf(*request.tensor_operator, request.Outputs())));
  std::move(shared_tensors).TransferTo(request);
  return std::move(request);
}

ResponseMessage OperatorCodec::Encode(const TensorOperator& op, SlotSet wanted,
                                      const Result& result) const {
  ResponseMessage response;
  for (const auto& [output, field] : outputs_) {
    if (!wanted.contains(output->slot)) continue;
    AppendTensor(field->number(), *op.outputs()[output->slot], /*place=*/nullptr,
                 result.outputs[output->slot], response);
  }
  response.Append(EndOf(end_, result));
  response.KeepEncodingMemory(result.encoding_memory);
  return response;
}

const std::vector<OperatorCodec>& OperatorCodecs() {
  static const auto* const kCodecs = [] {
    auto* codecs = new std::vector<OperatorCodec>;
    for (const OperatorSchema* schema : OperatorSchemas()) {
      if (!schema->method.empty()) codecs->emplace_back(*schema);
    }
    return codecs;
  }();
  return *kCodecs;
}

}  // namespace rapt::native
