#include "server/wire/http/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "server/wire/http/pages.h"

namespace rapt::http {
namespace {

using ::testing::ElementsAre;

Router TwoRoutes() {
  Router router;
  router.Get("/a", [](const Request& request) { return Response{.body = request.target}; });
  router.Get("/b", [](const Request&) { return Response{.status = 503}; });
  return router;
}

Response ResponseOf(const Router& router, const std::string& method, const std::string& target) {
  const Served served = router.Find({.method = method, .target = target});
  return std::get<Response>(served);
}

TEST(RouterTest, ChoosesByPath) {
  const Router router = TwoRoutes();
  for (const char* target : {"/a", "/a?", "/a?b=c/d?e", "http://host:80/a", "http://[::1]/a?b"}) {
    EXPECT_EQ(ResponseOf(router, "GET", target).body, target);
    EXPECT_EQ(ResponseOf(router, "HEAD", target).body, target);
  }
  EXPECT_EQ(ResponseOf(router, "GET", "/b").status, 503);
}

TEST(RouterTest, AnUnknownPathIsNotFound) {
  const Router router = TwoRoutes();
  for (const char* target :
       {"", "/", "a", "/a/", "/A", "/%61", "*", "?/a", "http://a", "http://", "//a"}) {
    const Response response = ResponseOf(router, "GET", target);
    EXPECT_EQ(response.status, 404) << target;
    EXPECT_EQ(response.body, R"({"error":"unknown path; the paths are /a, /b"})");
  }
}

TEST(RouterTest, AnotherMethodIsNotAllowed) {
  for (const char* method : {"POST", "PUT", "OPTIONS", "get", "GETS", ""}) {
    const Response response = ResponseOf(TwoRoutes(), method, "/a");
    EXPECT_EQ(response.status, 405) << method;
    ASSERT_EQ(response.headers.size(), 1u);
    EXPECT_EQ(response.headers[0].name, "Allow");
    EXPECT_EQ(response.headers[0].value, "GET, HEAD");
  }
}

TEST(RouterTest, OpenSegmentsAreDecoded) {
  Router router;
  router.Add("GET", "/m/stats", {});
  router.Add("GET", "/m/*", {});
  router.Add("POST", "/m/*/versions/*/infer", {});
  const auto values = [&](const std::string& method, const std::string& target) {
    const Served served = router.Find({.method = method, .target = target});
    const auto* const called = std::get_if<CalledMethod>(&served);
    return called == nullptr ? PathValues{"none"} : called->values;
  };
  EXPECT_THAT(values("GET", "/m/stats"), ElementsAre());
  EXPECT_THAT(values("GET", "/m/a%20b%2Fc"), ElementsAre("a b/c"));
  EXPECT_THAT(values("POST", "/m/x/versions/1/infer?q"), ElementsAre("x", "1"));
  for (const char* target : {"/m/", "/m/%", "/m/%4", "/m/%4g", "/m/x/versions/1", "/m/x/y"}) {
    EXPECT_THAT(values("GET", target), ElementsAre("none")) << target;
  }
  EXPECT_EQ(ResponseOf(router, "POST", "/m/x").headers[0].value, "GET, HEAD");
}

TEST(RouterTest, AQueryHasNamesAndValues) {
  using Pair = std::pair<std::string, std::string>;
  EXPECT_THAT(QueryOf("/a").value(), ElementsAre());
  EXPECT_THAT(QueryOf("/a?").value(), ElementsAre());
  EXPECT_THAT(QueryOf("/a?b=1%202&c&&d=e=f&g+=%2B").value(),
              ElementsAre(Pair("b", "1 2"), Pair("c", ""), Pair("d", "e=f"), Pair("g ", "+")));
  EXPECT_EQ(QueryOf("/a?b=%4"), std::nullopt);
}

TEST(ProbeRoutesTest, ReadinessIsAskedEveryTime) {
  bool ready = false;
  const Router router = ProbeRoutes([] { return "page"; }, [&ready] { return ready; });
  EXPECT_EQ(ResponseOf(router, "GET", "/readyz").status, 503);
  EXPECT_EQ(ResponseOf(router, "GET", "/readyz").body, "not ready\n");
  ready = true;
  EXPECT_EQ(ResponseOf(router, "GET", "/readyz").status, 200);
  EXPECT_EQ(ResponseOf(router, "GET", "/healthz").status, 200);
  const Response page = ResponseOf(router, "GET", "/metrics");
  EXPECT_EQ(page.body, "page");
  ASSERT_EQ(page.headers.size(), 1u);
  EXPECT_EQ(page.headers[0].value, "no-store");
}

}  // namespace
}  // namespace rapt::http
