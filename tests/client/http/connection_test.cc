#include "client/http/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/descriptor.h"
#include "client/http/target.h"
#include "tests/support/certificates.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Strings = std::vector<std::string>;

constexpr std::chrono::seconds kPatience{60};

// Answers each request with the next of its texts; "": closes the connection instead. `closes`:
// closes it after every answer.
class ScriptedServer {
 public:
  explicit ScriptedServer(Strings answers, bool closes = false)
      : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(name);
    bind(listener_.get(), reinterpret_cast<sockaddr*>(&name), size);
    listen(listener_.get(), 4);
    getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&name), &size);
    address_ = absl::StrCat("127.0.0.1:", ntohs(name.sin_port));
    thread_ = std::thread([this, answers = std::move(answers), closes] {
      for (const std::string& answer : answers) {
        if (connection_.get() < 0) {
          connection_ = Descriptor(accept(listener_.get(), nullptr, nullptr));
          ++connections;
        }
        requests.push_back(ReadRequest(connection_.get()));
        send(connection_.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
        if (answer.empty() || closes) connection_ = Descriptor();
      }
    });
  }
  ~ScriptedServer() {
    shutdown(listener_.get(), SHUT_RDWR);  // if the script has not ended
    Join();
  }

  const std::string& address() const { return address_; }
  // Waits until the script has ended.
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

  // After Join().
  Strings requests;
  int connections = 0;

 private:
  // Reads a head, and a body that ends with a full stop if its length is not 0.
  static std::string ReadRequest(int connection) {
    std::string text;
    char buffer[65536];
    for (;;) {
      const size_t end = text.find("\r\n\r\n");
      const bool has_body = text.find("Content-Length: 0\r\n") == std::string::npos;
      if (end != std::string::npos && (!has_body || text.back() == '.')) return text;
      const ssize_t count = recv(connection, buffer, sizeof(buffer), 0);
      if (count <= 0) return text;
      text.append(buffer, static_cast<size_t>(count));
    }
  }

  const Descriptor listener_;
  Descriptor connection_;
  std::string address_;
  std::thread thread_;
};

absl::StatusOr<HttpResponse> Get(HttpConnection& connection, const HttpTarget& target,
                                 absl::string_view path = "/") {
  return connection.Exchange(target.Head("GET", path), {}, kPatience);
}

TEST(HttpConnectionTest, SendsHeadAndBodyAndReadsTheResponse) {
  ScriptedServer server({"HTTP/1.1 200 OK\r\nContent-LENGTH: 5\r\nX-Name:  a b \r\n\r\nhello"});
  const auto target = HttpTarget::Make(server.address(), {});
  ASSERT_TRUE(target.ok());
  std::string first(1 << 20, 'x'), last = ".";
  HttpConnection connection(*target);
  const absl::StatusOr<HttpResponse> response = connection.Exchange(
      target->Head("POST", "/path", {{"A", "1"}}, first.size() + 1),
      {{first.data(), first.size()}, {nullptr, 0}, {last.data(), last.size()}}, kPatience);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->status, 200);
  EXPECT_EQ(response->body, "hello");
  EXPECT_EQ(response->Value("x-name"), "a b");
  EXPECT_EQ(response->Value("name"), "");
  server.Join();
  EXPECT_EQ(server.requests[0],
            absl::StrCat("POST /path HTTP/1.1\r\nHost: ", server.address(),
                         "\r\nContent-Length: 1048577\r\nA: 1\r\n\r\n", first, last));
}

TEST(HttpConnectionTest, KeepsTheConnectionAndReplacesAClosedOne) {
  constexpr char kOk[] = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
  constexpr char kLast[] = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx";
  ScriptedServer keeping({kOk, kOk, kLast});
  const auto target = HttpTarget::Make(keeping.address(), {});
  HttpConnection connection(*target);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Get(connection, *target).ok());
  EXPECT_EQ(connection.descriptor(), -1);
  keeping.Join();
  EXPECT_EQ(keeping.connections, 1);

  ScriptedServer closing({kOk, kOk}, /*closes=*/true);
  const auto other = HttpTarget::Make(closing.address(), {});
  HttpConnection replaced(*other);
  for (int i = 0; i < 2; ++i) {
    const absl::StatusOr<HttpResponse> response = Get(replaced, *other);
    ASSERT_TRUE(response.ok()) << response.status();
    // Until the end of the connection has arrived.
    char byte;
    while (i == 0 && recv(replaced.descriptor(), &byte, 1, MSG_PEEK) != 0) {
    }
  }
  closing.Join();
  EXPECT_EQ(closing.connections, 2);
}

TEST(HttpConnectionTest, ReportsWhatIsWrongWithAResponse) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "the server closed the connection"},
      {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", "the server closed the connection"},
      {"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nhello", "longer than its Content-Length"},
      {"HTTP/1.1 200 OK\r\n\r\n", "Content-Length is missing"},
      {"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "missing or too large"},
      {"SSH-2.0\r\n\r\n", "it is not HTTP/1.1"},
      {"HTTP/1.1\r\n\r\n", "it has no status"},
      {std::string(128 << 10, 'x'), "the head is too long"},
  };
  for (const auto& [answer, message] : cases) {
    ScriptedServer server({answer}, /*closes=*/true);
    const auto target = HttpTarget::Make(server.address(), {});
    HttpConnection connection(*target);
    const absl::Status status = Get(connection, *target).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << answer.substr(0, 64);
  }
}

TEST(HttpConnectionTest, GivesUpAfterTheTimeout) {
  ScriptedServer server({"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"});
  const auto target = HttpTarget::Make(server.address(), {});
  HttpConnection connection(*target);
  const absl::Status status =
      connection.Exchange(target->Head("GET", "/"), {}, std::chrono::milliseconds(1)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(connection.descriptor(), -1);
}

TEST(HttpConnectionTest, NamesAServerThatDoesNotListen) {
  std::string address;
  {
    ScriptedServer server({});
    address = server.address();
  }
  const auto target = HttpTarget::Make(address, {});
  HttpConnection connection(*target);
  const absl::Status status = Get(connection, *target).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(status.message(), absl::StrCat(address, ": Connection refused"));
}

// Where localhost is [::1], too, nothing listens there.
TEST(HttpConnectionTest, TriesEveryAddressOfAName) {
  ScriptedServer server({"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"});
  const size_t port = server.address().rfind(':');
  const auto target = HttpTarget::Make("localhost" + server.address().substr(port), {});
  ASSERT_TRUE(target.ok()) << target.status();
  HttpConnection connection(*target);
  const absl::StatusOr<HttpResponse> response = Get(connection, *target);
  EXPECT_TRUE(response.ok()) << response.status();
}

TEST(HttpConnectionTest, StatusOfAResponse) {
  EXPECT_TRUE(StatusOf({.status = 204}).ok());
  const absl::Status status =
      StatusOf({.status = 429, .body = R"({"error": "a \"queue\" is full"})"});
  EXPECT_EQ(status, absl::ResourceExhaustedError("a \"queue\" is full"));
  EXPECT_EQ(StatusOf({.status = 502, .body = "Bad gateway"}), absl::InternalError("Bad gateway"));
  EXPECT_TRUE(absl::IsNotFound(StatusOf({.status = 404})));
  EXPECT_TRUE(absl::IsDeadlineExceeded(StatusOf({.status = 504})));
}

TEST(HttpTargetTest, RefusesWhatItCannotUse) {
  const auto error = [](const std::string& address, const Options& options = {}) {
    return std::string(HttpTarget::Make(address, options).status().message());
  };
  EXPECT_THAT(error("unix:/tmp/socket"), HasSubstr("it must be HOST:PORT"));
  EXPECT_THAT(error("dns:///localhost:80"), HasSubstr("it must be HOST:PORT"));
  EXPECT_THAT(error("localhost"), HasSubstr("it must be HOST:PORT"));
  EXPECT_THAT(error("127.0.0.1:http-or-so"), HasSubstr("it must be HOST:PORT"));
  EXPECT_THAT(error("127.0.0.1:65536"), HasSubstr("it must be HOST:PORT"));
  EXPECT_THAT(error("rapt.invalid:80"), StartsWith("can't resolve"));
  EXPECT_THAT(error("127.0.0.1:80", {.token = "secret"}), HasSubstr("never sent in plain text"));
  EXPECT_THAT(error("127.0.0.1:80", {.tls = TlsOptions{.ca_file = "/none"}}),
              HasSubstr("the certificate authorities /none"));
  EXPECT_THAT(error("127.0.0.1:80", {.tls = TlsOptions{.cert_file = "/none"}}),
              HasSubstr("must be set together"));
}

TEST(HttpConnectionTest, UsesTlsAndAToken) {
  const test::ServerCertificate certificate;
  const std::string tokens = testing::TempDir() + "/http_tokens";
  std::ofstream(tokens) << "alice " << test::Sha256("secret") << "\n";
  Strings flags = certificate.Flags();
  flags.push_back("--token_file=" + tokens);
  test::ServerProcess server(flags);
  const TlsOptions tls{.ca_file = certificate.authority_file()};
  const auto status_with = [&](const Options& options) {
    const auto target = HttpTarget::Make(server.http_address(), options);
    EXPECT_TRUE(target.ok()) << target.status();
    HttpConnection connection(*target);
    const absl::StatusOr<HttpResponse> response = Get(connection, *target, "/v2");
    return response.ok() ? StatusOf(*response) : response.status();
  };
  EXPECT_EQ(status_with({.tls = tls, .token = "secret"}), absl::OkStatus());
  EXPECT_TRUE(absl::IsUnauthenticated(status_with({.tls = tls})));

  const auto refused = [&](const TlsOptions& options) {
    const auto target = HttpTarget::Make(server.http_address(), {.tls = options});
    HttpConnection connection(*target);
    return std::string(Get(connection, *target, "/v2").status().message());
  };
  TlsOptions other_name = tls;
  other_name.server_name = "example.org";
  EXPECT_THAT(refused(other_name), HasSubstr("trust the other's certificate"));
  const test::ServerCertificate stranger;
  EXPECT_THAT(refused({.ca_file = stranger.authority_file()}),
              HasSubstr("trust the other's certificate"));
}

}  // namespace
}  // namespace rapt::client
