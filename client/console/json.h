// Writes compact JSON, in the order of the calls.
#ifndef RAPT_CLIENT_CONSOLE_JSON_H_
#define RAPT_CLIENT_CONSOLE_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace rapt {

// REQUIRES: calls follow JSON's grammar: a Key before every value of an object, an End for every
// Begin.
class JsonWriter {
 public:
  JsonWriter& BeginObject() { return Open('{'); }
  JsonWriter& EndObject() { return Close('}'); }
  JsonWriter& BeginArray() { return Open('['); }
  JsonWriter& EndArray() { return Close(']'); }
  JsonWriter& Key(std::string_view key);
  JsonWriter& String(std::string_view value);
  JsonWriter& Integer(int64_t value);
  JsonWriter& Number(double value);  // null for NaN and infinities
  JsonWriter& Boolean(bool value);

  JsonWriter& Strings(absl::Span<const std::string> values);
  JsonWriter& Integers(absl::Span<const int64_t> values);

  std::string Take() { return std::move(out_); }

 private:
  JsonWriter& Open(char bracket);
  JsonWriter& Close(char bracket);
  JsonWriter& Value(std::string_view text);
  void Separate();

  std::string out_;
  bool first_ = true;  // no comma before the next value
};

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_JSON_H_
