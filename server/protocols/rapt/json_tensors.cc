#include "server/protocols/rapt/json_tensors.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "attention/operator.h"
#include "base/check.h"
#include "base/invalid.h"
#include "base/json_string.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "base/wire_format.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/json_numbers.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/type_resolver.h"
#include "server/rejection.h"

namespace rapt::native {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

constexpr size_t kMaxRank = 64;
constexpr size_t kMaxTensors = 4096;  // more than the parts of any call have

// A placeholder in base64 takes the place of data in the JSON for Protocol Buffers: the number of
// the payload.
using Placeholder = uint32_t;

// What the JSON says of a tensor.
struct TensorState {
  std::string dtype;
  Shape shape;
  bool has_shape = false;
};

struct JsonParts {
  std::string text;  // JSON of the message with placeholders
  std::vector<PooledBuffer> payloads;
};

// Moves the data of tensors from the JSON to buffers. The type and shape of a tensor may follow its
// data; then another Reader, which knows them, reads the JSON again.
class Reader final : public JsonHandler {
 public:
  using Tensors = std::vector<TensorState>;  // in their order

  Reader(const Descriptor& type, size_t json_bytes, BufferPool& pool, const Tensors* known)
      : type_(type),
        pool_(pool),
        known_(known),
        numbers_left_(static_cast<int64_t>(json_bytes / 2)) {}

  absl::Status Read(absl::string_view json) {
    ReadStrictJson(json, *this);
    return status_;
  }

  bool needs_another_pass() const { return needs_another_pass_; }
  const Tensors& tensors() const { return tensors_; }
  JsonParts TakeParts() { return std::move(parts_); }

  // For the parser.
  bool null() override { return OnOther("null"); }
  bool boolean(bool value) override { return OnScalar(value, value ? "true" : "false"); }
  bool number_integer(int64_t value) override { return OnScalar(value, absl::StrCat(value)); }
  bool number_unsigned(uint64_t value) override { return OnScalar(value, absl::StrCat(value)); }
  bool number_float(double value, const std::string& text) override {
    return OnScalar(value, text);
  }
  bool string(std::string& value) override {
    if (data_depth_ > 0) return OnNumber(absl::string_view(value));
    if (IsTensorField("data")) return OnBase64(value);
    if (IsTensorField("name")) return true;
    if (IsTensorField("dtype")) tensor().dtype = value;
    if (!NoteExtent(absl::string_view(value), value) || !BeginValue(value.size())) return false;
    AppendJsonString(value, parts_.text);
    return true;
  }

  bool key(std::string& name) override {
    Level& level = levels_.back();
    level.key = std::move(name);
    if (IsTensor(level) && level.key == "datatype") level.key = "dtype";
    level.field = FieldOf(level.type, level.key);
    if (level.field != nullptr && !level.fields.insert(level.field).second) {
      return Fail(absl::StrCat("the JSON is invalid: ", level.field->name(),
                               " is given twice, by two of its names"));
    }
    if (IsTensorField("name")) return true;  // not written
    Separate(level);
    AppendJsonString(level.key, parts_.text);
    parts_.text += ':';
    return HasRoom(0);
  }

  bool start_object(size_t) override {
    if (data_depth_ > 0) return OnOther("an object");
    Level level = {.type = levels_.empty() ? &type_ : TypeOfValue()};
    if (IsTensor(level)) {
      if (tensors_.size() == kMaxTensors) {
        return Fail(absl::StrCat("the JSON has more than ", kMaxTensors, " tensors"));
      }
      level.tensor = tensors_.size();
      tensors_.emplace_back();
    }
    return Open('{', std::move(level));
  }
  bool end_object() override { return Close('}'); }

  bool start_array(size_t) override {
    if (data_depth_ == 0 && IsTensorField("data")) return BeginData();
    if (data_depth_ == 0) {
      if (IsTensorField("shape")) tensor().has_shape = true;
      const Descriptor* const type = levels_.empty() ? nullptr : TypeOfValue();
      return Open('[', {.type = type, .is_array = true});
    }
    ++data_depth_;
    return true;
  }
  bool end_array() override {
    if (data_depth_ == 0) return Close(']');
    if (--data_depth_ > 0) return true;
    if (numbers_.count == numbers_.wanted || needs_another_pass_) return AppendPayload();
    return Fail(absl::StrCat(TensorName(), " has ", numbers_.count, " values in data; its shape ",
                             ToString(known_tensor().shape), " needs ", numbers_.wanted));
  }

  void OnInvalid(absl::string_view why) override {
    Fail(absl::StrCat("the JSON is invalid: ", why));
  }

 private:
  // An object or an array that is being read.
  struct Level {
    const Descriptor* type = nullptr;  // of the object, or of the array's objects; null: unknown
    bool is_array = false;
    size_t tensor = 0;  // its index, if it is one
    bool is_empty = true;
    std::string key = {};
    const FieldDescriptor* field = nullptr;        // of the key; null: unknown
    std::set<const FieldDescriptor*> fields = {};  // so far
  };

  static bool IsTensor(const Level& level) {
    return !level.is_array && level.type == v1::Tensor::descriptor();
  }
  bool IsTensorField(absl::string_view name) const {
    return !levels_.empty() && IsTensor(levels_.back()) && levels_.back().key == name;
  }
  TensorState& tensor() { return tensors_[levels_.back().tensor]; }
  // With what another pass has found.
  const TensorState& known_tensor() const {
    return known_ == nullptr ? tensors_[levels_.back().tensor] : (*known_)[levels_.back().tensor];
  }

  // The type of the object that follows, or of those in the array that follows.
  const Descriptor* TypeOfValue() const {
    const Level& level = levels_.back();
    if (level.is_array || level.type == nullptr) return level.type;
    return level.field == nullptr ? nullptr : level.field->message_type();
  }
  static const FieldDescriptor* FieldOf(const Descriptor* type, const std::string& name) {
    if (type == nullptr) return nullptr;
    const FieldDescriptor* const field = type->FindFieldByCamelcaseName(name);
    return field != nullptr ? field : type->FindFieldByName(name);
  }

  // "q" of {"q": {"data": ...}}
  std::string TensorName() const { return NameOfLevel(levels_.size() - 1); }
  std::string NameOfLevel(size_t level) const {
    while (level-- > 0) {
      if (!levels_[level].is_array) return levels_[level].key;
    }
    return "the tensor";
  }

  void Separate(Level& level) {
    if (!std::exchange(level.is_empty, false)) parts_.text += ',';
  }
  // Returns false after an error.
  bool BeginValue(size_t bytes) {
    if (!levels_.empty() && levels_.back().is_array) Separate(levels_.back());
    return HasRoom(bytes);
  }
  bool HasRoom(size_t bytes) {
    if (parts_.text.size() + bytes <= kMaxFieldsBytes) return true;
    status_ = Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                     absl::StrCat("the JSON without the data of its tensors has more than ",
                                  kMaxFieldsBytes, " bytes, the most that is allowed"));
    return false;
  }

  bool Open(char bracket, Level level) {
    if (IsTensorField("name")) return WrongName();
    if (!BeginValue(1)) return false;
    parts_.text += bracket;
    levels_.push_back(std::move(level));
    return true;
  }
  bool Close(char bracket) {
    levels_.pop_back();
    parts_.text += bracket;
    return true;
  }

  bool BeginData() {
    data_depth_ = 1;
    numbers_ = {};
    const TensorState& state = known_tensor();
    if (known_ == nullptr && (state.dtype.empty() || !state.has_shape)) {
      return needs_another_pass_ = true;
    }
    const std::optional<DType> dtype = DTypeNamed(state.dtype);
    if (!dtype) {
      return Fail(absl::StrCat(TensorName(), " has dtype '",
                               absl::string_view(state.dtype).substr(0, 64),
                               "' and numbers in data; it must be FP32, FP16, BF16, FP64, BOOL, "
                               "INT8, UINT8, INT32 or INT64"));
    }
    status_ = numbers_.Begin(TensorName(), {*dtype, state.shape}, pool_, numbers_left_);
    return status_.ok();
  }

  bool OnBase64(const std::string& text) {
    std::string bytes;
    if (!absl::Base64Unescape(text, &bytes) && !absl::WebSafeBase64Unescape(text, &bytes)) {
      return Fail(absl::StrCat(TensorName(), " has data that is no base64"));
    }
    numbers_.place = pool_.Take(static_cast<int64_t>(bytes.size()));
    if (!bytes.empty()) std::memcpy(numbers_.place.data(), bytes.data(), bytes.size());
    return AppendPayload();
  }

  // Writes the placeholder of the payload in `numbers_`.
  bool AppendPayload() {
    const auto index = static_cast<Placeholder>(parts_.payloads.size());
    parts_.payloads.push_back(std::move(numbers_.place));
    std::string placeholder;
    absl::Base64Escape({reinterpret_cast<const char*>(&index), sizeof(index)}, &placeholder);
    AppendJsonString(placeholder, parts_.text);
    return HasRoom(0);
  }

  // Notes a value of a shape. Returns false after an error.
  bool NoteExtent(const JsonScalar& value, absl::string_view text) {
    if (levels_.size() < 2 || !levels_.back().is_array) return true;
    const size_t level = levels_.size() - 2;
    const Level& owner = levels_[level];
    if (!IsTensor(owner) || owner.key != "shape") return true;
    Shape& shape = tensors_[owner.tensor].shape;
    const std::optional<int64_t> extent = ExtentOf(value);
    if (!extent) {
      return Fail(absl::StrCat(NameOfLevel(level), " has ", text.substr(0, 64),
                               " in shape; it must have integers of 64 bits"));
    }
    if (shape.size() == kMaxRank) {
      return Fail(
          absl::StrCat(NameOfLevel(level), " has a shape of more than ", kMaxRank, " axes"));
    }
    shape.push_back(*extent);
    return true;
  }

  // Protocol Buffers' JSON writes integers as 2, "2", 2.0 or 2e0.
  static std::optional<int64_t> ExtentOf(const JsonScalar& value) {
    if (const std::optional<int64_t> integer = IntegerOf(value)) return integer;
    if (const auto* const text = std::get_if<absl::string_view>(&value)) {
      int64_t read = 0;
      return absl::SimpleAtoi(*text, &read) ? std::optional<int64_t>(read) : std::nullopt;
    }
    const auto* const real = std::get_if<double>(&value);
    if (real == nullptr || std::fabs(*real) >= 0x1p63 || std::trunc(*real) != *real) {
      return std::nullopt;
    }
    return static_cast<int64_t>(*real);
  }

  bool OnScalar(const JsonScalar& value, absl::string_view text) {
    if (data_depth_ > 0) return OnNumber(value);
    if (IsTensorField("name")) return WrongName();
    if (IsTensorField("dtype")) NoteCode(value);
    if (!NoteExtent(value, text) || !BeginValue(text.size())) return false;
    absl::StrAppend(&parts_.text, text);
    return true;
  }

  // The number of a type, which Protocol Buffers' JSON allows.
  void NoteCode(const JsonScalar& value) {
    const std::optional<int64_t> code = IntegerOf(value);
    if (!code) return;  // Protocol Buffers' parser refuses it
    const bool is_known = *code >= v1::DataType_MIN && *code <= v1::DataType_MAX;
    tensor().dtype = is_known ? v1::DataType_Name(static_cast<v1::DataType>(*code)) : TextOf(value);
  }

  bool OnNumber(const JsonScalar& value) {
    if (numbers_.Add(value)) return true;
    return Fail(absl::StrCat(TensorName(), " has ", TextOf(value), " in data; ", numbers_.allowed));
  }

  bool OnOther(absl::string_view what) {
    if (data_depth_ == 0) return OnScalar(JsonScalar(false), what);
    return Fail(absl::StrCat(TensorName(), " has ", what, " in data; it must have numbers"));
  }

  bool WrongName() { return Fail(absl::StrCat(TensorName(), " has a name that is no string")); }

  bool Fail(absl::string_view message) {
    status_ = Invalid(message);
    return false;
  }

  const Descriptor& type_;
  BufferPool& pool_;
  const Tensors* const known_;
  Tensors tensors_;
  std::vector<Level> levels_;
  JsonParts parts_;
  // That the rest of the JSON may have. A number and what separates it from the next take 2 bytes.
  int64_t numbers_left_;
  bool needs_another_pass_ = false;
  absl::Status status_;

  // Of the data that is being read.
  int data_depth_ = 0;  // levels of arrays
  JsonNumbers numbers_;
};

absl::StatusOr<JsonParts> ReadParts(const Descriptor& type, absl::string_view json,
                                    BufferPool& pool) {
  std::optional<Reader> first(std::in_place, type, json.size(), pool, nullptr);
  RAPT_RETURN_IF_ERROR(first->Read(json));
  JsonParts parts = first->TakeParts();
  if (!first->needs_another_pass()) return parts;
  parts = {};
  Reader second(type, json.size(), pool, &first->tensors());
  RAPT_RETURN_IF_ERROR(second.Read(json));
  return second.TakeParts();
}

// Copies a serialized message, with payloads in place of their placeholders.
class Assembler {
 public:
  explicit Assembler(std::vector<PooledBuffer> payloads) : payloads_(std::move(payloads)) {}

  JsonMessage Run(const std::string& message, const Descriptor& type) {
    Parts parts;
    Copy(message, type, parts);
    JsonMessage result;
    for (Part& part : parts.list) {
      result.Append(std::move(part.fields));
      if (part.payload) result.Append(std::move(payloads_[*part.payload]));
    }
    return result;
  }

 private:
  struct Part {
    std::string fields;
    std::optional<Placeholder> payload = std::nullopt;  // follows the fields
  };
  struct Parts {
    std::vector<Part> list{1};
    int64_t size = 0;

    void Append(absl::string_view fields) {
      absl::StrAppend(&list.back().fields, fields);
      size += static_cast<int64_t>(fields.size());
    }
    void AppendHeader(int field, int64_t bytes) {
      std::string header;
      wire::AppendFieldHeader(field, bytes, header);
      Append(header);
    }
    void AppendPayload(Placeholder payload, int64_t bytes) {
      list.back().payload = payload;
      list.emplace_back();
      size += bytes;
    }
    void Append(Parts parts) {
      absl::StrAppend(&list.back().fields, parts.list.front().fields);
      list.back().payload = parts.list.front().payload;
      std::move(parts.list.begin() + 1, parts.list.end(), std::back_inserter(list));
      size += parts.size;
    }
  };

  // REQUIRES: `message` is a valid message of the type.
  void Copy(absl::string_view message, const Descriptor& type, Parts& parts) const {
    using google::protobuf::internal::WireFormatLite;
    google::protobuf::io::CodedInputStream input(reinterpret_cast<const uint8_t*>(message.data()),
                                                 static_cast<int>(message.size()));
    for (;;) {
      const int begin = input.CurrentPosition();
      const uint32_t tag = input.ReadTag();
      if (tag == 0) return;
      const int number = WireFormatLite::GetTagFieldNumber(tag);
      const FieldDescriptor* const field = type.FindFieldByNumber(number);
      const bool is_data =
          &type == v1::Tensor::descriptor() && number == v1::Tensor::kDataFieldNumber;
      const Descriptor* const inner = field == nullptr ? nullptr : field->message_type();
      if (inner == nullptr && !is_data) {
        WireFormatLite::SkipField(&input, tag);
        parts.Append(message.substr(begin, input.CurrentPosition() - begin));
        continue;
      }
      uint32_t size = 0;
      input.ReadVarint32(&size);
      const absl::string_view bytes = message.substr(input.CurrentPosition(), size);
      input.Skip(static_cast<int>(size));
      if (is_data) {
        CopyPayload(bytes, parts);
      } else {
        Parts child;
        Copy(bytes, *inner, child);
        parts.AppendHeader(number, child.size);
        parts.Append(std::move(child));
      }
    }
  }

  void CopyPayload(absl::string_view placeholder, Parts& parts) const {
    Placeholder payload = 0;
    RAPT_CHECK(placeholder.size() == sizeof(payload), "a tensor's data has no placeholder");
    std::memcpy(&payload, placeholder.data(), sizeof(payload));
    const int64_t bytes = payloads_[payload].size();
    parts.AppendHeader(v1::Tensor::kDataFieldNumber, bytes);
    if (bytes > 0) parts.AppendPayload(payload, bytes);
  }

  std::vector<PooledBuffer> payloads_;
};

// "; it must be SOFTMAX (0), ..." if the error is about the name of an enumeration's value:
// "(field): invalid value \"x\" for type type.googleapis.com/rapt.v1.Normalizer".
std::string AllowedNames(absl::string_view error) {
  constexpr absl::string_view kType = "\" for type type.googleapis.com/";
  const size_t type = error.rfind(kType);
  if (type == absl::string_view::npos) return "";
  const auto* const choices =
      google::protobuf::DescriptorPool::generated_pool()->FindEnumTypeByName(
          std::string(error.substr(type + kType.size())));
  return choices == nullptr ? "" : absl::StrCat("; it must be ", ChoicesOf(*choices));
}

// Returns the message of Protocol Buffers' JSON, serialized.
absl::StatusOr<std::string> FromProtoJson(const Descriptor& type, const std::string& json) {
  std::string message;
  const auto status =
      google::protobuf::util::JsonToBinaryString(&Resolver(), UrlOf(type), json, &message, {});
  if (status.ok()) return message;
  const absl::string_view error(status.message().data(), status.message().size());
  return Invalid("not a ", type.full_name(), " in JSON: ", error, AllowedNames(error));
}

}  // namespace

void JsonMessage::Append(std::string fields) {
  if (fields.empty()) return;
  fields_.push_back(std::move(fields));
  Append(reinterpret_cast<const std::byte*>(fields_.back().data()), fields_.back().size());
}

void JsonMessage::Append(PooledBuffer payload) {
  Append(payload.data(), payload.span().size());
  payloads_.push_back(std::move(payload));
}

void JsonMessage::Append(const std::byte* data, size_t size) {
  const int64_t begin = this->size();
  slices_.push_back({data, begin, begin + static_cast<int64_t>(size)});
}

absl::StatusOr<JsonMessage> ReadJson(const Descriptor& type, absl::string_view json,
                                     BufferPool& pool) {
  RAPT_ASSIGN_OR_RETURN(JsonParts parts, ReadParts(type, json, pool));
  RAPT_ASSIGN_OR_RETURN(const std::string message, FromProtoJson(type, parts.text));
  return Assembler(std::move(parts.payloads)).Run(message, type);
}

}  // namespace rapt::native
