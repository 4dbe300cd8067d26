#include "server/metrics/http_endpoint.h"

#include <civetweb.h>

#include <chrono>
#include <future>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"

namespace rapt {
namespace {

int Respond(mg_connection* connection, absl::string_view status, absl::string_view content_type,
            absl::string_view body) {
  const std::string response = absl::StrCat(
      "HTTP/1.1 ", status, "\r\nContent-Type: ", content_type, "\r\nContent-Length: ", body.size(),
      "\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n", body);
  mg_write(connection, response.data(), response.size());
  return 1;  // handled, even if the peer is gone
}

int RespondText(mg_connection* connection, absl::string_view status, absl::string_view text) {
  return Respond(connection, status, "text/plain; charset=utf-8", absl::StrCat(text, "\n"));
}

// The host of "[::1]:8002" is "::1".
std::string HostOf(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    return host.substr(1, host.size() - 2);
  }
  return host;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(const std::string& address,
                                                                  const Metrics& metrics,
                                                                  std::function<bool()> is_ready) {
  mg_init_library(0);
  std::unique_ptr<HttpEndpoint> endpoint(
      new HttpEndpoint(HostOf(address), metrics, std::move(is_ready)));
  // Each connection occupies a thread until it closes. With 16 threads and this timeout, probes get
  // through next to idle connections, within Kubernetes' default timeouts even if all threads wait.
  const char* options[] = {"listening_ports",    address.c_str(), "num_threads", "16",
                           "request_timeout_ms", "2000",          nullptr};
  const mg_callbacks callbacks = {};
  endpoint->context_ = mg_start(&callbacks, nullptr, options);
  if (endpoint->context_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
  }
  mg_set_request_handler(endpoint->context_, "/metrics", ServeMetrics, endpoint.get());
  mg_set_request_handler(endpoint->context_, "/healthz", ServeHealth, endpoint.get());
  mg_set_request_handler(endpoint->context_, "/readyz", ServeReadiness, endpoint.get());
  return endpoint;
}

HttpEndpoint::~HttpEndpoint() {
  if (context_ != nullptr) Stop();
  mg_exit_library();
}

// civetweb checks for a stop on each connection, otherwise every two seconds: so this connects.
void HttpEndpoint::Stop() {
  const int port_number = port();
  const auto stopped = std::async(std::launch::async, [this] { mg_stop(context_); });
  while (stopped.wait_for(std::chrono::milliseconds(5)) != std::future_status::ready) {
    char error[128];
    mg_connection* wakeup =
        mg_connect_client(host_.c_str(), port_number, /*use_ssl=*/0, error, sizeof(error));
    if (wakeup != nullptr) mg_close_connection(wakeup);
  }
}

int HttpEndpoint::port() const {
  mg_server_port port = {};
  RAPT_CHECK(mg_get_server_ports(context_, 1, &port) == 1, "a running server has a port");
  return port.port;
}

int HttpEndpoint::ServeMetrics(mg_connection* connection, void* endpoint) {
  return Respond(connection, "200 OK", "text/plain; version=0.0.4; charset=utf-8",
                 static_cast<HttpEndpoint*>(endpoint)->metrics_.Serialize());
}

int HttpEndpoint::ServeHealth(mg_connection* connection, void*) {
  return RespondText(connection, "200 OK", "ok");
}

int HttpEndpoint::ServeReadiness(mg_connection* connection, void* endpoint) {
  if (static_cast<HttpEndpoint*>(endpoint)->is_ready_()) {
    return RespondText(connection, "200 OK", "ready");
  }
  return RespondText(connection, "503 Service Unavailable", "not ready");
}

}  // namespace rapt
