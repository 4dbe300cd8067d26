#include "server/wire/http/router.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace rapt::http {
namespace {

constexpr absl::string_view kAny = "*";

bool Accepts(absl::string_view route_method, absl::string_view method) {
  return method == route_method || (route_method == "GET" && method == "HEAD");
}

// Decodes "%41"; nullopt if the encoding is invalid.
std::optional<std::string> Decode(absl::string_view segment) {
  std::string decoded;
  for (size_t i = 0; i < segment.size(); ++i) {
    if (segment[i] != '%') {
      decoded += segment[i];
      continue;
    }
    const absl::string_view digits = segment.substr(i + 1, 2);
    const bool is_valid =
        digits.size() == 2 && std::all_of(digits.begin(), digits.end(),
                                          [](unsigned char c) { return absl::ascii_isxdigit(c); });
    if (!is_valid) return std::nullopt;
    decoded += absl::HexStringToBytes(digits);
    i += digits.size();
  }
  return decoded;
}

// The same for a part of a query, where a plus stands for a space, as browsers write it.
std::optional<std::string> DecodeQuery(absl::string_view part) {
  return Decode(absl::StrReplaceAll(part, {{"+", "%20"}}));
}

// Returns the open segments of the path, or nullopt if it does not match.
std::optional<PathValues> Match(const std::vector<std::string>& pattern,
                                const std::vector<absl::string_view>& path) {
  if (pattern.size() != path.size()) return std::nullopt;
  PathValues values;
  for (size_t i = 0; i < path.size(); ++i) {
    if (pattern[i] != kAny) {
      if (pattern[i] != path[i]) return std::nullopt;
      continue;
    }
    std::optional<std::string> value = Decode(path[i]);
    if (!value || value->empty()) return std::nullopt;
    values.push_back(*std::move(value));
  }
  return values;
}

}  // namespace

absl::string_view PathOf(absl::string_view target) {
  if (absl::ConsumePrefix(&target, "http://") || absl::ConsumePrefix(&target, "https://")) {
    target.remove_prefix(std::min(target.find('/'), target.size()));
  }
  return target.substr(0, target.find('?'));
}

std::optional<Query> QueryOf(absl::string_view target) {
  const size_t begin = target.find('?');
  Query query;
  if (begin == absl::string_view::npos) return query;
  for (absl::string_view part : absl::StrSplit(target.substr(begin + 1), '&', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> sides =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    std::optional<std::string> name = DecodeQuery(sides.first);
    std::optional<std::string> value = DecodeQuery(sides.second);
    if (!name || !value) return std::nullopt;
    query.emplace_back(*std::move(name), *std::move(value));
  }
  return query;
}

void Router::Get(const std::string& path, Handler handler) {
  Add({.http_method = "GET", .pattern = path, .handler = std::move(handler)});
}

void Router::Add(const std::string& http_method, const std::string& pattern, CallMethod method) {
  Add({.http_method = http_method, .pattern = pattern, .method = std::move(method)});
}

void Router::Add(Route route) {
  route.segments = absl::StrSplit(route.pattern, '/');
  routes_.push_back(std::move(route));
}

Served Router::Find(const Request& request) const {
  const std::vector<absl::string_view> path = absl::StrSplit(PathOf(request.target), '/');
  std::vector<std::string> allowed;
  for (const Route& route : routes_) {
    std::optional<PathValues> values = Match(route.segments, path);
    if (!values) continue;
    if (Accepts(route.http_method, request.method)) {
      if (route.handler != nullptr) return route.handler(request);
      return CalledMethod{&route.method, *std::move(values)};
    }
    allowed.push_back(route.http_method == "GET" ? "GET, HEAD" : route.http_method);
  }
  if (allowed.empty()) return NotFound();
  const std::string methods = absl::StrJoin(allowed, ", ");
  Response response = ErrorResponse(405, absl::StrCat("the method must be one of ", methods));
  response.headers.push_back({"Allow", methods});
  return response;
}

Response Router::NotFound() const {
  std::vector<absl::string_view> paths;
  for (const Route& route : routes_) {
    if (std::find(paths.begin(), paths.end(), route.pattern) == paths.end()) {
      paths.emplace_back(route.pattern);
    }
  }
  return ErrorResponse(404,
                       absl::StrCat("unknown path; the paths are ", absl::StrJoin(paths, ", ")));
}

}  // namespace rapt::http
