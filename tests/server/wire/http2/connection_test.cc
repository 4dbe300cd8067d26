// Times of a connection, with a clock that the test advances.
#include "server/wire/http2/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/wire/health_status.h"
#include "server/wire/health_watch.h"
#include "server/wire/http2/http2_server.h"
#include "tests/support/call_environment.h"
#include "tests/support/loopback.h"
#include "tests/support/raw_http2.h"

namespace rapt::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr minutes kPingInterval{2}, kLeastPingIntervalOfPeers{5};
constexpr seconds kPingTimeout{20}, kHandshakeTime{20};

class Peer : public RawHttp2 {
 public:
  explicit Peer(const std::string& address) : RawHttp2(address) { AwaitAcknowledgement(); }

  // Returns once the server has read what was sent before.
  void Synchronize() {
    Send(Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_NONE, 0, ""));
    AwaitAcknowledgement();
  }

  void AwaitPing() {
    const auto ping = ReadUntil(NGHTTP2_PING);
    ASSERT_TRUE(ping);
    EXPECT_EQ(ping->flags & NGHTTP2_FLAG_ACK, 0);
  }

 private:
  void AwaitAcknowledgement() {
    for (;;) {
      const auto frame = ReadUntil(NGHTTP2_SETTINGS);
      ASSERT_TRUE(frame);
      if ((frame->flags & NGHTTP2_FLAG_ACK) != 0) return;
    }
  }
};

// A server without methods.
class ConnectionTest : public CallEnvironmentTest {
 public:
  static Http2Settings Settings() {
    Http2Settings settings;
    settings.address = "127.0.0.1:0";
    settings.max_connections = settings.max_connections_per_address = 10;
    settings.connection.max_streams = 10;
    settings.connection.max_idle = std::chrono::hours(100);
    return settings;
  }

 protected:
  ConnectionTest() : CallEnvironmentTest(/*calls_per_caller=*/10, {}) {
    EXPECT_TRUE(server_.Start().ok());
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", server_.port()); }

  // Lets all connections notice the time.
  void Advance(std::chrono::nanoseconds time) {
    clock_.Advance(time);
    server_.Post([] {});
  }

  const UnaryMethods methods_;
  const StreamMethods stream_methods_;
  Http2Server server_{Settings(), environment_, pool_, methods_, stream_methods_};
};

TEST_F(ConnectionTest, ASilentPeerIsPingedAndItsConnectionEndsWithoutAnAnswer) {
  Peer connection(address());
  Advance(kPingInterval);
  connection.AwaitPing();
  Advance(kPingTimeout);
  EXPECT_FALSE(connection.Read());
}

TEST_F(ConnectionTest, APeerThatAnswersPingsStays) {
  Peer connection(address());
  for (int n = 0; n < 3; ++n) {
    Advance(kPingInterval);
    connection.AwaitPing();
    connection.Send(Frame(NGHTTP2_PING, NGHTTP2_FLAG_ACK, 0, std::string(8, '\0')));
    connection.Synchronize();
    Advance(kPingTimeout);
    connection.Synchronize();
  }
}

TEST_F(ConnectionTest, APeerThatSendsNothingAtAllIsGivenTheTimeOfAHandshake) {
  const int silent = ConnectTo(address());
  const Peer other(address());  // the first has been accepted as well
  Advance(kHandshakeTime);
  std::string settings(1000, '\0');
  while (read(silent, settings.data(), settings.size()) > 0) {
  }
  close(silent);
}

TEST_F(ConnectionTest, PingsAreTooManyFromTheThirdThatComesEarly) {
  Peer connection(address());
  const std::string ping = Frame(NGHTTP2_PING, NGHTTP2_FLAG_NONE, 0, "12345678");
  connection.Send(ping);
  connection.Synchronize();
  for (int n = 0; n < 5; ++n) {
    Advance(kLeastPingIntervalOfPeers);
    connection.Send(ping);
    connection.Synchronize();
  }
  connection.Send(ping + ping);
  connection.Synchronize();
  Advance(kLeastPingIntervalOfPeers - milliseconds(1));
  connection.Send(ping);
  const auto last = connection.ReadUntil(NGHTTP2_GOAWAY);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->Number(4), NGHTTP2_ENHANCE_YOUR_CALM);
  EXPECT_THAT(last->payload, HasSubstr("too_many_pings"));
  EXPECT_FALSE(connection.Read());
}

TEST_F(ConnectionTest, PingsBetweenCallsAreNotTooMany) {
  Peer connection(address());
  for (uint32_t n = 0; n < 10; ++n) {
    connection.OpenCall(2 * n + 1, CallHeaders("/no.Service/Method"), NGHTTP2_FLAG_END_STREAM);
    EXPECT_FALSE(connection.ReadResponse(2 * n + 1).empty());
    connection.Send(Frame(NGHTTP2_PING, NGHTTP2_FLAG_NONE, 0, "12345678"));
    EXPECT_TRUE(connection.ReadUntil(NGHTTP2_PING));
  }
}

// --- Pause ---------------------------------------------------------------------------------------

// Answers each call with an empty message.
class EmptyAnswer final : public MessageHandler {
  void OnMessage(const MessageBytes&, MethodCall& call) override { call.Respond({}); }
};

// A server that has no room for a call while the first peer has its calls open.
class PauseTest : public CallEnvironmentTest {
 protected:
  static constexpr char kCall[] = "/a.Service/Call";

  PauseTest()
      : CallEnvironmentTest(/*calls_per_caller=*/100, {.max_message_bytes = 1000,
                                                       .min_receive_bytes_per_second = 1000,
                                                       .default_deadline = minutes(1),
                                                       .max_deadline = minutes(1)}) {
    methods_[kCall] = {.observe = [](const CallReport&) {},
                       .new_handler = [] { return std::make_unique<EmptyAnswer>(); }};
    stream_methods_["/grpc.health.v1.Health/Watch"] = [this](MessageStream& stream) {
      return std::make_unique<HealthWatch>(environment_, health_, stream);
    };
    EXPECT_TRUE(server_.Start().ok());
    holder_.emplace(address());
    for (uint32_t n = 0; n < 10; ++n) holder_->OpenCall(2 * n + 1, CallHeaders(kCall));
    holder_->Synchronize();
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", server_.port()); }

  // At once: the server resets a call that is refused before its end.
  static void Call(Peer& peer, uint32_t stream) {
    peer.Send(
        Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, HeaderBlock(CallHeaders(kCall))) +
        Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, stream, Prefixed("")));
  }

  static void ExpectRefusal(Peer& peer, uint32_t stream) {
    EXPECT_THAT(peer.ReadResponse(stream), Contains(Pair("grpc-status", "8")));
  }

  static void ExpectAnswer(Peer& peer, uint32_t stream) {
    EXPECT_THAT(peer.ReadResponse(stream), Contains(Pair("grpc-status", "0")));
  }

  // Returns once the server has read what all peers have sent, except those that it does not read.
  void Synchronize() {
    for (int round = 0; round < 2; ++round) holder_->Synchronize();
  }

  void EndOneOfTheOpenCalls() {
    holder_->Send(Frame(NGHTTP2_RST_STREAM, 0, 2 * ended_++ + 1, BigEndian(NGHTTP2_CANCEL)));
    holder_->Synchronize();
  }

  UnaryMethods methods_;
  StreamMethods stream_methods_;
  HealthStatus health_{{}};
  Http2Server server_{ConnectionTest::Settings(), environment_, pool_, methods_, stream_methods_};
  std::optional<Peer> holder_;
  uint32_t ended_ = 0;
};

TEST_F(PauseTest, AConnectionOfRefusedCallsIsReadAgainWhenAnotherCallEnds) {
  Peer peer(address());
  Call(peer, 1);
  ExpectRefusal(peer, 1);
  Call(peer, 3);
  Synchronize();
  EXPECT_FALSE(peer.HasUnread());
  EndOneOfTheOpenCalls();
  ExpectAnswer(peer, 3);
}

TEST_F(PauseTest, TheFirstThatWasPausedIsReadFirst) {
  Peer first(address()), second(address());
  for (Peer* peer : {&first, &second}) {
    Call(*peer, 1);
    ExpectRefusal(*peer, 1);
  }
  for (Peer* peer : {&second, &first}) peer->OpenCall(3, CallHeaders(kCall));  // and keep it open
  EndOneOfTheOpenCalls();
  Synchronize();
  first.Synchronize();
  EXPECT_FALSE(second.HasUnread());
  EndOneOfTheOpenCalls();
  second.Synchronize();
  for (Peer* peer : {&first, &second}) {
    peer->SendData(3, Prefixed(""), /*ends=*/true);
    ExpectAnswer(*peer, 3);
  }
}

TEST_F(PauseTest, APeerThatIsGoneIsNotPaused) {
  Peer second(address());
  {
    Peer first(address());
    for (Peer* peer : {&first, &second}) {
      Call(*peer, 1);
      ExpectRefusal(*peer, 1);
    }
  }
  Synchronize();
  Call(second, 3);
  EndOneOfTheOpenCalls();
  ExpectAnswer(second, 3);
}

TEST_F(PauseTest, EndsAfterASecondIfNoCallEnds) {
  Peer peer(address());
  Call(peer, 1);
  ExpectRefusal(peer, 1);
  Call(peer, 3);
  clock_.Advance(seconds(1));
  server_.Post([] {});
  ExpectRefusal(peer, 3);
}

TEST_F(PauseTest, AnOpenHealthWatchDoesNotPreventIt) {
  Peer peer(address());
  peer.OpenCall(1, CallHeaders("/grpc.health.v1.Health/Watch"));
  peer.SendData(1, Prefixed(""), /*ends=*/true);
  EXPECT_TRUE(peer.ReadUntil(NGHTTP2_DATA));
  Call(peer, 3);
  ExpectRefusal(peer, 3);
  Call(peer, 5);
  Synchronize();
  EXPECT_FALSE(peer.HasUnread());
  EndOneOfTheOpenCalls();
  ExpectAnswer(peer, 5);
}

TEST_F(PauseTest, ACallThatMaySendMorePreventsIt) {
  Peer peer(address());
  peer.OpenCall(1, CallHeaders("/grpc.health.v1.Health/Watch"));
  for (const uint32_t stream : {3, 5}) {
    Call(peer, stream);
    ExpectRefusal(peer, stream);
  }
}

// --- Large responses -----------------------------------------------------------------------------

// A peer that takes everything at once. It asks for one response; its window is as large as it can
// be.
class GreedySocket final : public Socket {
 public:
  explicit GreedySocket(int64_t& written)
      : Socket(Descriptor(eventfd(1, EFD_CLOEXEC))), written_(written) {}

  bool NeedsHandshake() const override { return false; }
  Handshake ContinueHandshake() override { return Handshake::kComplete; }
  std::optional<absl::string_view> certificate() const override { return std::nullopt; }
  ssize_t Read(absl::Span<const iovec> places) override {
    const std::string request = std::exchange(request_, "");
    if (request.empty()) return kBlocked;
    std::memcpy(places.back().iov_base, request.data(), request.size());
    return static_cast<ssize_t>(request.size());
  }
  bool HasPending() const override { return false; }
  ssize_t Write(absl::Span<const iovec> places) override {
    ssize_t size = 0;
    for (const iovec& place : places) size += static_cast<ssize_t>(place.iov_len);
    written_ += size;
    return size;
  }
  void EndWriting() override {}

 private:
  std::string request_ =
      std::string(NGHTTP2_CLIENT_MAGIC) +
      Frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4", 2) + BigEndian(0x7FFFFFFF)) +
      Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(0x7FFF0000)) +
      Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_END_STREAM, 1,
            HeaderBlock(CallHeaders("/a/b")));
  int64_t& written_;
};

// Reports how much a count of another connection has grown since its last turn in the loop.
class Bystander final : public EventLoop::Watcher {
 public:
  Bystander(const int64_t& written, int64_t expected) : written_(written), expected_(expected) {}

  int descriptor() const { return event_.get(); }
  int64_t AwaitMostBetweenTurns() { return most_.get_future().get(); }

 private:
  void OnEvents(uint32_t) override {
    most_between_ = std::max(most_between_, written_ - seen_);
    const bool was_complete = seen_ >= expected_;
    seen_ = written_;
    if (!was_complete && seen_ >= expected_) most_.set_value(most_between_);
  }
  void OnTick(Instant) override {}

  const Descriptor event_{eventfd(1, EFD_CLOEXEC)};
  const int64_t& written_;
  const int64_t expected_;
  int64_t seen_ = 0, most_between_ = 0;
  std::promise<int64_t> most_;
};

TEST(LargeResponseTest, OthersHaveTheirTurnBetweenItsParts) {
  constexpr int64_t kSize = 64 << 20;
  const SteadyClock clock;
  const Connection::Settings settings = ConnectionTest::Settings().connection;
  Connection::Paused paused;
  const std::vector<std::byte> payload(kSize);
  int64_t written = 0;  // of the loop's thread
  EventLoop loop(clock);
  const auto bystander = std::make_shared<Bystander>(written, kSize);
  loop.Add(bystander->descriptor(), EPOLLIN, bystander, {});
  const auto connection = std::make_shared<Connection>(
      loop, std::make_unique<GreedySocket>(written), "unix:", settings, paused,
      [&payload](Connection& connection, int32_t id, const RequestHead&) -> CallStream* {
        ResponseMessage message;
        message.Append({payload, nullptr});
        connection.SendMessage(id, std::move(message));
        return nullptr;
      },
      [] {});
  loop.Post([&connection] { connection->Start({}); });
  loop.Start();
  EXPECT_LE(bystander->AwaitMostBetweenTurns(), 4 << 20);
  loop.Post([&connection] { connection->Close(); });
  loop.Stop();
}

// --- Costly frames -------------------------------------------------------------------------------

// A peer whose bytes never end. Each read, with what follows from it, takes a millisecond.
class CostlySocket final : public Socket {
 public:
  CostlySocket(FakeClock& clock, int64_t& reads)
      : Socket(Descriptor(eventfd(1, EFD_CLOEXEC))), clock_(clock), reads_(reads) {}

  bool NeedsHandshake() const override { return false; }
  Handshake ContinueHandshake() override { return Handshake::kComplete; }
  std::optional<absl::string_view> certificate() const override { return std::nullopt; }
  ssize_t Read(absl::Span<const iovec> places) override {
    ++reads_;
    clock_.Advance(milliseconds(1));
    const iovec& place = places.back();
    while (bytes_.size() < place.iov_len) bytes_ += Frame(0xEE, 0, 0, std::string(10000, 'x'));
    std::memcpy(place.iov_base, bytes_.data(), place.iov_len);
    bytes_.erase(0, place.iov_len);
    return static_cast<ssize_t>(place.iov_len);
  }
  bool HasPending() const override { return false; }
  ssize_t Write(absl::Span<const iovec> places) override {
    ssize_t size = 0;
    for (const iovec& place : places) size += static_cast<ssize_t>(place.iov_len);
    return size;
  }
  void EndWriting() override {}

 private:
  FakeClock& clock_;
  int64_t& reads_;
  std::string bytes_ = Preface();
};

TEST(CostlyFramesTest, OthersHaveTheirTurnBetweenThem) {
  FakeClock clock;
  const Connection::Settings settings = ConnectionTest::Settings().connection;
  Connection::Paused paused;
  int64_t reads = 0;  // of the loop's thread
  EventLoop loop(clock);
  const auto bystander = std::make_shared<Bystander>(reads, 100);
  loop.Add(bystander->descriptor(), EPOLLIN, bystander, {});
  const auto connection = std::make_shared<Connection>(
      loop, std::make_unique<CostlySocket>(clock, reads), "unix:", settings, paused,
      [](Connection&, int32_t, const RequestHead&) -> CallStream* { return nullptr; }, [] {});
  loop.Post([&connection] { connection->Start({}); });
  loop.Start();
  EXPECT_LE(bystander->AwaitMostBetweenTurns(), 4);
  loop.Post([&connection] { connection->Close(); });
  loop.Stop();
}

}  // namespace
}  // namespace rapt::test
