#ifndef RAPT_SERVER_WIRE_HTTP_PAGES_H_
#define RAPT_SERVER_WIRE_HTTP_PAGES_H_

#include <functional>
#include <string>

#include "server/wire/http/router.h"

namespace rapt::http {

// Returns the routes of /metrics, /healthz and /readyz. `metrics_page` returns Prometheus' text
// format.
Router ProbeRoutes(std::function<std::string()> metrics_page, std::function<bool()> is_ready);

// Serves proto/openapi.json, which describes all paths, to anybody.
void AddOpenApi(Router& router);

// Serves the explorer page of server/web to anybody: the page at "/", its other files below
// "/explorer/". The calls of the page need a token as usual.
void AddExplorer(Router& router);

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_PAGES_H_
