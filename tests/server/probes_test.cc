// The HTTP port of rapt-server: probes are answered whatever other clients do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/descriptor.h"
#include "base/host_limits.h"
#include "tests/support/loopback.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using std::chrono::milliseconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kProbe[] = "GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";

bool Send(const Descriptor& connection, const std::string& bytes) {
  return send(connection.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

// Reads until the server closes or nothing more arrives in time.
std::string ReadFor(const Descriptor& connection, milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  std::string received;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now());
    pollfd polled = {connection.get(), POLLIN, 0};
    if (left.count() <= 0 || poll(&polled, 1, static_cast<int>(left.count())) <= 0) return received;
    char buffer[4096];
    const ssize_t n = recv(connection.get(), buffer, sizeof(buffer), 0);
    if (n <= 0) return received;
    received.append(buffer, static_cast<size_t>(n));
  }
}

bool ProbeIsAnsweredWithin(const std::string& address, milliseconds time) {
  const Descriptor connection(ConnectTo(address));
  return Send(connection, kProbe) &&
         absl::StartsWith(ReadFor(connection, time), "HTTP/1.1 200 OK\r\n");
}

// Connections that each send `opening`, then a byte twice a second; renewed when the server closes
// them.
class SlowClients {
 public:
  SlowClients(std::string address, int count, std::string opening, bool sends_more)
      : address_(std::move(address)), opening_(std::move(opening)), sends_more_(sends_more) {
    for (int n = 0; n < count; ++n) connections_.push_back(Open());
    thread_ = std::thread([this] { Run(); });
  }
  ~SlowClients() {
    stopping_ = true;
    thread_.join();
  }
  SlowClients(const SlowClients&) = delete;
  SlowClients& operator=(const SlowClients&) = delete;

 private:
  Descriptor Open() const {
    Descriptor connection(ConnectTo(address_));
    Send(connection, opening_);
    return connection;
  }

  // Returns false if the server has closed the connection.
  bool GoOn(const Descriptor& connection) const {
    char buffer[4096];
    const ssize_t n = recv(connection.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) return false;
    return !sends_more_ || Send(connection, "x");
  }

  void Run() {
    for (size_t tick = 0; !stopping_; ++tick) {
      std::this_thread::sleep_for(milliseconds(50));
      for (size_t n = tick % 10; n < connections_.size(); n += 10) {
        if (!GoOn(connections_[n])) connections_[n] = Open();
      }
    }
  }

  const std::string address_;
  const std::string opening_;
  const bool sends_more_;
  std::vector<Descriptor> connections_;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

TEST(ProbesTest, SlowAndSilentClientsDelayNoProbe) {
  constexpr int kProbes = 1000;
  const ServerProcess server;
  const std::string& address = server.metrics_address();
  const SlowClients bodies(address, 16, "POST /metrics HTTP/1.1\r\nContent-Length: 999999\r\n\r\n",
                           /*sends_more=*/true);
  const SlowClients heads(address, 16, "GET /metrics HTTP/1.1\r\nx: ", /*sends_more=*/true);
  const SlowClients unread(address, 16, "GET /metrics HTTP/1.1\r\n\r\n", /*sends_more=*/false);
  const SlowClients silent(address, 64, "", /*sends_more=*/false);
  int late = 0;
  for (int n = 0; n < kProbes; ++n) {
    if (!ProbeIsAnsweredWithin(address, std::chrono::seconds(1))) ++late;
    ASSERT_LE(late, kProbes / 1000) << "after " << n + 1 << " probes";
    std::this_thread::sleep_for(milliseconds(5));
  }
}

TEST(ProbesTest, MoreSilentConnectionsThanTheServerKeepsDelayNoProbe) {
  const ServerProcess server;
  const std::string& address = server.metrics_address();
  const SlowClients silent(address, 400, "", /*sends_more=*/false);
  for (int n = 0; n < 100; ++n) {
    ASSERT_TRUE(ProbeIsAnsweredWithin(address, std::chrono::seconds(1))) << n;
  }
}

TEST(ProbesTest, AFloodOfAnAddressClosesNoConnectionOfOthers) {
  const ServerProcess server;
  const Descriptor other(ConnectTo(server.metrics_address(), "127.0.0.2"));
  std::vector<Descriptor> flood;
  for (int n = 0; n < 400; ++n) flood.emplace_back(ConnectTo(server.metrics_address()));
  ASSERT_TRUE(Send(flood.back(), kProbe));
  ASSERT_THAT(ReadFor(flood.back(), std::chrono::seconds(30)), StartsWith("HTTP/1.1 200 "));
  ASSERT_TRUE(Send(other, kProbe));
  EXPECT_THAT(ReadFor(other, std::chrono::seconds(30)), StartsWith("HTTP/1.1 200 "));
}

TEST(ProbesTest, HeadHasTheHeadOfGetAndNoBody) {
  const ServerProcess server;
  for (const char* path : {"/healthz", "/readyz", "/metrics", "/unknown"}) {
    const std::string get = HttpGet(server.metrics_address(), path);
    const std::string head =
        Exchange(server.metrics_address(), absl::StrCat("HEAD ", path, " HTTP/1.0\r\n\r\n"));
    EXPECT_THAT(head, EndsWith("\r\n\r\n")) << path;
    EXPECT_EQ(head.find("\r\n\r\n"), head.size() - 4) << path;
    EXPECT_EQ(head.substr(0, head.find('\r')), get.substr(0, get.find('\r'))) << path;
    EXPECT_THAT(head, HasSubstr("\r\nContent-Length: ")) << path;
  }
}

TEST(ProbesTest, AnswersProbesByPath) {
  const ServerProcess server;
  const std::string& address = server.metrics_address();
  EXPECT_THAT(HttpGet(address, "/healthz"), EndsWith("\r\n\r\nok\n"));
  EXPECT_THAT(HttpGet(address, "/readyz"), EndsWith("\r\n\r\nready\n"));
  const std::string page = HttpGet(address, "/metrics?collect=all");
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(page, HasSubstr("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(page, HasSubstr("\nrapt_ready 1\n"));
  EXPECT_THAT(HttpGet(address, "/"), StartsWith("HTTP/1.1 404 Not Found\r\n"));
}

TEST(ProbesTest, OtherMethodsAreNotAllowed) {
  const ServerProcess server;
  const std::string answer =
      Exchange(server.metrics_address(),
               "POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 405 Method Not Allowed\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nAllow: GET, HEAD\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nConnection: close\r\n"));
}

// The address in "... metrics=ADDRESS ...", of the line that the server prints when it is ready.
std::string AddressIn(const std::string& line, const std::string& name) {
  const std::vector<std::string> parts = absl::StrSplit(line, absl::StrCat(" ", name, "="));
  EXPECT_EQ(parts.size(), 2u) << line;
  return parts.back().substr(0, parts.back().find(' '));
}

std::string MetricsAddress(ChildProcess& server) { return AddressIn(server.ReadLine(), "metrics"); }

TEST(ProbesTest, ServesOnIpv6) {
  ChildProcess server(ServerCommand({"--grpc_address=127.0.0.1:0", "--metrics_address=[::1]:0"}));
  const std::string address = MetricsAddress(server);
  EXPECT_THAT(address, StartsWith("[::1]:"));
  EXPECT_TRUE(ProbeIsAnsweredWithin(address, std::chrono::seconds(30)));
}

TEST(ProbesTest, AllAddressesAreThoseOfBothFamilies) {
  ChildProcess server(
      ServerCommand({"--grpc_address=127.0.0.1:0", "--metrics_address=0.0.0.0:0", "--insecure"}));
  const std::string address = MetricsAddress(server);
  const std::string port = address.substr(address.rfind(':'));
  EXPECT_TRUE(ProbeIsAnsweredWithin("127.0.0.1" + port, std::chrono::seconds(30)));
  EXPECT_TRUE(ProbeIsAnsweredWithin("[::1]" + port, std::chrono::seconds(30)));
}

TEST(ProbesTest, IdleConnectionsLeaveDescriptorsToProbes) {
  RaiseDescriptorLimit();
  std::vector<std::string> command = {"/bin/sh", "-c", "ulimit -n 512 && exec \"$0\" \"$@\""};
  const std::vector<std::string> server_command =
      ServerCommand({"--grpc_address=127.0.0.1:0", "--http_address=127.0.0.1:0",
                     "--metrics_address=127.0.0.1:0"});
  command.insert(command.end(), server_command.begin(), server_command.end());
  ChildProcess server(command);
  const std::string ready = server.ReadLine();
  std::vector<Descriptor> idle;
  for (const char* name : {"grpc", "http"}) {
    const std::string address = AddressIn(ready, name);
    // Of several addresses, each of which may have a quarter.
    for (int n = 0; n < 600; ++n) {
      idle.emplace_back(ConnectTo(address, absl::StrCat("127.0.0.", 2 + n % 8)));
    }
  }
  for (int n = 0; n < 10; ++n) {
    EXPECT_TRUE(ProbeIsAnsweredWithin(AddressIn(ready, "metrics"), std::chrono::seconds(30))) << n;
  }
  EXPECT_THAT(server.Errors(), HasSubstr("--max_connections is 4096, but the limit of open"));
  EXPECT_THAT(server.Errors(), Not(HasSubstr("cannot accept connections")));
}

// The server can open no descriptors during its lifetime.
class NoDescriptors {
 public:
  explicit NoDescriptors(const ServerProcess& server) : pid_(server.pid()) {
    EXPECT_EQ(prlimit(pid_, RLIMIT_NOFILE, nullptr, &before_), 0);
    const rlimit none = {3, before_.rlim_max};
    EXPECT_EQ(prlimit(pid_, RLIMIT_NOFILE, &none, nullptr), 0);
  }
  ~NoDescriptors() { EXPECT_EQ(prlimit(pid_, RLIMIT_NOFILE, &before_, nullptr), 0); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  const pid_t pid_;
  rlimit before_ = {};
};

// Processor time of the server so far, in clock ticks.
int64_t TicksOf(const ServerProcess& server) {
  std::ifstream file(absl::StrCat("/proc/", server.pid(), "/stat"));
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(stat.rfind(')') + 2), ' ');  // from the third field on
  return std::stoll(fields[11]) + std::stoll(fields[12]);
}

TEST(ProbesTest, RecoversFromAMomentWithoutDescriptors) {
#ifdef RAPT_SANITIZED
  // UBSan checks the type of an object through a pipe, which needs descriptors.
  GTEST_SKIP() << "UBSan needs descriptors";
#endif
  const ServerProcess server;
  const Descriptor waiting(ConnectTo(server.metrics_address()));
  ASSERT_TRUE(Send(waiting, kProbe));
  ASSERT_THAT(ReadFor(waiting, std::chrono::seconds(30)), StartsWith("HTTP/1.1 200 "));
  const auto start = std::chrono::steady_clock::now();
  const Descriptor late = [&] {
    const NoDescriptors none(server);
    Descriptor connection(ConnectTo(server.metrics_address()));
    EXPECT_TRUE(Send(connection, kProbe));
    const int64_t before = TicksOf(server);
    EXPECT_EQ(ReadFor(connection, std::chrono::seconds(1)), "") << "it must be out of descriptors";
    EXPECT_LT(TicksOf(server) - before, sysconf(_SC_CLK_TCK) / 2) << "busy while it waits";
    return connection;
  }();
  EXPECT_THAT(ReadFor(late, std::chrono::seconds(30)), StartsWith("HTTP/1.1 200 "));
  EXPECT_TRUE(ProbeIsAnsweredWithin(server.metrics_address(), std::chrono::seconds(30)));
  const std::vector<std::string> around = absl::StrSplit(server.Log(), "cannot accept");
  const auto warnings = static_cast<int64_t>(around.size()) - 1;
  const auto seconds =
      std::chrono::ceil<std::chrono::seconds>(std::chrono::steady_clock::now() - start);
  EXPECT_GE(warnings, 1);
  EXPECT_LE(warnings, seconds.count()) << "at most one a second: " << server.Log();
}

}  // namespace
}  // namespace rapt::test
