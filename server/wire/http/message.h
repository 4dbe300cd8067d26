// HTTP messages as plain values.
#ifndef RAPT_SERVER_WIRE_HTTP_MESSAGE_H_
#define RAPT_SERVER_WIRE_HTTP_MESSAGE_H_

#include <functional>
#include <string>
#include <vector>

namespace rapt::http {

struct Header {
  std::string name;
  std::string value;
};

// The head of a request.
struct Request {
  std::string method;  // "GET"
  std::string target;  // as received: "/metrics?name=x"
  std::vector<Header> headers;
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

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_MESSAGE_H_
