#include "server/wire/http/message.h"

#include "absl/strings/match.h"
#include "base/json_string.h"
#include "server/rejection.h"
#include "server/wire/status_message.h"

namespace rapt::http {
namespace {

constexpr int kClientClosedRequest = 499;  // as nginx names it; nobody reads the response

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
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case kClientClosedRequest:
      return "Client Closed Request";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Unknown";
  }
}

}  // namespace rapt::http
