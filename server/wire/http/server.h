// An HTTP/1.1 server for short requests without bodies.
#ifndef RAPT_SERVER_WIRE_HTTP_SERVER_H_
#define RAPT_SERVER_WIRE_HTTP_SERVER_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/wire/http/message.h"

namespace rapt::http {

struct ServerLimits {
  // Beyond this, the connection that has waited longest since its last response is closed.
  size_t max_connections = 128;
  // For a whole request head, a response, and the rest of the peer's bytes after the last response.
  std::chrono::milliseconds patience{5'000};
  // Between two requests.
  std::chrono::milliseconds idle{90'000};
};

// Serves from construction to destruction. One thread serves all connections and runs the handler,
// which must be short. A connection holds at most 32 KiB and one response. A request head has at
// most 8 KiB and 100 headers. Bodies are not read: a request with a body ends its connection.
class Server {
 public:
  // `address` is that of ListenOn(). An exception from `handler` becomes a response 500. Returns
  // Unavailable if the address can't be bound.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const std::string& address, Handler handler,
                                                       const ServerLimits& limits = {});
  // Closes all connections.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const;

 private:
  class Impl;

  explicit Server(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_SERVER_H_
