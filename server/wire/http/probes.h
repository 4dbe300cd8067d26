#ifndef RAPT_SERVER_WIRE_HTTP_PROBES_H_
#define RAPT_SERVER_WIRE_HTTP_PROBES_H_

#include <functional>
#include <string>

#include "server/wire/http/router.h"

namespace rapt::http {

// Returns the routes of /metrics, /healthz and /readyz. `metrics_page` returns Prometheus' text
// format.
Router ProbeRoutes(std::function<std::string()> metrics_page, std::function<bool()> is_ready);

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_PROBES_H_
