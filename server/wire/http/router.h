#ifndef RAPT_SERVER_WIRE_HTTP_ROUTER_H_
#define RAPT_SERVER_WIRE_HTTP_ROUTER_H_

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/wire/http/call_method.h"
#include "server/wire/http/message.h"

namespace rapt::http {

// What serves a request: the method that it calls, or a response that needs no call.
struct CalledMethod {
  const CallMethod* method = nullptr;
  PathValues values;
};
using Served = std::variant<Response, CalledMethod>;

// Returns the path of a target: "/a" of "/a?b", and of "http://host/a?b", which proxies send.
absl::string_view PathOf(absl::string_view target);

// The names and values of a query, in its order.
using Query = std::vector<std::pair<std::string, std::string>>;

// Returns the query of a target: {{"b", "1 2"}} of "/a?b=1+2" or
// "/a?b=1%202"; nullopt if its encoding is invalid.
std::optional<Query> QueryOf(absl::string_view target);

// Chooses what serves a request by its path and method. Thread-safe after all calls of Get() and
// Add().
class Router {
 public:
  // Serves GET and HEAD of `path`, with any query, without a call. `handler` must be short.
  void Get(const std::string& path, Handler handler);

  // Serves calls. A segment "*" of the pattern matches any. The first pattern that matches a path
  // serves it, so "/a/b" is added before "/a/*". GET serves HEAD as well.
  void Add(const std::string& http_method, const std::string& pattern, CallMethod method);

  // Returns an error response, 404 or 405, for a request that nothing serves. The result refers to
  // this.
  Served Find(const Request& request) const;

 private:
  struct Route {
    std::string http_method;
    std::string pattern;
    Handler handler = nullptr;  // null: `method`
    CallMethod method = {};
    std::vector<std::string> segments = {};
  };

  void Add(Route route);
  Response NotFound() const;

  std::vector<Route> routes_;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_ROUTER_H_
