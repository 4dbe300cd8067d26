#ifndef RAPT_SERVER_WIRE_HTTP_HEAD_PARSER_H_
#define RAPT_SERVER_WIRE_HTTP_HEAD_PARSER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "server/wire/http/message.h"

namespace rapt::http {

// Parses the head of a request, which may arrive in parts. Rejects what is ambiguous: two lengths,
// a length and a chunked body, lines that do not end with CR LF, a space before a colon, headers of
// several lines.
class HeadParser {
 public:
  static constexpr size_t kMaxBytes = 16 * 1024;
  static constexpr size_t kMaxHeaders = 100;

  enum class Result : uint8_t { kIncomplete, kComplete, kMalformed, kTooLarge, kUnknownVersion };

  HeadParser();
  ~HeadParser();
  HeadParser(const HeadParser&) = delete;
  HeadParser& operator=(const HeadParser&) = delete;

  // `bytes` begins with all bytes passed before, from the head's first.
  Result Parse(absl::string_view bytes);

  // The bytes of the head. REQUIRES: it is complete.
  size_t size() const;
  // REQUIRES: it is complete. Call it once.
  Request TakeRequest();
  // Why it is malformed.
  const std::string& error() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_HEAD_PARSER_H_
