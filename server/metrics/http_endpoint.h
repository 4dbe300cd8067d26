// /metrics, /healthz and /readyz over HTTP.
#ifndef RAPT_SERVER_METRICS_HTTP_ENDPOINT_H_
#define RAPT_SERVER_METRICS_HTTP_ENDPOINT_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/metrics/metrics.h"

struct mg_connection;
struct mg_context;

namespace rapt {

// Serves from construction to destruction on its own threads. REQUIRES: everything borrowed
// outlives it.
class HttpEndpoint {
 public:
  // `address` is "host:port"; port 0 picks a free one. `is_ready` may be called from any thread.
  // Returns Unavailable if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const std::string& address,
                                                             const Metrics& metrics,
                                                             std::function<bool()> is_ready);
  ~HttpEndpoint();
  HttpEndpoint(const HttpEndpoint&) = delete;
  HttpEndpoint& operator=(const HttpEndpoint&) = delete;

  // Returns the bound port.
  int port() const;

 private:
  HttpEndpoint(std::string host, const Metrics& metrics, std::function<bool()> is_ready)
      : host_(std::move(host)), metrics_(metrics), is_ready_(std::move(is_ready)) {}

  void Stop();

  static int ServeMetrics(mg_connection* connection, void* endpoint);
  static int ServeHealth(mg_connection* connection, void* endpoint);
  static int ServeReadiness(mg_connection* connection, void* endpoint);

  const std::string host_;
  const Metrics& metrics_;
  const std::function<bool()> is_ready_;
  mg_context* context_ = nullptr;
};

}  // namespace rapt

#endif  // RAPT_SERVER_METRICS_HTTP_ENDPOINT_H_
