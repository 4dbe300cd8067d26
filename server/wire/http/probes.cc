#include "server/wire/http/probes.h"

#include <utility>

namespace rapt::http {
namespace {

Response Uncached(Response response) {
  response.headers.push_back({"Cache-Control", "no-store"});
  return response;
}

}  // namespace

Router ProbeRoutes(std::function<std::string()> metrics_page, std::function<bool()> is_ready) {
  Router router;
  router.Get("/metrics", [metrics_page = std::move(metrics_page)](const Request&) {
    return Uncached(
        {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_page()});
  });
  router.Get("/healthz", [](const Request&) { return Uncached({.body = "ok\n"}); });
  router.Get("/readyz", [is_ready = std::move(is_ready)](const Request&) {
    return is_ready() ? Uncached({.body = "ready\n"})
                      : Uncached({.status = 503, .body = "not ready\n"});
  });
  return router;
}

}  // namespace rapt::http
