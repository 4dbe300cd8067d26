#include "server/wire/http/pages.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/wire/http/explorer_files.h"

namespace rapt::http {
namespace {

Response Uncached(Response response) {
  response.headers.push_back({"Cache-Control", "no-store"});
  return response;
}

constexpr absl::string_view kPage = "index.html";
constexpr absl::string_view kFolder = "/explorer/";

// The page loads its own files and calls its own server. Nothing frames it, and it frames nothing.
constexpr char kContentSecurityPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

// Whether a value of If-None-Match has the tag, by weak comparison (RFC 9110, 13.1.2).
bool HasTag(absl::string_view if_none_match, absl::string_view etag) {
  if (if_none_match == "*") return true;
  for (absl::string_view tag : absl::StrSplit(if_none_match, ',')) {
    if (absl::StripPrefix(absl::StripAsciiWhitespace(tag), "W/") == etag) return true;
  }
  return false;
}

Response FileResponse(absl::string_view name, const Request& request) {
  const absl::Span<const ExplorerFile> files = ExplorerFiles();
  const auto file = std::find_if(files.begin(), files.end(),
                                 [&](const ExplorerFile& f) { return f.name == name; });
  if (file == files.end()) {
    return ErrorResponse(404, absl::StrCat("the explorer has no file '", name, "'"));
  }
  Response response{.content_type = std::string(file->content_type),
                    .headers = {{"ETag", std::string(file->etag)},
                                {"Cache-Control", "no-cache"},  // asks whether the ETag is current
                                {"Content-Security-Policy", kContentSecurityPolicy},
                                {"X-Content-Type-Options", "nosniff"},
                                {"Referrer-Policy", "no-referrer"}}};
  if (HasTag(request.Value("if-none-match").value_or(""), file->etag)) {
    response.status = 304;
  } else {
    response.body = std::string(file->content);
  }
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

void AddExplorer(Router& router) {
  router.Get("/", [](const Request& request) { return FileResponse(kPage, request); });
  router.Get(absl::StrCat(kFolder, "*"), [](const Request& request) {
    return FileResponse(absl::StripPrefix(PathOf(request.target), kFolder), request);
  });
}

}  // namespace rapt::http
