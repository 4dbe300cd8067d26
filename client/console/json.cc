#include "client/console/json.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json_string.h"

namespace rapt {
void JsonWriter::Separate() {
  if (!first_) out_.push_back(',');
  first_ = false;
}

JsonWriter& JsonWriter::Open(char bracket) {
  Separate();
  out_.push_back(bracket);
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::Close(char bracket) {
  out_.push_back(bracket);
  first_ = false;
  return *this;
}

JsonWriter& JsonWriter::Value(std::string_view text) {
  Separate();
  out_.append(text);
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  Separate();
  AppendJsonString({key.data(), key.size()}, out_);
  out_.push_back(':');
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::String(std::string_view value) {
  std::string quoted;
  AppendJsonString({value.data(), value.size()}, quoted);
  return Value(quoted);
}

JsonWriter& JsonWriter::Integer(int64_t value) { return Value(absl::StrCat(value)); }

JsonWriter& JsonWriter::Number(double value) {
  return Value(std::isfinite(value) ? absl::StrFormat("%.10g", value) : "null");
}

JsonWriter& JsonWriter::Boolean(bool value) { return Value(value ? "true" : "false"); }

JsonWriter& JsonWriter::Strings(absl::Span<const std::string> values) {
  BeginArray();
  for (const std::string& value : values) String(value);
  return EndArray();
}

JsonWriter& JsonWriter::Integers(absl::Span<const int64_t> values) {
  BeginArray();
  for (const int64_t value : values) Integer(value);
  return EndArray();
}

}  // namespace rapt
