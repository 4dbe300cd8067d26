#include "server/wire/http/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "tests/support/loopback.h"

namespace rapt::http {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kGet[] = "GET /echo HTTP/1.1\r\nHost: h\r\n\r\n";
constexpr size_t kLargeBytes = 64 << 20;  // more than the kernel buffers
constexpr char kGetLarge[] = "GET /large HTTP/1.1\r\nHost: h\r\n\r\n";

// Answers with what it understood of the request.
Served Echo(const Request& request) {
  if (request.target == "/throw") throw std::runtime_error("planted");
  if (request.target == "/large") return Response{.body = std::string(kLargeBytes, 'x')};
  std::string text = absl::StrCat(request.method, " ", request.target, "\n");
  for (const Header& header : request.headers) {
    absl::StrAppend(&text, header.name, "=", header.value, "\n");
  }
  return Response{.body = text};
}

const SteadyClock kClock;

class HttpServerTest : public ::testing::Test {
 protected:
  explicit HttpServerTest(const ConnectionSettings& connection = {.patience = seconds(60)},
                          int64_t max_connections = 128)
      : server_(*Server::Start({.address = "127.0.0.1:0",
                                .max_connections = max_connections,
                                .connection = connection},
                               Echo, kClock)) {}

  std::string address() const { return absl::StrCat("127.0.0.1:", server_->port()); }

  std::string Exchange(const std::string& bytes) const { return test::Exchange(address(), bytes); }

  const std::unique_ptr<Server> server_;
};

// A connection that stays open for writing.
class Client {
 public:
  explicit Client(const std::string& address, const std::string& from = "")
      : connection_(test::ConnectTo(address, from)) {}

  bool Send(const std::string& bytes) const {
    return send(connection_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }

  // Reads until `text` has arrived or the server has closed the connection.
  std::string ReadUntil(const std::string& text) const {
    std::string received;
    char buffer[65536];
    while (!absl::StrContains(received, text)) {
      const ssize_t n = recv(connection_.get(), buffer, sizeof(buffer), 0);
      if (n <= 0) break;
      received.append(buffer, static_cast<size_t>(n));
    }
    return received;
  }

  size_t CountUntilClosed() const {
    size_t count = 0;
    char buffer[65536];
    for (ssize_t n; (n = recv(connection_.get(), buffer, sizeof(buffer), 0)) > 0;) {
      count += static_cast<size_t>(n);
    }
    return count;
  }

  bool IsOpen() const {
    char byte;
    return recv(connection_.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }

 private:
  const Descriptor connection_;
};

// --- Answers -------------------------------------------------------------------------------------

TEST_F(HttpServerTest, RespondsWithTheHandlersResponse) {
  EXPECT_EQ(Exchange("GET /a?b HTTP/1.1\r\nHost: h\r\nx-y:  z \r\nConnection: close\r\n\r\n"),
            "HTTP/1.1 200 OK\r\n"
            "Content-Type: text/plain; charset=utf-8\r\n"
            "Content-Length: 39\r\n"
            "Connection: close\r\n"
            "\r\n"
            "GET /a?b\nHost=h\nx-y=z\nConnection=close\n");
}

TEST_F(HttpServerTest, ServesManyRequestsOnOneConnection) {
  const Client client(address());
  for (int n = 0; n < 100; ++n) {
    ASSERT_TRUE(client.Send(absl::StrCat("GET /", n, " HTTP/1.1\r\nHost: h\r\n\r\n")));
    EXPECT_THAT(client.ReadUntil(absl::StrCat("GET /", n, "\n")), Not(HasSubstr("close")));
  }
}

TEST_F(HttpServerTest, AnswersPipelinedRequestsInOrderAfterAHalfClose) {
  std::string requests, expected;
  for (int n = 0; n < 1000; ++n) {
    absl::StrAppend(&requests, "GET /", n, " HTTP/1.1\r\nHost: h\r\n\r\n");
    absl::StrAppend(&expected, "GET /", n, "\n");
  }
  std::string bodies;
  for (const absl::string_view line : absl::StrSplit(Exchange(requests), '\n')) {
    if (absl::StartsWith(line, "GET ")) absl::StrAppend(&bodies, line, "\n");
  }
  EXPECT_EQ(bodies, expected);
}

TEST_F(HttpServerTest, AHeadMayArriveByteByByte) {
  const Client client(address());
  for (const char byte : std::string(kGet)) ASSERT_TRUE(client.Send(std::string(1, byte)));
  EXPECT_THAT(client.ReadUntil("GET /echo\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpServerTest, EndsConnectionsOfHttp10AndWhenAsked) {
  for (const char* request :
       {"GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"}) {
    const Client client(address());
    ASSERT_TRUE(client.Send(request));
    EXPECT_THAT(client.ReadUntil("until closed"), HasSubstr("\r\nConnection: close\r\n"));
  }
}

TEST_F(HttpServerTest, HeadHasTheLengthOfTheBodyThatGetWouldHave) {
  const std::string answer =
      Exchange("HEAD /x HTTP/1.1\r\nHost: h\r\n\r\nGET /y HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_THAT(answer, HasSubstr("\r\nContent-Length: 15\r\n\r\nHTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, EndsWith("GET /y\nHost=h\n"));
}

TEST_F(HttpServerTest, ABodyEndsTheConnectionUnread) {
  for (const char* framing : {"Content-Length: 576460752303423487", "Transfer-Encoding: chunked",
                              "Content-Length: 30\r\nExpect: 100-continue"}) {
    const std::string answer =
        Exchange(absl::StrCat("POST /a HTTP/1.1\r\nHost: h\r\n", framing,
                              "\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"));
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(answer, HasSubstr("\r\nConnection: close\r\n"));
    EXPECT_THAT(answer, Not(HasSubstr("smuggled")));
  }
}

TEST_F(HttpServerTest, AClientThatSendsALargeBodyGetsItsResponse) {
  const Client client(address());
  ASSERT_TRUE(client.Send("POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 40000\r\n\r\n"));
  ASSERT_TRUE(client.Send(std::string(40000, 'x')));
  EXPECT_THAT(client.ReadUntil("until closed"), HasSubstr("POST /a\n"));
}

TEST_F(HttpServerTest, AHandlersExceptionIsAnErrorOfTheServer) {
  EXPECT_THAT(Exchange("GET /throw HTTP/1.1\r\nHost: h\r\n\r\n"),
              StartsWith("HTTP/1.1 500 Internal Server Error\r\n"));
  EXPECT_THAT(Exchange(kGet), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpServerTest, AnAddressInUseIsUnavailable) {
  const auto second = Server::Start({.address = address()}, Echo, kClock);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(address()));
}

TEST(HttpServerEndTest, ClosesOpenConnections) {
  auto server = *Server::Start({.address = "127.0.0.1:0"}, Echo, kClock);
  const std::string address = absl::StrCat("127.0.0.1:", server->port());
  const Client silent(address), reading(address), idle(address);
  ASSERT_TRUE(reading.Send(kGetLarge));
  ASSERT_TRUE(idle.Send(kGet));
  idle.ReadUntil("GET /echo\n");
  server.reset();
  EXPECT_EQ(silent.CountUntilClosed(), 0u);
  EXPECT_LT(reading.CountUntilClosed(), kLargeBytes);
  EXPECT_EQ(idle.CountUntilClosed(), 0u);
}

// --- Malformed requests --------------------------------------------------------------------------

TEST_F(HttpServerTest, RejectsMalformedRequestsAtOnce) {
  const std::string requests[] = {
      "\r\n\r\n",
      "GET\r\n\r\n",
      "GET /\r\n\r\n",
      "GET / HTTP/1.1\n\n",
      "G\x01T / HTTP/1.1\r\nHost: h\r\n\r\n",
      "GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
      std::string("GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n", 28),
      "GET / HTTP/1.1\r\nHost : h\r\n\r\n",
      "GET / HTTP/1.1\r\nno colon\r\n\r\n",
      "GET / HTTP/1.1\r\n: no name\r\n\r\n",
      "GET / HTTP/1.1\r\nx: \x01\r\n\r\n",
      "GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
      "GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
      "GET / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\nx",
      "GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
      "GET / HTTP/1.1\r\nContent-Length: 18446744073709551616\r\n\r\n",
      "GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
      "\x16\x03\x01\x02\x01\x01\x01\xfc\x03\x03",  // TLS
  };
  for (const std::string& request : requests) {
    const Client client(address());  // and no half-close
    ASSERT_TRUE(client.Send(request));
    EXPECT_THAT(client.ReadUntil("until closed"), StartsWith("HTTP/1.1 400 Bad Request\r\n"))
        << request;
  }
}

TEST_F(HttpServerTest, SaysWhichVersionsItSpeaks) {
  for (const char* request :
       {"GET / HTTP/2.0\r\n\r\n", "GET / HTTP/0.9\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"}) {
    EXPECT_THAT(Exchange(request), StartsWith("HTTP/1.1 505 HTTP Version Not Supported\r\n"));
  }
}

TEST_F(HttpServerTest, RejectsWhatAHeadAsksFor) {
  const std::pair<const char*, int> cases[] = {
      {"x: y", 400},  // no host
      {"Host: a\r\nHost: a", 400},
      {"Host: a\r\nTransfer-Encoding: gzip, chunked", 501},
      {"Host: a\r\nTransfer-Encoding: gzip", 501},
      {"Host: a\r\nContent-Encoding: gzip", 415},
      {"Host: a\r\nExpect: tea", 417},
  };
  for (const auto& [headers, status] : cases) {
    const std::string answer = Exchange(
        absl::StrCat("POST /a HTTP/1.1\r\n", headers, "\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"));
    EXPECT_THAT(answer, StartsWith(absl::StrCat("HTTP/1.1 ", status, " "))) << headers;
    EXPECT_THAT(answer, Not(HasSubstr("smuggled")));
  }
}

TEST_F(HttpServerTest, AnUpgradeIsNotMade) {
  EXPECT_THAT(Exchange("GET /echo HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\n"
                       "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
}

// A request whose head has this many bytes.
std::string RequestOf(size_t bytes) {
  const std::string begin = "GET / HTTP/1.1\r\nHost: h\r\nx: ", end = "\r\n\r\n";
  return begin + std::string(bytes - begin.size() - end.size(), 'x') + end;
}

TEST_F(HttpServerTest, RejectsALargeHead) {
  EXPECT_THAT(Exchange(RequestOf(16384)), StartsWith("HTTP/1.1 200 OK\r\n"));
  for (const std::string& request :
       {RequestOf(16385), RequestOf(60000), "GET /" + std::string(60000, 'x'),
        std::string(60000, 'G'), RequestOf(100) + RequestOf(16385)}) {
    const std::string answer = Exchange(request);
    EXPECT_THAT(answer, HasSubstr("HTTP/1.1 431 Request Header Fields Too Large\r\n"));
    EXPECT_THAT(answer, EndsWith("the head must have at most 16384 bytes and 100 headers\"}"));
  }
}

TEST_F(HttpServerTest, RejectsManyHeaders) {
  const auto request = [](int headers) {
    std::string text = "GET / HTTP/1.1\r\nHost: h\r\n";
    for (int n = 1; n < headers; ++n) text += "x:\r\n";
    return text + "\r\n";
  };
  EXPECT_THAT(Exchange(request(100)), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Exchange(request(101)), StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpServerTest, GarbageLeavesNothingBehind) {
  const std::string valid = "GET /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n";
  std::mt19937 random(7);
  for (int n = 0; n < 500; ++n) {
    std::string bytes = valid + valid + valid;
    for (int change = 0; change < 1 + n % 8; ++change) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    Exchange(bytes.substr(0, random() % bytes.size()));
    std::string noise(random() % 20000, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    const Client client(address());
    client.Send(noise);  // the server may close before it has all
  }
  EXPECT_THAT(Exchange(kGet), StartsWith("HTTP/1.1 200 OK\r\n"));
}

// --- Limits --------------------------------------------------------------------------------------

class ImpatientServerTest : public HttpServerTest {
 protected:
  ImpatientServerTest() : HttpServerTest({.patience = milliseconds(200), .idle = seconds(60)}) {}
};

TEST_F(ImpatientServerTest, ASilentClientIsClosed) {
  EXPECT_EQ(Client(address()).CountUntilClosed(), 0u);
}

// With a deadline for each read, only the limit of a head's size would end it.
TEST_F(ImpatientServerTest, AHeadHasOneDeadline) {
  constexpr int kMostBytes = 1000;  // the deadline allows about ten
  const Client client(address());
  ASSERT_TRUE(client.Send("GET / HTTP/1.1\r\nHost: h\r\nx: "));
  for (int sent = 0; client.IsOpen() && sent < kMostBytes; ++sent) {
    client.Send("x");
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_FALSE(client.IsOpen());
}

TEST_F(ImpatientServerTest, AHeadThatFollowsAnotherHasItsOwnDeadline) {
  const Client client(address());
  for (int n = 0; n < 2; ++n) {
    ASSERT_TRUE(client.Send(kGet));
    EXPECT_THAT(client.ReadUntil("GET /echo\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
    std::this_thread::sleep_for(milliseconds(400));  // idle is not slow
  }
  ASSERT_TRUE(client.Send("GET"));
  EXPECT_THAT(client.ReadUntil("until closed"), StartsWith("HTTP/1.1 408 Request Timeout\r\n"));
}

TEST_F(ImpatientServerTest, ABodyThatTricklesIsNotAwaited) {
  const Client client(address());
  ASSERT_TRUE(client.Send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n"));
  EXPECT_THAT(client.ReadUntil("POST /\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  // The kernel resets a connection that is closed, which fails a later send.
  while (client.Send("x")) std::this_thread::sleep_for(milliseconds(20));
}

TEST_F(ImpatientServerTest, AClientThatDoesNotReadIsClosed) {
  const Client client(address());
  ASSERT_TRUE(client.Send(kGetLarge));
  std::this_thread::sleep_for(seconds(2));
  EXPECT_LT(client.CountUntilClosed(), kLargeBytes);
}

class IdleServerTest : public HttpServerTest {
 protected:
  IdleServerTest() : HttpServerTest({.patience = seconds(60), .idle = milliseconds(100)}) {}
};

TEST_F(IdleServerTest, AnIdleConnectionIsClosed) {
  const Client client(address());
  ASSERT_TRUE(client.Send(kGet));
  EXPECT_THAT(client.ReadUntil("until closed"), EndsWith("GET /echo\nHost=h\n"));
}

class SmallServerTest : public HttpServerTest {
 protected:
  SmallServerTest() : HttpServerTest({.patience = seconds(60)}, 3) {}
};

TEST_F(SmallServerTest, ANewConnectionReplacesTheOneLongestWithoutAResponse) {
  std::vector<std::unique_ptr<Client>> clients;
  const auto connect = [&] { clients.push_back(std::make_unique<Client>(address())); };
  // With a response each, so that the server has accepted them in this order.
  const auto ask = [](const Client& client) {
    client.Send(kGet);
    return absl::StartsWith(client.ReadUntil("GET /echo\n"), "HTTP/1.1 200 OK\r\n");
  };
  for (int n = 0; n < 3; ++n) {
    connect();
    ASSERT_TRUE(ask(*clients[n]));
  }
  ASSERT_TRUE(ask(*clients[0]));
  connect();
  ASSERT_TRUE(ask(*clients[3]));
  EXPECT_EQ(clients[1]->CountUntilClosed(), 0u);
  EXPECT_TRUE(clients[0]->IsOpen());
  EXPECT_TRUE(clients[2]->IsOpen());
  connect();
  ASSERT_TRUE(ask(*clients[4]));
  EXPECT_EQ(clients[2]->CountUntilClosed(), 0u);
}

TEST_F(SmallServerTest, ServesThroughAFloodOfConnections) {
  std::atomic<bool> answered = false;
  std::vector<std::thread> flood;
  for (int n = 0; n < 3; ++n) {
    flood.emplace_back([&] {
      while (!answered) Client(address()).Send("GET /");
    });
  }
  while (!answered) {
    const Client client(address());  // may be replaced before it has sent its request
    client.Send(kGet);
    answered = absl::StartsWith(client.ReadUntil("GET /echo\n"), "HTTP/1.1 200 OK\r\n");
  }
  for (std::thread& thread : flood) thread.join();
}

// Servers with a limit of connections.
class HttpServerLimitTest : public ::testing::Test {
 protected:
  void Start(int threads, int most, int most_per_address) {
    server_ = *Server::Start({.address = "127.0.0.1:0",
                              .threads = threads,
                              .max_connections = most,
                              .max_connections_per_address = most_per_address,
                              .connection = {.patience = seconds(60)}},
                             Echo, kClock);
    address_ = absl::StrCat("127.0.0.1:", server_->port());
  }

  // Returns once each thread has ended its turn: a client has its response before its wait begins.
  void WaitForTurns(int threads) {
    std::latch ended(threads);
    for (int n = 0; n < threads; ++n) server_->Post([&ended] { ended.count_down(); });
    ended.wait();
  }

  static void ExpectResponse(const Client& client, size_t n) {
    client.Send(kGet);
    EXPECT_THAT(client.ReadUntil("GET /echo\n"), StartsWith("HTTP/1.1 200 OK\r\n")) << n;
  }

  std::unique_ptr<Server> server_;
  std::string address_;
};

TEST_F(HttpServerLimitTest, AnAddressAtItsLimitReplacesNoOther) {
  Start(/*threads=*/1, 4, 2);
  const Client other(address_, "127.0.0.2"), second(address_, "127.0.0.2");
  ExpectResponse(other, 0);
  ExpectResponse(second, 1);
  std::vector<std::unique_ptr<Client>> clients;
  for (int n = 0; n < 2; ++n) clients.push_back(std::make_unique<Client>(address_));
  for (int n = 0; n < 2; ++n) {
    const Client refused(address_);
    EXPECT_EQ(refused.ReadUntil("\n"), "");
  }
  ExpectResponse(other, 2);
  ExpectResponse(second, 3);
}

// An address at its limit on one thread has connections left on the others.
TEST_F(HttpServerLimitTest, LimitsAreThoseOfAllThreads) {
  constexpr int kThreads = 8;
  Start(kThreads, 128, kThreads + 1);
  const Client kept(address_);
  for (int n = 0; n < 3 * kThreads; ++n) {
    const Client client(address_);
    ExpectResponse(client, n);
  }
}

// A full server closes a waiting connection, whichever thread serves it.
TEST_F(HttpServerLimitTest, AFullServerReplacesAConnectionOfAnyThread) {
  constexpr int kThreads = 4;
  Start(kThreads, kThreads, kThreads);
  std::vector<std::unique_ptr<Client>> clients;
  for (int n = 0; n < 4 * kThreads; ++n) {
    clients.push_back(std::make_unique<Client>(address_));
    ExpectResponse(*clients.back(), n);
  }
}

TEST_F(HttpServerLimitTest, TheLongestWaitOfAllThreadsEndsFirst) {
  constexpr int kThreads = 3;
  constexpr int kConnections = 4 * kThreads;
  Start(kThreads, kConnections, kConnections);
  std::vector<std::unique_ptr<Client>> clients;
  for (int n = 0; n < 3 * kConnections; ++n) {
    clients.push_back(std::make_unique<Client>(address_));
    ExpectResponse(*clients.back(), n);
    WaitForTurns(kThreads);
    const int oldest = std::max(0, n + 1 - kConnections);
    for (int replaced = 0; replaced < oldest; ++replaced) {
      EXPECT_EQ(clients[replaced]->CountUntilClosed(), 0u);
    }
    for (int kept = oldest; kept < n; ++kept) {
      EXPECT_TRUE(clients[kept]->IsOpen()) << kept << " of " << n;
    }
  }
}

// New connections don't replace each other while another one has waited longer.
TEST_F(HttpServerLimitTest, ABurstReplacesTheLongestWaits) {
  constexpr int kThreads = 3;
  constexpr int kConnections = 16 * kThreads;
  Start(kThreads, kConnections, kConnections);
  std::vector<std::unique_ptr<Client>> clients;
  const auto connect = [&](int count) {
    for (int n = 0; n < count; ++n) clients.push_back(std::make_unique<Client>(address_));
  };
  for (size_t n = 0; n < kConnections; ++n) {
    connect(1);
    ExpectResponse(*clients[n], n);
    WaitForTurns(kThreads);
  }
  connect(kConnections);
  for (size_t n = kConnections; n < clients.size(); ++n) ExpectResponse(*clients[n], n);
  for (size_t n = 0; n < kConnections; ++n) EXPECT_EQ(clients[n]->CountUntilClosed(), 0u) << n;
}

// A flood replaces its own connections, whichever threads open them.
TEST_F(HttpServerLimitTest, AnAddressWithTheMostConnectionsReplacesItsOwn) {
  constexpr int kThreads = 4, kOthers = 6, kOwn = 2, kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    Start(kThreads, kOthers + kOwn, kOthers + kOwn);
    std::vector<std::unique_ptr<Client>> others, own;
    for (int n = 0; n < kOthers; ++n) {
      others.push_back(std::make_unique<Client>(address_, absl::StrCat("127.0.0.", 2 + n)));
      ExpectResponse(*others.back(), n);
    }
    for (int n = 0; n < kOwn; ++n) {
      own.push_back(std::make_unique<Client>(address_));
      ExpectResponse(*own.back(), n);
    }
    std::latch connected(1);
    for (int n = 0; n < kThreads; ++n) server_->Post([&connected] { connected.wait(); });
    for (int n = 0; n < 4 * kThreads; ++n) own.push_back(std::make_unique<Client>(address_));
    connected.count_down();
    do {  // threads open the flood's connections in any order: a late one may replace this one
      own.push_back(std::make_unique<Client>(address_));
      own.back()->Send(kGet);
    } while (own.back()->ReadUntil("GET /echo\n").empty());
    WaitForTurns(kThreads);
    for (int n = 0; n < kOthers; ++n) ExpectResponse(*others[n], n);
  }
}

TEST_F(HttpServerLimitTest, OfAddressesWithAsManyConnectionsTheLongestWaitEnds) {
  Start(/*threads=*/1, 3, 3);
  std::vector<std::unique_ptr<Client>> clients;
  for (int n = 0; n < 4; ++n) {
    clients.push_back(std::make_unique<Client>(address_, absl::StrCat("127.0.0.", 2 + n)));
    ExpectResponse(*clients.back(), n);
  }
  EXPECT_EQ(clients[0]->CountUntilClosed(), 0u);
  for (int n = 1; n < 4; ++n) ExpectResponse(*clients[n], n);
}

TEST(HeldBytesTest, AnAddressThatReadsNothingLosesItsOwnResponses) {
  const auto server = *Server::Start({.address = "127.0.0.1:0",
                                      .max_held_bytes = 5 * kLargeBytes / 2,
                                      .connection = {.patience = seconds(60)}},
                                     Echo, kClock);
  const std::string address = absl::StrCat("127.0.0.1:", server->port());
  const Client other(address, "127.0.0.2");
  ASSERT_TRUE(other.Send(kGetLarge));
  other.ReadUntil("\n");
  std::vector<std::unique_ptr<Client>> hoarders;
  for (int n = 0; n < 4; ++n) {
    hoarders.push_back(std::make_unique<Client>(address));
    ASSERT_TRUE(
        hoarders.back()->Send("GET /large HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
    hoarders.back()->ReadUntil("\n");  // the response has begun
  }
  for (int n = 0; n < 3; ++n) EXPECT_LT(hoarders[n]->CountUntilClosed(), kLargeBytes / 2) << n;
  ASSERT_TRUE(other.Send("GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
  EXPECT_GT(other.CountUntilClosed(), kLargeBytes / 2) << "the whole response";
}

TEST(HeldBytesTest, AResponseMayBeLargerThanTheLimit) {
  const auto server = *Server::Start(
      {.address = "127.0.0.1:0", .max_held_bytes = 1, .connection = {.patience = seconds(60)}},
      Echo, kClock);
  const Client client(absl::StrCat("127.0.0.1:", server->port()));
  ASSERT_TRUE(client.Send(kGetLarge));
  ASSERT_TRUE(client.Send("GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
  EXPECT_GT(client.CountUntilClosed(), kLargeBytes);
}

class SingleServerTest : public HttpServerTest {
 protected:
  SingleServerTest() : HttpServerTest({.patience = seconds(60)}, 1) {}
};

// A connection may be closed for a new one while its request or response has just completed.
TEST_F(SingleServerTest, AConnectionMayBeReplacedAsItIsServed) {
  for (int n = 0; n < 2000; ++n) {
    const Client first(address());
    ASSERT_TRUE(first.Send(absl::StrCat(kGet, kGet)));
    const Client second(address());
  }
  EXPECT_THAT(Exchange(kGet), StartsWith("HTTP/1.1 200 OK\r\n"));
}

}  // namespace
}  // namespace rapt::http
