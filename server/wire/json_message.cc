#include "server/wire/json_message.h"

#include <google/protobuf/io/zero_copy_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/json_util.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/round_up.h"
#include "server/protocols/json_limits.h"
#include "server/protocols/type_resolver.h"

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

constexpr int kBlockBytes = 16 * 1024;

// A text in blocks, each charged before it exists. Takes no more than `most` bytes and a block.
class ChargedText final : public google::protobuf::io::ZeroCopyOutputStream {
 public:
  ChargedText(int64_t most, TextMemory reserved, const Call& call)
      : most_(most), reserved_(std::move(reserved)), call_(call) {}

  bool is_too_long() const { return is_full_ || size_ > most_; }

  ResponseMessage TakeMessage() {
    ResponseMessage message;
    for (std::shared_ptr<Block>& block : blocks_) {
      const auto bytes = absl::MakeConstSpan(block->bytes).first(block->size);
      message.Append(OutputBuffer{bytes, std::move(block)});
    }
    return message;
  }

 private:
  struct Block {
    std::shared_ptr<const void> reserved;  // null: charged
    MessageReservation charged;
    std::vector<std::byte> bytes;
    size_t size = 0;
  };

  bool Next(void** data, int* size) override {
    is_full_ = is_full_ || size_ > most_;
    if (is_full_) return false;
    auto block = std::make_shared<Block>();
    if (reserved_.memory != nullptr && size_ + kBlockBytes <= reserved_.bytes) {
      block->reserved = reserved_.memory;
    } else if (call_.traits().carries_tensors) {
      block->charged = call_.engine().ChargeMessage(kBlockBytes, call_.caller_memory());
    }
    block->bytes.resize(kBlockBytes);
    block->size = kBlockBytes;
    blocks_.push_back(std::move(block));
    size_ += kBlockBytes;
    *data = blocks_.back()->bytes.data();
    *size = kBlockBytes;
    return true;
  }
  void BackUp(int count) override {
    blocks_.back()->size -= static_cast<size_t>(count);
    size_ -= count;
  }
  int64_t ByteCount() const override { return size_; }

  const int64_t most_;
  const TextMemory reserved_;
  const Call& call_;
  std::vector<std::shared_ptr<Block>> blocks_;
  int64_t size_ = 0;
  bool is_full_ = false;
};

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

absl::StatusOr<ResponseMessage> ToProtoJson(const google::protobuf::Descriptor& type,
                                            const std::string& serialized, int64_t max_json_bytes,
                                            TextMemory reserved, const Call& call) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  google::protobuf::io::ArrayInputStream input(serialized.data(),
                                               static_cast<int>(serialized.size()));
  ChargedText text(max_json_bytes, std::move(reserved), call);
  const auto status =
      google::protobuf::util::BinaryToJsonStream(&Resolver(), UrlOf(type), &input, &text, options);
  if (text.is_too_long()) return AnswerHasTooMuchJson(max_json_bytes);
  if (!status.ok()) return absl::InternalError("the response can't be written in JSON");
  return text.TakeMessage();
}

int64_t TextMemoryBytes(int64_t bytes) { return RoundUp(bytes, kBlockBytes); }

}  // namespace rapt
