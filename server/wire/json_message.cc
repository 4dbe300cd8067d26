#include "server/wire/json_message.h"

#include <google/protobuf/descriptor.h>

#include <string>

#include "absl/strings/escaping.h"

namespace rapt {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

// Returns the value of a field, or its element `index` if that is not -1.
Json ValueOf(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& get = *message.GetReflection();
  const auto value = [&](auto single, auto repeated) {
    return index < 0 ? (get.*single)(message, &field) : (get.*repeated)(message, &field, index);
  };
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return value(&Reflection::GetBool, &Reflection::GetRepeatedBool);
    case FieldDescriptor::CPPTYPE_INT32:
      return value(&Reflection::GetInt32, &Reflection::GetRepeatedInt32);
    case FieldDescriptor::CPPTYPE_UINT32:
      return value(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32);
    case FieldDescriptor::CPPTYPE_INT64:
      return value(&Reflection::GetInt64, &Reflection::GetRepeatedInt64);
    case FieldDescriptor::CPPTYPE_UINT64:
      return value(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return value(&Reflection::GetFloat, &Reflection::GetRepeatedFloat);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return value(&Reflection::GetDouble, &Reflection::GetRepeatedDouble);
    case FieldDescriptor::CPPTYPE_ENUM:
      return value(&Reflection::GetEnum, &Reflection::GetRepeatedEnum)->name();
    case FieldDescriptor::CPPTYPE_STRING: {
      std::string text = value(&Reflection::GetString, &Reflection::GetRepeatedString);
      return field.type() == FieldDescriptor::TYPE_BYTES ? absl::Base64Escape(text) : text;
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(index < 0 ? get.GetMessage(message, &field)
                              : get.GetRepeatedMessage(message, &field, index));
  }
  return {};
}

Json MapOf(const Message& message, const FieldDescriptor& field) {
  Json map = Json::object();
  const Reflection& get = *message.GetReflection();
  for (int i = 0; i < get.FieldSize(message, &field); ++i) {
    const Message& entry = get.GetRepeatedMessage(message, &field, i);
    const auto& type = *field.message_type();
    const Json key = ValueOf(entry, *type.map_key(), -1);
    map[key.is_string() ? key.get<std::string>() : key.dump()] =
        ValueOf(entry, *type.map_value(), -1);
  }
  return map;
}

Json ArrayOf(const Message& message, const FieldDescriptor& field) {
  Json array = Json::array();
  const int size = message.GetReflection()->FieldSize(message, &field);
  for (int i = 0; i < size; ++i) array.push_back(ValueOf(message, field, i));
  return array;
}

}  // namespace

Json ToJson(const Message& message) {
  Json object = Json::object();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.has_presence() && !message.GetReflection()->HasField(message, &field)) continue;
    object[field.name()] = field.is_map()        ? MapOf(message, field)
                           : field.is_repeated() ? ArrayOf(message, field)
                                                 : ValueOf(message, field, -1);
  }
  return object;
}

}  // namespace rapt
