// HTTP/1.1 as bytes, for tests of what no client library sends.
#ifndef RAPT_TESTS_SUPPORT_RAW_HTTP_H_
#define RAPT_TESTS_SUPPORT_RAW_HTTP_H_

#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/descriptor.h"
#include "tests/support/loopback.h"

namespace rapt::test {

struct RawResponse {
  int status = 0;  // 0: the connection was closed without one
  std::string head;
  std::string body;

  // Returns the value of a header; empty if there is none.
  std::string Value(absl::string_view name) const {
    const std::string lower = absl::AsciiStrToLower(head);
    const size_t begin = lower.find(absl::StrCat("\r\n", name, ": "));
    if (begin == std::string::npos) return "";
    const size_t value = begin + name.size() + 4;
    return head.substr(value, head.find('\r', value) - value);
  }
};

// A request with a body of known length.
inline std::string RequestText(absl::string_view method, absl::string_view target,
                               absl::string_view body = "", absl::string_view headers = "") {
  return absl::StrCat(method, " ", target,
                      " HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", body.size(), "\r\n",
                      headers, "\r\n", body);
}

class RawHttp {
 public:
  explicit RawHttp(const std::string& address, const std::string& from = "")
      : connection_(ConnectTo(address, from)) {}

  // Returns false if the server has closed the connection.
  bool Send(absl::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = send(connection_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
    return true;
  }

  // Reads the next response, 100 Continue as well. `has_body`: unless the request was HEAD.
  RawResponse Read(bool has_body = true) {
    RawResponse response;
    size_t end;
    while ((end = in_.find("\r\n\r\n")) == std::string::npos) {
      if (!Receive()) return response;
    }
    response.head = in_.substr(0, end + 4);
    in_.erase(0, end + 4);
    if (!absl::SimpleAtoi(response.head.substr(9, 3), &response.status)) response.status = -1;
    size_t length = 0;
    if (!has_body || !absl::SimpleAtoi(response.Value("content-length"), &length)) return response;
    while (in_.size() < length && Receive()) {
    }
    response.body = in_.substr(0, length);
    in_.erase(0, length);
    return response;
  }

  RawResponse Ask(absl::string_view request) {
    Send(request);
    return Read();
  }

  // Whether the server closes the connection without sending more.
  bool IsClosed() { return in_.empty() && !Receive(); }

  void EndWriting() const { shutdown(connection_.get(), SHUT_WR); }

 private:
  bool Receive() {
    char buffer[65536];
    const ssize_t count = recv(connection_.get(), buffer, sizeof(buffer), 0);
    if (count <= 0) return false;
    in_.append(buffer, static_cast<size_t>(count));
    return true;
  }

  const Descriptor connection_;
  std::string in_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAW_HTTP_H_
