#ifndef RAPT_SERVER_WIRE_HTTP_ROUTER_H_
#define RAPT_SERVER_WIRE_HTTP_ROUTER_H_

#include <functional>
#include <map>
#include <string>

#include "server/wire/http/message.h"

namespace rapt::http {

// Chooses the handler of a request by its path. Thread-safe after all calls of Get().
class Router {
 public:
  // Serves GET and HEAD of `path`, with any query.
  void Get(const std::string& path, Handler handler);

  // Returns 404 for an unknown path, 405 for another method.
  Response Route(const Request& request) const;

 private:
  std::map<std::string, Handler, std::less<>> handlers_;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_ROUTER_H_
