// HTTP messages as plain values.
#ifndef RAPT_SERVER_WIRE_HTTP_MESSAGE_H_
#define RAPT_SERVER_WIRE_HTTP_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/calls/call_headers.h"

namespace rapt::http {

struct Header {
  std::string name;
  std::string value;
};

// The head of a request.
struct Request {
  std::string method;  // "GET"
  std::string target;  // as received: "/metrics?name=x"
  std::vector<Header> headers = {};
  bool is_http11 = true;
  bool keeps_alive = true;  // the client expects further responses on the connection
  uint64_t content_length = 0;
  bool is_chunked = false;

  bool has_body() const { return is_chunked || content_length > 0; }
  // Returns the values of a header, in the order received. `name` is in lower case.
  HeaderValues Values(absl::string_view name) const;
  // Returns the first value.
  std::optional<absl::string_view> Value(absl::string_view name) const;
};

// The server adds Content-Length and Connection.
struct Response {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
  std::vector<Header> headers = {};
};

// Returns the response to a request. A HEAD request gets the response to GET; its body is not sent.
using Handler = std::function<Response(const Request&)>;

// Returns {"error": message} in JSON.
Response ErrorResponse(int status, absl::string_view message);

// Returns the error with the HTTP status that stands for the status of a call, and headers that
// belong to it.
Response ErrorResponse(const absl::Status& status);

// Returns "Not Found" for 404.
absl::string_view ReasonOf(int status);

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_MESSAGE_H_
