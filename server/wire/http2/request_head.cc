#include "server/wire/http2/request_head.h"

#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace rapt {
namespace {

// Of a header's entry, as HTTP/2 counts it.
constexpr size_t kEntryBytes = 32;

HeaderValues ViewsOf(const std::vector<std::string>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

void RequestHead::Add(absl::string_view name, absl::string_view value) {
  bytes_ += static_cast<int64_t>(name.size() + value.size() + kEntryBytes);
  if (is_too_large()) return;
  const std::string text(value);
  if (name == ":method") {
    method_ = text;
  } else if (name == ":path") {
    path_ = text;
  } else if (name == "content-type") {
    content_type_ = text;
  } else if (name == "grpc-encoding") {
    encoding_ = text;
  } else if (name == kTimeoutHeader) {
    timeout_ = text;
  } else if (name == kAuthorizationHeader) {
    authorization_.push_back(text);
  } else if (name == kTraceparentHeader) {
    traceparent_.push_back(text);
  }
}

// "application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"; not grpc-web.
bool RequestHead::is_grpc() const {
  absl::string_view type = content_type_;
  if (!absl::ConsumePrefix(&type, "application/grpc")) return false;
  return type.empty() || type[0] == '+' || type[0] == ';';
}

CallHeaders RequestHead::ToCallHeaders() const {
  return {.authorization = ViewsOf(authorization_), .traceparent = ViewsOf(traceparent_)};
}

std::string PercentEncode(absl::string_view text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string encoded;
  for (const char character : text) {
    if (character >= ' ' && character <= '~' && character != '%') {
      encoded += character;
      continue;
    }
    const auto byte = static_cast<unsigned char>(character);
    encoded += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return encoded;
}

}  // namespace rapt
