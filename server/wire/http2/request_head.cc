#include "server/wire/http2/request_head.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace rapt {
namespace {

// Of a header's entry, as HTTP/2 counts it.
constexpr size_t kEntryBytes = 32;

constexpr size_t kMaxTimeoutDigits = 8;

HeaderValues ViewsOf(const std::vector<std::string>& values) {
  return {values.begin(), values.end()};
}

std::optional<std::chrono::nanoseconds> UnitOf(char unit) {
  switch (unit) {
    case 'H':
      return std::chrono::hours(1);
    case 'M':
      return std::chrono::minutes(1);
    case 'S':
      return std::chrono::seconds(1);
    case 'm':
      return std::chrono::milliseconds(1);
    case 'u':
      return std::chrono::microseconds(1);
    case 'n':
      return std::chrono::nanoseconds(1);
    default:
      return std::nullopt;
  }
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
  } else if (name == "grpc-timeout") {
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

std::optional<std::chrono::nanoseconds> RequestHead::timeout() const {
  if (!timeout_) return std::chrono::nanoseconds::max();
  absl::string_view digits = *timeout_;
  if (digits.size() < 2 || digits.size() > kMaxTimeoutDigits + 1) return std::nullopt;
  const auto unit = UnitOf(digits.back());
  digits.remove_suffix(1);
  int64_t count = 0;
  for (const char digit : digits) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(digit))) return std::nullopt;
    count = count * 10 + (digit - '0');
  }
  if (!unit) return std::nullopt;
  if (count > std::chrono::nanoseconds::max() / *unit) return std::chrono::nanoseconds::max();
  return count * *unit;
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
