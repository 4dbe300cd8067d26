#include "server/wire/http/router.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace rapt::http {
namespace {

// Returns the path of a target: "/a" of "/a?b", and of "http://host/a?b", which proxies send.
absl::string_view PathOf(absl::string_view target) {
  if (absl::ConsumePrefix(&target, "http://")) {
    target.remove_prefix(std::min(target.find('/'), target.size()));
  }
  return target.substr(0, target.find('?'));
}

}  // namespace

void Router::Get(const std::string& path, Handler handler) { handlers_[path] = std::move(handler); }

Response Router::Route(const Request& request) const {
  const auto found = handlers_.find(PathOf(request.target));
  if (found == handlers_.end()) {
    const std::string paths = absl::StrJoin(
        handlers_, ", ", [](std::string* out, const auto& entry) { *out += entry.first; });
    return {.status = 404, .body = absl::StrCat("unknown path; the paths are ", paths, "\n")};
  }
  if (request.method == "GET" || request.method == "HEAD") return found->second(request);
  return {.status = 405,
          .body = "the method must be GET or HEAD\n",
          .headers = {{"Allow", "GET, HEAD"}}};
}

}  // namespace rapt::http
