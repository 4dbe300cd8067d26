// A connection of HTTP/1.1.
#ifndef RAPT_CLIENT_HTTP_CONNECTION_H_
#define RAPT_CLIENT_HTTP_CONNECTION_H_

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/descriptor.h"
#include "client/http/target.h"

using SSL = struct ssl_st;

namespace rapt::client {

struct HttpResponse {
  int status = 0;
  std::string head = {};  // its lines; names in lower case
  std::string body = {};

  // Returns the value of the first such header; empty if there is none. `name` is in lower case.
  absl::string_view Value(absl::string_view name) const;
};

// Returns OK for a status 2xx, else the status that stands for it in the Open Inference Protocol.
// Its message is that of {"error": message}, or the body.
absl::Status StatusOf(const HttpResponse& response);

// Carries one request after another and waits for nothing, except in Exchange(). Opens itself for a
// request if it is not open or the server has closed it meanwhile. Thread-compatible. With TLS, the
// process must ignore SIGPIPE: OpenSSL raises it where the server has closed the connection.
class HttpConnection {
 public:
  enum class Wait : uint8_t { kNothing, kReading, kWriting };

  // `target` outlives it.
  explicit HttpConnection(const HttpTarget& target) : target_(target) {}
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;
  ~HttpConnection();

  // Begins a request, whose body outlives it. REQUIRES: no request is in progress.
  void Start(std::string head, std::vector<iovec> body = {});
  // Continues the request as far as it can. Returns kNothing once the request has ended, else what
  // descriptor() must be ready for before the next call.
  Wait Continue();
  int descriptor() const { return socket_.get(); }  // may change with every call

  // Of the request that has ended. Unavailable if the server can't be reached or closes the
  // connection; Internal if the response is malformed.
  absl::StatusOr<HttpResponse> TakeResponse();

  // Ends the request without a response, and the connection.
  void Close();

  // Start() and Continue() until the request has ended. DeadlineExceeded after `timeout`.
  absl::StatusOr<HttpResponse> Exchange(std::string head, std::vector<iovec> body,
                                        std::chrono::nanoseconds timeout);

 private:
  enum class State : uint8_t { kIdle, kConnecting, kShaking, kSending, kReceiving };
  struct FreeSsl {
    void operator()(SSL* ssl) const;
  };

  bool IsClosed() const;
  bool Open();
  void BeginTls();
  // Each returns what it waits for; kNothing: it goes on.
  absl::StatusOr<Wait> Advance();
  absl::StatusOr<Wait> Connect();
  absl::StatusOr<Wait> TryNextName();
  absl::StatusOr<Wait> Shake();
  absl::StatusOr<Wait> Send();
  absl::StatusOr<Wait> Receive();

  absl::Status OnHead();
  // As readv() and sendmsg(); -1 sets `wait`, and 0 is the end of the connection.
  ssize_t Read(char* place, size_t size, Wait& wait);
  ssize_t Write(Wait& wait);
  ssize_t ResultOfTls(int result, Wait& wait);
  absl::Status Broken() const;

  const HttpTarget& target_;
  size_t name_ = 0;  // of the target's, to which it connects
  Descriptor socket_;
  std::unique_ptr<SSL, FreeSsl> tls_;

  State state_ = State::kIdle;
  std::string head_;
  std::vector<iovec> out_;  // with the head
  size_t sent_places_ = 0;  // of out_
  size_t sent_bytes_ = 0;   // of the next place
  bool has_head_ = false;
  size_t received_ = 0;  // bytes of the body
  HttpResponse response_;
  absl::Status status_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_HTTP_CONNECTION_H_
