#include "client/console/json.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace rapt {
namespace {

std::string Quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (c == '\n') {
      out.append("\\n");
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

}  // namespace

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
  out_.append(Quote(key));
  out_.push_back(':');
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::String(std::string_view value) { return Value(Quote(value)); }

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
