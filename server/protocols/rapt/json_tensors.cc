#include "server/protocols/rapt/json_tensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/json_string.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/json_numbers.h"
#include "server/protocols/rapt/codec.h"

namespace rapt::native {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

constexpr size_t kMaxDepth = 64;

// Numbers as base64, a block at a time.
class Base64Numbers {
 public:
  // `out` outlives it.
  Base64Numbers(DType dtype, std::string& out)
      : size_(static_cast<size_t>(SizeOf(dtype))), numbers_(JsonNumbersOf(dtype)), out_(out) {}

  absl::string_view allowed() const { return numbers_.allowed; }

  bool Append(const JsonScalar& value) {
    if (used_ == block_.size()) Flush();
    if (!numbers_.store(value, block_.data() + used_)) return false;
    used_ += size_;
    return true;
  }

  // Writes what is left. Call it once, at the end.
  void Flush() {
    out_ += absl::Base64Escape({reinterpret_cast<const char*>(block_.data()), used_});
    used_ = 0;
  }

 private:
  static constexpr size_t kBlockBytes = 3 * 1024;  // whole numbers, and whole groups of base64

  const size_t size_;
  const JsonNumbers numbers_;
  std::string& out_;
  std::array<std::byte, kBlockBytes> block_;
  size_t used_ = 0;
};

// Writes what it reads. The type of a tensor may follow its data; then another Rewriter, which
// knows the types, reads the JSON again.
class Rewriter final : public nlohmann::json_sax<nlohmann::json> {
 public:
  using Types = std::vector<std::string>;  // of the tensors, in their order; "": unknown

  Rewriter(const Descriptor& type, const Types* known) : type_(type), known_(known) {}

  absl::Status Read(absl::string_view json) {
    nlohmann::json::sax_parse(json.begin(), json.end(), this);
    return status_;
  }

  bool needs_another_pass() const { return needs_another_pass_; }
  const Types& types() const { return types_; }
  std::string TakeText() { return std::move(out_); }

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
    if (IsTensorField("dtype")) types_[tensor()] = value;
    if (IsTensorField("name")) return true;
    BeginValue();
    AppendJsonString(value, out_);
    return true;
  }
  bool binary(binary_t&) override { return false; }  // not in JSON

  bool key(std::string& name) override {
    Level& level = levels_.back();
    level.key = std::move(name);
    if (IsTensor(level) && level.key == "datatype") level.key = "dtype";
    if (IsTensorField("name")) return true;  // not written
    Separate(level);
    AppendJsonString(level.key, out_);
    out_ += ':';
    return true;
  }

  bool start_object(size_t) override {
    if (data_depth_ > 0) return OnOther("an object");
    const Descriptor* const type = levels_.empty() ? &type_ : TypeOfValue();
    return Open('{', {.type = type, .tensor = NewTensor(type)});
  }
  bool end_object() override { return Close('}'); }

  bool start_array(size_t) override {
    if (data_depth_ == 0 && IsTensorField("data")) return BeginData();
    if (data_depth_ == 0) {
      const Descriptor* const type = levels_.empty() ? nullptr : TypeOfValue();
      return Open('[', {.type = type, .is_array = true});
    }
    ++data_depth_;
    return data_depth_ <= static_cast<int>(kMaxDepth) || TooDeep();
  }
  bool end_array() override {
    if (data_depth_ == 0) return Close(']');
    if (--data_depth_ > 0) return true;
    if (numbers_) numbers_->Flush();
    numbers_.reset();
    out_ += '"';
    return true;
  }

  bool parse_error(size_t, const std::string&,
                   const nlohmann::json::exception& exception) override {
    const absl::string_view what = exception.what();
    return Fail(absl::StrCat("the JSON is invalid: ", what.substr(what.find("] ") + 2)));
  }

 private:
  // An object or an array that is being read.
  struct Level {
    const Descriptor* type = nullptr;  // of the object, or of the array's objects; null: unknown
    bool is_array = false;
    size_t tensor = 0;  // its number, if it is one
    bool is_empty = true;
    std::string key = {};
  };

  static bool IsTensor(const Level& level) {
    return !level.is_array && level.type == v1::Tensor::descriptor();
  }
  bool IsTensorField(absl::string_view name) const {
    return !levels_.empty() && IsTensor(levels_.back()) && levels_.back().key == name;
  }
  size_t tensor() const { return levels_.back().tensor; }

  size_t NewTensor(const Descriptor* type) {
    if (type == v1::Tensor::descriptor()) types_.emplace_back();
    return types_.empty() ? 0 : types_.size() - 1;
  }

  // The type of the object that follows, or of those in the array that follows.
  const Descriptor* TypeOfValue() const {
    const Level& level = levels_.back();
    if (level.is_array || level.type == nullptr) return level.type;
    const FieldDescriptor* field = level.type->FindFieldByCamelcaseName(level.key);
    if (field == nullptr) field = level.type->FindFieldByName(level.key);
    return field == nullptr ? nullptr : field->message_type();
  }

  // "q" of {"q": {"data": ...}}
  std::string TensorName() const {
    for (auto level = std::next(levels_.rbegin()); level != levels_.rend(); ++level) {
      if (!level->is_array) return level->key;
    }
    return "the tensor";
  }

  void Separate(Level& level) {
    if (!std::exchange(level.is_empty, false)) out_ += ',';
  }
  void BeginValue() {
    if (!levels_.empty() && levels_.back().is_array) Separate(levels_.back());
  }

  bool Open(char bracket, Level level) {
    if (levels_.size() == kMaxDepth) return TooDeep();
    if (IsTensorField("name")) return WrongName();
    BeginValue();
    out_ += bracket;
    levels_.push_back(std::move(level));
    return true;
  }
  bool Close(char bracket) {
    levels_.pop_back();
    out_ += bracket;
    return true;
  }

  bool BeginData() {
    data_depth_ = 1;
    out_ += '"';
    const std::string& name = known_ == nullptr ? types_[tensor()] : (*known_)[tensor()];
    if (name.empty() && known_ == nullptr) return needs_another_pass_ = true;
    v1::DataType code;
    const std::optional<DType> dtype =
        v1::DataType_Parse(name, &code) ? ElementTypeOf(code) : std::nullopt;
    if (!dtype) {
      return Fail(absl::StrCat(TensorName(), " has dtype '", absl::string_view(name).substr(0, 64),
                               "' and numbers in data; it must be FP32, FP16, BF16, FP64, BOOL, "
                               "INT8, INT32 or INT64"));
    }
    numbers_.emplace(*dtype, out_);
    return true;
  }

  static std::optional<DType> ElementTypeOf(v1::DataType code) {
    if (code == v1::INT64) return DType::kInt64;
    if (code == v1::INT8) return DType::kInt8;
    return ToDType(code);
  }

  bool OnScalar(const JsonScalar& value, absl::string_view text) {
    if (data_depth_ > 0) return OnNumber(value);
    if (IsTensorField("name")) return WrongName();
    BeginValue();
    absl::StrAppend(&out_, text);
    return true;
  }

  bool OnNumber(const JsonScalar& value) {
    if (!numbers_ || numbers_->Append(value)) return true;
    return Fail(
        absl::StrCat(TensorName(), " has ", TextOf(value), " in data; ", numbers_->allowed()));
  }

  bool OnOther(absl::string_view what) {
    if (data_depth_ == 0) return OnScalar(JsonScalar(false), what);
    return Fail(absl::StrCat(TensorName(), " has ", what, " in data; it must have numbers"));
  }

  bool WrongName() { return Fail(absl::StrCat(TensorName(), " has a name that is no string")); }
  bool TooDeep() { return Fail(absl::StrCat("the JSON has more than ", kMaxDepth, " levels")); }

  bool Fail(absl::string_view message) {
    status_ = absl::InvalidArgumentError(message);
    return false;
  }

  const Descriptor& type_;
  const Types* const known_;
  Types types_;
  std::vector<Level> levels_;
  std::string out_;
  int data_depth_ = 0;                    // levels of arrays of numbers
  std::optional<Base64Numbers> numbers_;  // null: numbers are skipped
  bool needs_another_pass_ = false;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::string> WithBinaryTensors(const Descriptor& type, absl::string_view json) {
  Rewriter first(type, nullptr);
  absl::Status status = first.Read(json);
  if (!status.ok()) return status;
  std::string text = first.TakeText();
  if (!first.needs_another_pass()) return text;
  text = {};
  Rewriter second(type, &first.types());
  status = second.Read(json);
  if (!status.ok()) return status;
  return second.TakeText();
}

}  // namespace rapt::native
