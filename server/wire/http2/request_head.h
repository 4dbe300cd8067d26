// The headers of a gRPC call over HTTP/2, and the values in them.
#ifndef RAPT_SERVER_WIRE_HTTP2_REQUEST_HEAD_H_
#define RAPT_SERVER_WIRE_HTTP2_REQUEST_HEAD_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "server/calls/call_headers.h"
#include "server/wire/timeout.h"

namespace rapt {

// The header block of a request, with the headers that the server reads.
class RequestHead {
 public:
  // Of names and values, as HTTP/2 counts them. Ample for names, a token and a trace context.
  static constexpr int64_t kMaxBytes = 16 * 1024;

  void Add(absl::string_view name, absl::string_view value);
  void Clear() { *this = {}; }

  // The other functions see only the headers received before the limit was exceeded.
  bool is_too_large() const { return bytes_ > kMaxBytes; }
  int64_t bytes() const { return bytes_; }

  const std::string& path() const { return path_; }
  bool is_post() const { return method_ == "POST"; }
  bool is_grpc() const;
  // Whether messages may be compressed.
  bool has_encoding() const { return !encoding_.empty() && encoding_ != "identity"; }
  // grpc-timeout; nullopt if it is invalid, nanoseconds::max() if there is none.
  std::optional<std::chrono::nanoseconds> timeout() const {
    return timeout_ ? ParseTimeout(*timeout_) : std::chrono::nanoseconds::max();
  }

  // The values point into this. The deadline is not set.
  CallHeaders ToCallHeaders() const;

 private:
  int64_t bytes_ = 0;
  std::string method_, path_, content_type_, encoding_;
  std::optional<std::string> timeout_;
  std::vector<std::string> authorization_, traceparent_;
};

// Percent-encodes bytes that a header can't carry, as gRPC does in grpc-message.
std::string PercentEncode(absl::string_view text);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_REQUEST_HEAD_H_
