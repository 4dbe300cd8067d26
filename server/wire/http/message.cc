#include "server/wire/http/message.h"

#include <utility>

#include "absl/strings/match.h"
#include "base/json_string.h"
#include "server/rejection.h"
#include "server/wire/trailers.h"

namespace rapt::http {
namespace {

constexpr int kClientClosedRequest = 499;  // as nginx names it; nobody reads the response

constexpr std::pair<int, absl::string_view> kReasonPhrases[] = {
    {200, "OK"},
    {204, "No Content"},
    {304, "Not Modified"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {408, "Request Timeout"},
    {409, "Conflict"},
    {413, "Content Too Large"},
    {415, "Unsupported Media Type"},
    {417, "Expectation Failed"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {kClientClosedRequest, "Client Closed Request"},
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {503, "Service Unavailable"},
    {504, "Gateway Timeout"},
    {505, "HTTP Version Not Supported"},
};

int StatusOfRejection(Rejection why) {
  switch (why) {
    case Rejection::kTooLarge:
      return 413;
    case Rejection::kSlowSender:
      return 408;
    default:
      return 429;
  }
}

int HttpStatusOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kAlreadyExists:
      return 409;
    case absl::StatusCode::kResourceExhausted:
      return StatusOfRejection(RejectionOf(status));
    case absl::StatusCode::kCancelled:
      return kClientClosedRequest;
    case absl::StatusCode::kUnimplemented:
      return 501;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

}  // namespace

HeaderValues Request::Values(absl::string_view name) const {
  HeaderValues values;
  for (const Header& header : headers) {
    if (absl::EqualsIgnoreCase(header.name, name)) values.push_back(header.value);
  }
  return values;
}

std::optional<absl::string_view> Request::Value(absl::string_view name) const {
  for (const Header& header : headers) {
    if (absl::EqualsIgnoreCase(header.name, name)) return header.value;
  }
  return std::nullopt;
}

Response ErrorResponse(int status, absl::string_view message) {
  Response response{.status = status, .content_type = "application/json", .body = "{\"error\":"};
  AppendJsonString(message, response.body);
  response.body += '}';
  return response;
}

Response ErrorResponse(const absl::Status& status) {
  Response response = ErrorResponse(HttpStatusOf(status), StatusMessage(status));
  if (response.status == 401) response.headers.push_back({"WWW-Authenticate", "Bearer"});
  if (response.status == 429 || response.status == 503) {
    response.headers.push_back({"Retry-After", "1"});
  }
  return response;
}

absl::string_view ReasonOf(int status) {
  for (const auto& [known, reason] : kReasonPhrases) {
    if (known == status) return reason;
  }
  return "Unknown";
}

}  // namespace rapt::http
