// rapt-server against frames that no client library sends, and with gRPC's client. Over TLS if
// RAPT_TEST_TLS is in the environment.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/support/certificates.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_http2.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

constexpr char kLive[] = "/inference.GRPCInferenceService/ServerLive";
constexpr char kInfer[] = "/inference.GRPCInferenceService/ModelInfer";
constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";

const Security kSecurity =
    std::getenv("RAPT_TEST_TLS") == nullptr ? Security::kPlainText : Security::kTls;

const ServerCertificate& TheCertificate() {
  static const ServerCertificate certificate;
  return certificate;
}

std::vector<std::string> Flags(std::vector<std::string> flags = {}) {
  flags.push_back("--threads=2");
  if (kSecurity == Security::kPlainText) return flags;
  for (const std::string& flag : TheCertificate().Flags()) flags.push_back(flag);
  return flags;
}

class Connection : public RawHttp2 {
 public:
  explicit Connection(const std::string& address, const std::string& from = "")
      : RawHttp2(address, kSecurity, from) {}
};

std::unique_ptr<inference::GRPCInferenceService::Stub> StubOf(const ServerProcess& server) {
  const auto credentials = kSecurity == Security::kPlainText
                               ? grpc::InsecureChannelCredentials()
                               : grpc::SslCredentials({TheCertificate().authority(), "", ""});
  return inference::GRPCInferenceService::NewStub(
      grpc::CreateChannel(server.grpc_address(), credentials));
}

const std::string kAcknowledgement = Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 0, "");

auto HasStatus(grpc::StatusCode code) {
  return Contains(Pair("grpc-status", absl::StrCat(static_cast<int>(code))));
}

// Reads the headers of the response to one call of ServerLive.
Headers AskWhetherLive(Connection& connection, uint32_t stream, const Headers& more = {}) {
  connection.OpenCall(stream, CallHeaders(kLive, more));
  connection.SendData(stream, Prefixed(""), /*ends=*/true);
  return connection.ReadResponse(stream);
}

// Calls of another caller, by gRPC's client, which must not notice what the test does.
class Bystander {
 public:
  explicit Bystander(const ServerProcess& server) : stub_(StubOf(server)) {}

  bool IsServed() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    inference::ServerLiveResponse response;
    const grpc::Status status = stub_->ServerLive(&context, {}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return status.ok() && response.live();
  }

 private:
  const std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
};

// --- Calls ---------------------------------------------------------------------------------------

class Http2CallTest : public ::testing::Test {
 protected:
  ServerProcess server_{Flags({"--memory_budget_bytes=67108864"})};
  Connection connection_{server_.grpc_address()};
};

TEST_F(Http2CallTest, MessagesMayArriveByteByByteAndInPaddedFrames) {
  connection_.OpenCall(1, CallHeaders(kLive));
  for (const char byte : Prefixed("")) connection_.SendData(1, std::string(1, byte));
  connection_.Send(Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM | NGHTTP2_FLAG_PADDED, 1,
                         std::string(1, '\3') + std::string(3, '\0')));
  EXPECT_THAT(connection_.ReadResponse(1), HasStatus(grpc::StatusCode::OK));
}

TEST_F(Http2CallTest, RefusesRequestsThatAreNotGrpc) {
  EXPECT_THAT(AskWhetherLive(connection_, 1, {{"content-type", "application/json"}}),
              Contains(Pair(":status", "415")));
  EXPECT_THAT(AskWhetherLive(connection_, 3, {{":method", "GET"}}),
              Contains(Pair(":status", "405")));
  EXPECT_THAT(AskWhetherLive(connection_, 5), HasStatus(grpc::StatusCode::OK));
}

TEST_F(Http2CallTest, RefusesUnknownMethodsAndBadTimeouts) {
  EXPECT_THAT(AskWhetherLive(connection_, 1, {{":path", "/no.Service/Method"}}),
              HasStatus(grpc::StatusCode::UNIMPLEMENTED));
  EXPECT_THAT(AskWhetherLive(connection_, 3, {{"grpc-timeout", "1 second"}}),
              AllOf(HasStatus(grpc::StatusCode::INVALID_ARGUMENT),
                    Contains(Pair("grpc-message", HasSubstr("grpc-timeout")))));
  EXPECT_THAT(AskWhetherLive(connection_, 5, {{"grpc-timeout", "0S"}}),
              HasStatus(grpc::StatusCode::DEADLINE_EXCEEDED));
}

TEST_F(Http2CallTest, RefusesCompressedMessagesAndTellsWhatItAccepts) {
  connection_.OpenCall(1, CallHeaders(kLive, {{"grpc-encoding", "gzip"}}));
  connection_.SendData(1, "\1" + Prefixed("").substr(1), /*ends=*/true);
  EXPECT_THAT(connection_.ReadResponse(1),
              AllOf(HasStatus(grpc::StatusCode::UNIMPLEMENTED),
                    Contains(Pair("grpc-accept-encoding", "identity"))));
  connection_.OpenCall(3, CallHeaders(kLive));
  connection_.SendData(3, "\1" + Prefixed("").substr(1), /*ends=*/true);
  EXPECT_THAT(connection_.ReadResponse(3), HasStatus(grpc::StatusCode::INTERNAL));
  // Encoding announced, but not used.
  EXPECT_THAT(AskWhetherLive(connection_, 5, {{"grpc-encoding", "gzip"}}),
              HasStatus(grpc::StatusCode::OK));
}

TEST_F(Http2CallTest, ACompressedMessageEndsAStream) {
  connection_.OpenCall(1, CallHeaders("/inference.GRPCInferenceService/ModelStreamInfer"));
  WaitForMetric(server_, "rapt_open_streams", 1);
  connection_.SendData(1, "\1" + Prefixed("abc").substr(1));
  const auto reset = connection_.ReadUntil(NGHTTP2_RST_STREAM);
  ASSERT_TRUE(reset);
  EXPECT_EQ(reset->Number(0), static_cast<uint32_t>(NGHTTP2_PROTOCOL_ERROR));
  WaitForMetric(server_, "rapt_open_streams", 0);
}

TEST_F(Http2CallTest, RefusesMessagesThatAreCutOffOrFollowedByMore) {
  connection_.OpenCall(1, CallHeaders(kLive), NGHTTP2_FLAG_END_STREAM);
  EXPECT_THAT(connection_.ReadResponse(1), HasStatus(grpc::StatusCode::INVALID_ARGUMENT));
  connection_.OpenCall(3, CallHeaders(kInfer));
  connection_.SendData(3, Prefixed("abc", 4), /*ends=*/true);
  EXPECT_THAT(connection_.ReadResponse(3), HasStatus(grpc::StatusCode::INVALID_ARGUMENT));
  connection_.OpenCall(5, CallHeaders(kInfer));
  connection_.SendData(5, Prefixed("abcde", 4));
  EXPECT_THAT(connection_.ReadResponse(5),
              AllOf(HasStatus(grpc::StatusCode::INVALID_ARGUMENT),
                    Contains(Pair("grpc-message", HasSubstr("more than one message")))));
  connection_.OpenCall(7, CallHeaders(kLive));
  connection_.SendData(7, Prefixed("\x0F"), /*ends=*/true);
  EXPECT_THAT(connection_.ReadResponse(7),
              AllOf(HasStatus(grpc::StatusCode::INVALID_ARGUMENT),
                    Contains(Pair("grpc-message", HasSubstr("ServerLiveRequest")))));
}

TEST_F(Http2CallTest, RefusesASizeBeforeItsBytesArrive) {
  connection_.OpenCall(1, CallHeaders(kLive));
  connection_.SendData(1, Prefixed("", 64 * 1024 + 1));
  EXPECT_THAT(connection_.ReadResponse(1),
              AllOf(HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED),
                    Contains(Pair("grpc-message", HasSubstr("at most 65536")))));
  connection_.OpenCall(3, CallHeaders(kInfer));
  connection_.SendData(3, Prefixed("", 0xFFFFFFFF));
  EXPECT_THAT(connection_.ReadResponse(3), HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED));
}

TEST_F(Http2CallTest, RefusesLongHeaders) {
  const std::string block = HeaderBlock(CallHeaders(kLive, {{"x", std::string(16 * 1024, 'x')}}));
  constexpr size_t kHalf = 8 * 1024;
  connection_.Send(Frame(NGHTTP2_HEADERS, 0, 1, block.substr(0, kHalf)) +
                   Frame(NGHTTP2_CONTINUATION, NGHTTP2_FLAG_END_HEADERS, 1, block.substr(kHalf)));
  EXPECT_THAT(connection_.ReadResponse(1),
              AllOf(HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED),
                    Contains(Pair("grpc-message", HasSubstr("at most 16384")))));
  EXPECT_THAT(AskWhetherLive(connection_, 3), HasStatus(grpc::StatusCode::OK));
}

TEST_F(Http2CallTest, EvictsACallerThatSendsNoMessage) {
  connection_.OpenCall(1, CallHeaders(kInfer));
  EXPECT_THAT(connection_.ReadResponse(1),
              AllOf(HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED),
                    Contains(Pair("grpc-message", HasSubstr("slower")))));
}

// The server does not read binary metadata, so it accepts values that can't be decoded.
TEST_F(Http2CallTest, AcceptsBinaryMetadataWithAndWithoutPaddingAndInvalid) {
  uint32_t stream = 1;
  for (const char* value : {"AAECAw", "AAECAw==", "AAECAw=", "", "!no base64!", "AA,AA==,\xFF"}) {
    EXPECT_THAT(AskWhetherLive(connection_, stream, {{"trace-bin", value}}),
                HasStatus(grpc::StatusCode::OK))
        << value;
    stream += 2;
  }
}

TEST_F(Http2CallTest, PercentEncodesStatusMessagesAsClientsExpect) {
  const std::string name = "100% \xC3\xA9t\xC3\xA9\n\x7F";
  inference::ModelMetadataRequest request;
  request.set_name(name);
  connection_.OpenCall(1, CallHeaders("/inference.GRPCInferenceService/ModelMetadata"));
  connection_.SendData(1, Prefixed(request.SerializeAsString()), /*ends=*/true);
  EXPECT_THAT(connection_.ReadResponse(1),
              Contains(Pair("grpc-message", HasSubstr("'100%25 %C3%A9t%C3%A9%0A%7F'"))));
  grpc::ClientContext context;
  inference::ModelMetadataResponse response;
  EXPECT_THAT(StubOf(server_)->ModelMetadata(&context, request, &response).error_message(),
              HasSubstr(absl::StrCat("'", name, "'")));
}

// A large message that is announced reserves its size, and no more than a step of it is let in.
TEST_F(Http2CallTest, OpensTheWindowInStepsAndOnlyForAdmittedBytes) {
  constexpr uint32_t kSize = 10 << 20;
  Connection first(server_.grpc_address()), second(server_.grpc_address()),
      third(server_.grpc_address());
  int64_t most = 0;
  for (Connection* connection : {&first, &second}) {
    connection->OpenCall(1, CallHeaders(kInfer));
    connection->SendData(1, Prefixed(std::string(16000, 'x'), kSize));
    int64_t granted = 0;
    while (granted < 400 * 1024) {  // less the 64 KiB that HTTP/2 gives
      const auto update = connection->ReadUntil(NGHTTP2_WINDOW_UPDATE);
      ASSERT_TRUE(update);
      if (update->stream == 1) granted += update->Number(0);
      most = std::max(most, granted);
    }
  }
  EXPECT_LE(most, 600 * 1024);
  EXPECT_EQ(ReadMetric(server_, "rapt_memory_reserved_bytes"), 2 * kSize);
  // A third does not fit: it waits, and what it has sent is charged.
  third.OpenCall(1, CallHeaders(kInfer));
  third.SendData(1, Prefixed(std::string(16000, 'x'), kSize));
  WaitForMetric(server_, "rapt_queue_depth", 1, {{"queue", "memory"}});
  EXPECT_GT(ReadMetric(server_, "rapt_memory_reserved_bytes"), 2 * kSize);
  third.Send(Frame(NGHTTP2_PING, 0, 0, "12345678"));
  for (auto frame = third.Read(); frame && frame->type != NGHTTP2_PING; frame = third.Read()) {
    EXPECT_FALSE(frame->type == NGHTTP2_WINDOW_UPDATE && frame->stream == 1);
  }
  EXPECT_TRUE(Bystander(server_).IsServed());
}

// The setting in the next SETTINGS of the server that are no acknowledgement.
std::optional<uint32_t> ReadSetting(Connection& connection, uint16_t setting) {
  auto settings = connection.ReadUntil(NGHTTP2_SETTINGS);
  while (settings && settings->flags == NGHTTP2_FLAG_ACK) {
    settings = connection.ReadUntil(NGHTTP2_SETTINGS);
  }
  for (size_t at = 0; settings && at + 6 <= settings->payload.size(); at += 6) {
    if (settings->Number(at) >> 16 == setting) return settings->Number(at + 2);
  }
  return std::nullopt;
}

// They need no window update, which takes a round trip.
TEST_F(Http2CallTest, TensorsOf64KiBFitIntoTheFirstWindow) {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  const auto add = [&request](const char* name, int64_t rows) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, rows, int64_t{64}}) input.add_shape(axis);
    request.add_raw_input_contents(std::string(static_cast<size_t>(rows * 64 * 4), '\0'));
  };
  add("Q", 1);
  add("K", 128);
  add("V", 128);
  const std::string message = Prefixed(request.SerializeAsString());
  EXPECT_GE(ReadSetting(connection_, NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE), message.size());
  connection_.Send(kAcknowledgement);
  connection_.OpenCall(1, CallHeaders(kInfer));
  connection_.SendData(1, message, /*ends=*/true);
  EXPECT_THAT(connection_.ReadResponse(1), HasStatus(grpc::StatusCode::OK));
}

TEST_F(Http2CallTest, AResetEndsTheCallAndFreesItsMemory) {
  connection_.OpenCall(1, CallHeaders(kInfer));
  connection_.SendData(1, Prefixed(std::string(100, 'x'), 10 << 20));
  WaitForMetric(server_, "rapt_memory_reserved_bytes", 10 << 20);
  connection_.Send(Frame(NGHTTP2_RST_STREAM, 0, 1, BigEndian(NGHTTP2_CANCEL)));
  WaitForMetric(server_, "rapt_memory_reserved_bytes", 0);
  WaitForMetric(server_, "rapt_open_calls", 0);
  EXPECT_THAT(AskWhetherLive(connection_, 3), HasStatus(grpc::StatusCode::OK));
}

// A client resets each call whose deadline passes; its other calls go on.
TEST_F(Http2CallTest, ThousandsOfResetsLeaveTheConnectionOpen) {
  constexpr uint32_t kCalls = 4000;
  for (uint32_t n = 0; n < kCalls; ++n) {
    connection_.OpenCall(2 * n + 1, CallHeaders(kInfer));
    connection_.Send(Frame(NGHTTP2_RST_STREAM, 0, 2 * n + 1, BigEndian(NGHTTP2_CANCEL)));
  }
  EXPECT_THAT(AskWhetherLive(connection_, 2 * kCalls + 1), HasStatus(grpc::StatusCode::OK));
}

// gRPC's clients ping to estimate the bandwidth, also when the server has written a whole response.
TEST_F(Http2CallTest, PingsAfterEachOfManyCallsAreNotTooMany) {
  for (uint32_t stream = 1; stream < 20; stream += 2) {
    EXPECT_THAT(AskWhetherLive(connection_, stream), HasStatus(grpc::StatusCode::OK));
    for (int n = 0; n < 2; ++n) {
      connection_.Send(Frame(NGHTTP2_PING, 0, 0, "12345678"));
      const auto frame = connection_.Read();
      ASSERT_TRUE(frame);
      EXPECT_NE(frame->type, NGHTTP2_GOAWAY);
    }
  }
}

TEST_F(Http2CallTest, TheEndOfAConnectionEndsItsCalls) {
  {
    Connection connection(server_.grpc_address());
    connection.OpenCall(1, CallHeaders(kInfer));
    connection.SendData(1, Prefixed(std::string(100, 'x'), 10 << 20));
    WaitForMetric(server_, "rapt_open_calls", 1);
  }
  WaitForMetric(server_, "rapt_open_calls", 0);
  WaitForMetric(server_, "rapt_memory_reserved_bytes", 0);
}

// nghttp2 ignores what exceeds the content-length, and the end of the call comes in the same bytes.
TEST_F(Http2CallTest, DataBeyondTheContentLengthIsNotReadIntoAFreedMessage) {
  constexpr uint32_t kMessageBytes = 64 * 1024;
  for (int n = 0; n < 20; ++n) {
    Connection connection(server_.grpc_address());
    ASSERT_TRUE(connection.ReadUntil(NGHTTP2_WINDOW_UPDATE));
    std::string burst =
        Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1,
              HeaderBlock(CallHeaders("/grpc.health.v1.Health/Check", {{"content-length", "5"}}))) +
        Frame(NGHTTP2_DATA, 0, 1, Prefixed("", kMessageBytes));
    for (int frame = 0; frame < 13; ++frame) {
      burst += Frame(NGHTTP2_DATA, 0, 1, std::string(16 * 1024, 'x'));
    }
    burst += Frame(NGHTTP2_RST_STREAM, 0, 1, BigEndian(NGHTTP2_CANCEL));
    for (int ping = 0; ping < 3000; ++ping) burst += Frame(NGHTTP2_PING, 0, 0, "12345678");
    connection.Send(burst);
    while (connection.Read()) {
    }
  }
  EXPECT_TRUE(Bystander(server_).IsServed());
  WaitForMetric(server_, "rapt_memory_reserved_bytes", 0);
}

TEST_F(Http2CallTest, TrailersOfManyStreamsDoNotAddUp) {
  constexpr uint32_t kStreams = 40;
  for (uint32_t n = 0; n < kStreams; ++n) connection_.OpenCall(2 * n + 1, CallHeaders(kLive));
  for (uint32_t n = 0; n < kStreams; ++n) {
    connection_.SendData(2 * n + 1, Prefixed(""));
    connection_.Send(Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_END_STREAM,
                           2 * n + 1, HeaderBlock({{"x-trailer", std::string(4000, 'x')}})));
    EXPECT_THAT(connection_.ReadResponse(2 * n + 1), HasStatus(grpc::StatusCode::OK)) << n;
  }
}

TEST_F(Http2CallTest, CallsThatWaitForMemoryLeaveRoomForOthersOfTheirConnection) {
  constexpr uint32_t kSize = 10 << 20, kWaiting = 16, kEarly = 65535;
  Connection first(server_.grpc_address()), second(server_.grpc_address());
  for (Connection* connection : {&first, &second}) {
    connection->OpenCall(1, CallHeaders(kInfer));
    connection->SendData(1, Prefixed(std::string(16000, 'x'), kSize));
  }
  WaitForMetric(server_, "rapt_memory_reserved_bytes", 2 * kSize);
  int64_t window = kEarly + connection_.ReadUntil(NGHTTP2_WINDOW_UPDATE)->Number(0);
  for (uint32_t n = 0; n < kWaiting; ++n) {
    connection_.OpenCall(2 * n + 1, CallHeaders(kInfer));
    const std::string early = Prefixed(std::string(kEarly - 5, 'x'), kSize);
    for (size_t begin = 0; begin < early.size(); begin += 16 * 1024) {
      connection_.SendData(2 * n + 1, early.substr(begin, 16 * 1024));
    }
    window -= kEarly;
  }
  WaitForMetric(server_, "rapt_queue_depth", kWaiting, {{"queue", "memory"}});
  // The queue is as deep when the last call's prefix was read; the window follows its last frame.
  while (window < 16 * 1024) {
    const auto update = connection_.ReadUntil(NGHTTP2_WINDOW_UPDATE);
    ASSERT_TRUE(update) << window;
    if (update->stream == 0) window += update->Number(0);
  }
  EXPECT_THAT(AskWhetherLive(connection_, 2 * kWaiting + 1), HasStatus(grpc::StatusCode::OK));
}

// Announces a message and sends a part of it: it is charged until the server ends the call.
void ExpectPartIsChargedAndEnds(const ServerProcess& server, const std::string& path) {
  constexpr uint32_t kSize = 60'000;
  Connection connection(server.grpc_address());
  connection.OpenCall(1, CallHeaders(path));
  connection.SendData(1, Prefixed("part", kSize));
  WaitForMetric(server, "rapt_memory_reserved_bytes", kSize);
  EXPECT_TRUE(connection.ReadUntil(NGHTTP2_RST_STREAM));
  WaitForMetric(server, "rapt_memory_reserved_bytes", 0);
}

TEST(Http2WatchTest, ARequestThatDoesNotArriveIsChargedAndEndsTheCall) {
  const ServerProcess server(Flags({"--default_deadline=2s"}));
  ExpectPartIsChargedAndEnds(server, "/grpc.health.v1.Health/Watch");
}

// The second one needs the place of the first one.
TEST(Http2WatchTest, EndsAtTheDeadlineOfItsCaller) {
  const ServerProcess server(Flags({"--max_calls_per_caller=1"}));
  Connection connection(server.grpc_address());
  for (const uint32_t stream : {1, 3}) {
    connection.OpenCall(stream,
                        CallHeaders("/grpc.health.v1.Health/Watch", {{"grpc-timeout", "100m"}}));
    connection.SendData(stream, Prefixed(""), /*ends=*/true);
    auto frame = connection.Read();
    while (frame && !frame->headers.contains("grpc-status")) frame = connection.Read();
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->stream, stream);
    EXPECT_EQ(frame->headers.at("grpc-status"), "4");
  }
}

TEST(Http2StreamInferTest, ASmallRequestThatDoesNotArriveIsChargedAndEndsTheCall) {
  const ServerProcess server(Flags({"--min_receive_bytes_per_second=1000000000"}));
  ExpectPartIsChargedAndEnds(server, "/inference.GRPCInferenceService/ModelStreamInfer");
}

// --- Floods --------------------------------------------------------------------------------------

// What the server reads of a connection that it has ended, and what sockets hold.
constexpr size_t kLingeringBytes = 128 << 20;

// Sends what `flood` returns, over and over: the server ends the connection with ENHANCE_YOUR_CALM
// and stops reading it; its memory stays, and other callers are served.
void ExpectCalm(const std::function<std::string(uint32_t n)>& flood) {
  const ServerProcess server(Flags({"--memory_budget_bytes=67108864"}));
  Bystander bystander(server);
  EXPECT_TRUE(bystander.IsServed());
  const int64_t before = RssAnonBytes(server.pid());
  const MemoryWatch memory(server.pid());
  Connection attacker(server.grpc_address());
  auto error = std::async(std::launch::async, [&attacker] { return attacker.ReadGoAway(); });
  size_t sent = 0;
  for (uint32_t n = 0; sent < kLingeringBytes; ++n) {
    const std::string bytes = flood(n);
    if (!attacker.Send(bytes)) break;
    sent += bytes.size();
  }
  EXPECT_LT(sent, kLingeringBytes) << "the server still reads";
  EXPECT_EQ(error.get(), NGHTTP2_ENHANCE_YOUR_CALM);
  EXPECT_TRUE(bystander.IsServed());
  if (kRssIsMeaningful) {
    EXPECT_LT(memory.peak() - before, 16 << 20);
  }
  WaitForMetric(server, "rapt_open_calls", 0);
  EXPECT_EQ(ReadMetric(server, "rapt_memory_reserved_bytes"), 0);
}

std::string Repeat(const std::string& text, int count) {
  std::string all;
  for (int n = 0; n < count; ++n) all += text;
  return all;
}

// Floods of one frame.
struct Flood {
  const char* name;
  std::string frame;
};

class FrameFloodTest : public ::testing::TestWithParam<Flood> {};

TEST_P(FrameFloodTest, EndsTheConnection) {
  const std::string frames = Repeat(GetParam().frame, 100);
  ExpectCalm([&frames](uint32_t n) {
    const Headers headers = CallHeaders(kInfer);
    if (n > 0) return frames;
    return Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, HeaderBlock(headers)) + frames;
  });
}

INSTANTIATE_TEST_SUITE_P(
    , FrameFloodTest,
    ::testing::Values(Flood{"Ping", Frame(NGHTTP2_PING, 0, 0, "12345678")},
                      Flood{"PingAck", Frame(NGHTTP2_PING, NGHTTP2_FLAG_ACK, 0, "12345678")},
                      Flood{"Settings", Frame(NGHTTP2_SETTINGS, 0, 0, "")},
                      Flood{"EmptyData", Frame(NGHTTP2_DATA, 0, 1, "")},
                      Flood{"TinyData", Frame(NGHTTP2_DATA, 0, 1, "x")},
                      Flood{"WindowUpdate", Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(1))},
                      Flood{"Priority", Frame(NGHTTP2_PRIORITY, 0, 3, std::string(4, '\0') + "x")},
                      Flood{"GoAway", Frame(NGHTTP2_GOAWAY, 0, 0, std::string(8, '\0'))},
                      Flood{"Unknown", Frame(0xEE, 0, 1, "what")}),
    [](const auto& info) { return info.param.name; });

TEST(Http2FloodTest, OfResetsEndsTheConnection) {
  const std::string block = HeaderBlock(CallHeaders(kInfer));
  ExpectCalm([&block](uint32_t n) {
    return Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * n + 1, block) +
           Frame(NGHTTP2_RST_STREAM, 0, 2 * n + 1, BigEndian(NGHTTP2_CANCEL));
  });
}

// Bad WINDOW_UPDATEs make the server reset the streams.
TEST(Http2FloodTest, OfResetsByTheServerEndsTheConnection) {
  const std::string block = HeaderBlock(CallHeaders(kInfer));
  ExpectCalm([&block](uint32_t n) {
    return Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * n + 1, block) +
           Frame(NGHTTP2_WINDOW_UPDATE, 0, 2 * n + 1, BigEndian(0x7FFFFFFF));
  });
}

TEST(Http2FloodTest, OfHeadersInContinuationsEndsTheConnection) {
  const std::string part = HeaderBlock({{"x", std::string(10000, 'x')}});
  ExpectCalm([&part](uint32_t n) {
    if (n > 0) return Frame(NGHTTP2_CONTINUATION, 0, 1, part);
    return Frame(NGHTTP2_HEADERS, 0, 1, HeaderBlock(CallHeaders(kInfer)) + part);
  });
}

TEST(Http2FloodTest, OfEmptyContinuationsEndsTheConnection) {
  const std::string empty = Repeat(Frame(NGHTTP2_CONTINUATION, 0, 1, ""), 100);
  ExpectCalm([&empty](uint32_t n) {
    if (n > 0) return empty;
    return Frame(NGHTTP2_HEADERS, 0, 1, HeaderBlock(CallHeaders(kInfer)));
  });
}

// The server resets each. Its SETTINGS are not acknowledged, so that the
// limit is not known to it.
TEST(Http2FloodTest, OfStreamsBeyondTheLimitEndsTheConnection) {
  const std::string block = HeaderBlock(CallHeaders(kInfer));
  ExpectCalm([&block](uint32_t n) {
    return Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * n + 1, block);
  });
}

// One long header in the table, and references to it of a byte each.
TEST(Http2FloodTest, OfReferencesToALongHeaderEndsTheConnection) {
  std::string block = HeaderBlock(CallHeaders(kInfer));
  std::string indexed = HeaderBlock({{"x", std::string(4000, 'x')}});
  indexed[0] = '\x40';  // with indexing
  block += indexed + std::string(4000, '\xBE');
  ExpectCalm([&block](uint32_t n) {
    return Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 2 * n + 1, block);
  });
}

// Small calls are sent until the server stops reading: many connections hold little of the requests
// and responses.
TEST(Http2FloodTest, OfCallsWhoseResponsesAreNotReadHoldsLittle) {
  constexpr int kConnections = 16;
  constexpr int64_t kBytesEach = 384 * 1024;  // as docs/security.md says
  std::string calls;
  const std::string block = HeaderBlock(CallHeaders(kLive, {{"grpc-timeout", "x"}}));
  for (uint32_t n = 0; n < 100'000; ++n) {
    calls += Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_END_STREAM, 2 * n + 1,
                   block);
  }
  const ServerProcess server(Flags());
  Bystander bystander(server);
  EXPECT_TRUE(bystander.IsServed());
  const int64_t before = RssAnonBytes(server.pid());
  const MemoryWatch memory(server.pid());
  std::vector<std::unique_ptr<Connection>> connections;
  for (int n = 0; n < kConnections; ++n) {
    connections.push_back(std::make_unique<Connection>(server.grpc_address()));
  }
  std::vector<size_t> sent(kConnections);
  for (int silent_rounds = 0; silent_rounds < 50; ++silent_rounds) {
    for (size_t n = 0; n < sent.size(); ++n) {
      const size_t more =
          connections[n]->SendWithoutWaiting(absl::string_view(calls).substr(sent[n]));
      sent[n] += more;
      if (more > 0) silent_rounds = 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LT(*std::max_element(sent.begin(), sent.end()), calls.size()) << "the server still reads";
  EXPECT_TRUE(bystander.IsServed());
  if (kRssIsMeaningful) {
    EXPECT_LT(memory.peak() - before, kConnections * kBytesEach);
  }
}

// --- Connections ---------------------------------------------------------------------------------

TEST(Http2ConnectionTest, StreamsBeyondTheLimitAreRefused) {
  const ServerProcess server(Flags({"--max_streams_per_connection=2"}));
  Connection connection(server.grpc_address());
  for (const uint32_t stream : {1, 3, 5}) connection.OpenCall(stream, CallHeaders(kInfer));
  const auto reset = connection.ReadUntil(NGHTTP2_RST_STREAM);
  ASSERT_TRUE(reset);
  EXPECT_EQ(reset->stream, 5u);
  EXPECT_EQ(reset->Number(0), NGHTTP2_REFUSED_STREAM);
  // It was not excusable any more once the limit was known.
  connection.Send(Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 0, ""));
  connection.OpenCall(7, CallHeaders(kInfer));
  EXPECT_EQ(connection.ReadGoAway(), NGHTTP2_PROTOCOL_ERROR);
}

std::optional<uint32_t> ReadStreamLimit(Connection& connection) {
  return ReadSetting(connection, NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS);
}

TEST(Http2ConnectionTest, ARefusedCallLowersTheLimitOfStreamsForAWhile) {
  const ServerProcess server(Flags({"--max_open_calls=3", "--max_streams_per_connection=9"}));
  Connection connection(server.grpc_address());
  EXPECT_EQ(ReadStreamLimit(connection), 9u);
  connection.Send(kAcknowledgement);
  for (const uint32_t stream : {1, 3, 5, 7}) connection.OpenCall(stream, CallHeaders(kInfer));
  EXPECT_EQ(ReadStreamLimit(connection), 3u);
  EXPECT_THAT(connection.ReadResponse(7), HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED));
  // A call that was sent before its caller has read that is refused like others.
  connection.Send(kAcknowledgement);
  connection.OpenCall(9, CallHeaders(kInfer));
  EXPECT_THAT(connection.ReadResponse(9), HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED));
  for (const uint32_t limit : {6, 9}) EXPECT_EQ(ReadStreamLimit(connection), limit);
  EXPECT_TRUE(Bystander(server).IsServed());
}

// The server is full because of another connection.
TEST(Http2ConnectionTest, OpenWatchesLeaveRoomForACallAfterARefusal) {
  const ServerProcess server(Flags({"--max_open_calls=2"}));
  Connection other(server.grpc_address()), connection(server.grpc_address());
  for (const uint32_t stream : {1, 3}) other.OpenCall(stream, CallHeaders(kInfer));
  WaitForMetric(server, "rapt_open_calls", 2);
  EXPECT_TRUE(ReadStreamLimit(connection));
  for (const uint32_t stream : {1, 3}) {
    connection.OpenCall(stream, CallHeaders(kWatch));
    connection.SendData(stream, Prefixed(""), /*ends=*/true);
  }
  connection.OpenCall(5, CallHeaders(kInfer));
  EXPECT_EQ(ReadStreamLimit(connection), 3u);
  EXPECT_THAT(connection.ReadResponse(5), HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED));
}

// Others may share the connection.
TEST(Http2ConnectionTest, ALimitOfOneCallerDoesNotLowerTheLimitOfStreams) {
  const ServerProcess server(Flags({"--max_calls_per_caller=1"}));
  Connection connection(server.grpc_address());
  EXPECT_TRUE(ReadStreamLimit(connection));
  for (const uint32_t stream : {1, 3}) connection.OpenCall(stream, CallHeaders(kInfer));
  std::optional<RawHttp2::Received> frame;
  do {
    frame = connection.Read();
    ASSERT_TRUE(frame);
    EXPECT_TRUE(frame->type != NGHTTP2_SETTINGS || frame->flags == NGHTTP2_FLAG_ACK);
  } while (frame->type != NGHTTP2_HEADERS);
  EXPECT_EQ(frame->stream, 3u);
  EXPECT_THAT(frame->headers, HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED));
}

// Returns a connection whose caller was told a lower limit of streams, and has acknowledged only
// the server's first SETTINGS.
std::unique_ptr<Connection> Limited(const ServerProcess& server) {
  auto connection = std::make_unique<Connection>(server.grpc_address());
  EXPECT_TRUE(ReadStreamLimit(*connection));
  connection->Send(kAcknowledgement);
  for (const uint32_t stream : {1, 3}) connection->OpenCall(stream, CallHeaders(kInfer));
  EXPECT_EQ(ReadStreamLimit(*connection), 1u);
  return connection;
}

TEST(Http2ConnectionTest, AcknowledgementsThatAreErrorsEndTheConnection) {
  const ServerProcess server(Flags({"--max_open_calls=1"}));
  const std::string half_block = Frame(NGHTTP2_HEADERS, 0, 5, HeaderBlock(CallHeaders(kLive)));
  const std::string rest = Frame(NGHTTP2_CONTINUATION, NGHTTP2_FLAG_END_HEADERS, 5, "");
  for (const std::string& error :
       {Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 0, std::string(6, '\0')),
        Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 1, ""), half_block + kAcknowledgement + rest}) {
    const std::unique_ptr<Connection> connection = Limited(server);
    connection->Send(error);
    EXPECT_TRUE(connection->ReadUntil(NGHTTP2_GOAWAY));
    EXPECT_FALSE(connection->ReadUntil(NGHTTP2_GOAWAY));
    WaitForMetric(server, "rapt_open_calls", 0);
  }
}

TEST(Http2ConnectionTest, AnAcknowledgementOfNothingEndsTheConnection) {
  const ServerProcess server(Flags());
  Connection connection(server.grpc_address());
  for (int n = 0; n < 2; ++n) connection.Send(kAcknowledgement);
  EXPECT_EQ(connection.ReadGoAway(), NGHTTP2_PROTOCOL_ERROR);
}

TEST(Http2ConnectionTest, SmallCallsWhoseResponsesAreNotReadHinderNobody) {
  const ServerProcess server(Flags({"--max_calls_per_caller=300"}));
  Connection connection(server.grpc_address());
  // No answer fits into a window of 0.
  connection.Send(Frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4", 2) + BigEndian(0)));
  for (uint32_t n = 0; n < 256; ++n) {
    connection.OpenCall(2 * n + 1, CallHeaders("/grpc.health.v1.Health/Check"));
    connection.SendData(2 * n + 1, Prefixed(""), /*ends=*/true);
  }
  Bystander bystander(server);
  for (int n = 0; n < 10; ++n) EXPECT_TRUE(bystander.IsServed());
}

// IPv4 over an IPv6 socket counts as IPv4.
TEST(Http2ConnectionTest, AnAddressHasALimitedShareOfTheConnections) {
  const ServerProcess server(Flags({"--grpc_address=[::]:0", "--insecure", "--max_connections=3",
                                    "--max_connections_per_address=2"}));
  const std::string port = server.grpc_address().substr(server.grpc_address().rfind(':'));
  Connection first("127.0.0.1" + port), second("127.0.0.1" + port), third("127.0.0.1" + port);
  EXPECT_FALSE(third.Read());
  EXPECT_THAT(AskWhetherLive(first, 1), HasStatus(grpc::StatusCode::OK));
  EXPECT_THAT(AskWhetherLive(second, 1), HasStatus(grpc::StatusCode::OK));
  Connection other("[::1]" + port), beyond("[::1]" + port);
  EXPECT_FALSE(beyond.Read());  // by --max_connections
  EXPECT_THAT(AskWhetherLive(other, 1), HasStatus(grpc::StatusCode::OK));
  EXPECT_EQ(ReadMetric(server, "rapt_refused_connections_total"), 2);
  EXPECT_EQ(ReadMetric(server, "rapt_open_connections"), 3);
}

// Returns a connection on which all that the server sends at first has been read.
std::unique_ptr<Connection> Greeted(const ServerProcess& server, const std::string& from) {
  auto connection = std::make_unique<Connection>(server.grpc_address(), from);
  for (bool is_acknowledged = false; !is_acknowledged;) {
    const auto settings = connection->ReadUntil(NGHTTP2_SETTINGS);
    if (!settings) break;
    is_acknowledged = (settings->flags & NGHTTP2_FLAG_ACK) != 0;
  }
  connection->Send(Frame(NGHTTP2_PING, NGHTTP2_FLAG_NONE, 0, "12345678"));
  EXPECT_TRUE(connection->ReadUntil(NGHTTP2_PING));
  return connection;
}

// Returns when the server has stopped.
void Pause(const ServerProcess& server) {
  kill(server.pid(), SIGSTOP);
  EXPECT_EQ(waitpid(server.pid(), nullptr, WUNTRACED), server.pid());
}

void Resume(const ServerProcess& server) { kill(server.pid(), SIGCONT); }

// Reads the limit after the first SETTINGS although the calls come with the preface.
TEST(Http2ConnectionTest, TheFirstSettingsPrecedeALowerLimit) {
  if (kSecurity == Security::kTls) GTEST_SKIP() << "the handshake comes before the preface";
  const ServerProcess server(Flags({"--max_open_calls=1", "--max_streams_per_connection=9"}));
  Pause(server);
  Connection connection(server.grpc_address());
  for (const uint32_t stream : {1, 3, 5}) connection.OpenCall(stream, CallHeaders(kInfer));
  Resume(server);
  for (const uint32_t limit : {9, 1}) EXPECT_EQ(ReadStreamLimit(connection), limit);
}

// The server is stopped until all calls wait in its sockets. It serves each busy connection for
// about a millisecond at a time; the other address should wait for one or two of them.
TEST(Http2ConnectionTest, BusyConnectionsOfAnAddressDoNotDelayAnother) {
  constexpr int kBusy = 200;
  const ServerProcess server(Flags());
  std::string calls;
  for (uint32_t n = 0; n < 1000; ++n) {
    calls += Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_END_STREAM, 2 * n + 1,
                   HeaderBlock(CallHeaders(kLive)));
  }
  std::vector<std::unique_ptr<Connection>> busy;
  for (int n = 0; n < kBusy; ++n) busy.push_back(Greeted(server, "127.0.0.2"));
  const std::unique_ptr<Connection> other = Greeted(server, "127.0.0.1");
  Pause(server);
  for (const auto& connection : busy) connection->SendWithoutWaiting(calls);
  other->OpenCall(1, CallHeaders(kLive));
  other->SendData(1, Prefixed(""), /*ends=*/true);
  Resume(server);
  EXPECT_THAT(other->ReadResponse(1), HasStatus(grpc::StatusCode::OK));
  const auto served = std::count_if(busy.begin(), busy.end(),
                                    [](const auto& connection) { return connection->HasUnread(); });
  EXPECT_LT(served, kBusy / 2);
}

TEST(Http2ConnectionTest, CallsBeforeAResetOfTheConnectionAreNotServed) {
  const ServerProcess server(Flags());
  std::unique_ptr<Connection> reset = Greeted(server, "127.0.0.1");
  reset->Send(Frame(NGHTTP2_PING, NGHTTP2_FLAG_NONE, 0, "12345678"));
  while (!reset->HasUnread()) std::this_thread::yield();
  Pause(server);
  reset->OpenCall(1, CallHeaders(kLive));
  reset->SendData(1, Prefixed(""), /*ends=*/true);
  reset.reset();  // by the kernel, because there are unread bytes
  Resume(server);
  WaitForMetric(server, "rapt_open_connections", 0);
  Connection other(server.grpc_address());
  EXPECT_THAT(AskWhetherLive(other, 1), HasStatus(grpc::StatusCode::OK));
  WaitForMetric(server, "rapt_requests_total", 1, {{"method", kLive + 1}});
}

// Of the frames GOAWAY.
constexpr uint32_t kNoLastStream = 0x7fffffff;

std::optional<uint32_t> ReadLastStream(Connection& connection) {
  const auto frame = connection.ReadUntil(NGHTTP2_GOAWAY);
  if (!frame) return std::nullopt;
  EXPECT_EQ(frame->Number(4), NGHTTP2_NO_ERROR);
  return frame->Number(0);
}

TEST(Http2ConnectionTest, IdleConnectionsAreClosed) {
  const ServerProcess server(Flags({"--max_connection_idle=1s"}));
  Connection connection(server.grpc_address());
  EXPECT_EQ(ReadLastStream(connection), kNoLastStream);
  EXPECT_EQ(ReadLastStream(connection), 0);
  EXPECT_FALSE(connection.Read());
}

TEST(Http2ConnectionTest, OldConnectionsGoAwayWhenTheirCallsHaveEnded) {
  // Well before the 2 s after which a silent call ends.
  const ServerProcess server(Flags({"--max_connection_age=100ms"}));
  Connection connection(server.grpc_address());
  connection.OpenCall(1, CallHeaders(kLive));
  EXPECT_EQ(ReadLastStream(connection), kNoLastStream);
  connection.SendData(1, Prefixed(""), /*ends=*/true);
  EXPECT_THAT(connection.ReadResponse(1), HasStatus(grpc::StatusCode::OK));
  EXPECT_EQ(ReadLastStream(connection), 1);  // although the caller acknowledges no ping
  EXPECT_FALSE(connection.Read());
}

// gRPC's clients cannot repeat it without retries.
TEST(Http2ConnectionTest, ACallOnItsWayWhenItsConnectionEndsIsServed) {
  const ServerProcess server(Flags({"--max_connection_age=100ms"}));
  Connection connection(server.grpc_address());
  EXPECT_EQ(ReadLastStream(connection), kNoLastStream);
  const auto ping = connection.ReadUntil(NGHTTP2_PING);
  ASSERT_TRUE(ping);
  EXPECT_THAT(AskWhetherLive(connection, 1), HasStatus(grpc::StatusCode::OK));
  connection.Send(Frame(NGHTTP2_PING, NGHTTP2_FLAG_ACK, 0, ping->payload));
  EXPECT_EQ(ReadLastStream(connection), 1);
  EXPECT_FALSE(connection.Read());
}

TEST(Http2ConnectionTest, PingsWithoutCallsAreTooMany) {
  const ServerProcess server(Flags());
  Connection connection(server.grpc_address());
  for (int n = 0; n < 4; ++n) connection.Send(Frame(NGHTTP2_PING, 0, 0, "12345678"));
  const auto last = connection.ReadUntil(NGHTTP2_GOAWAY);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->Number(4), NGHTTP2_ENHANCE_YOUR_CALM);
  EXPECT_THAT(last->payload, HasSubstr("too_many_pings"));
}

// gRPC's clients send such resets; other calls of the connection do not suffer.
TEST(Http2ConnectionTest, AResetOfAStreamThatWasNotOpenedIsIgnored) {
  const ServerProcess server(Flags());
  Connection connection(server.grpc_address());
  connection.OpenCall(1, CallHeaders(kLive));
  for (const uint32_t stream : {3u, 9u}) {
    connection.Send(Frame(NGHTTP2_RST_STREAM, 0, stream, BigEndian(NGHTTP2_CANCEL)));
  }
  connection.SendData(1, Prefixed(""), /*ends=*/true);
  EXPECT_THAT(connection.ReadResponse(1), HasStatus(grpc::StatusCode::OK));
  EXPECT_THAT(AskWhetherLive(connection, 9), HasStatus(grpc::StatusCode::OK));
}

TEST(Http2ConnectionTest, ADrainingServerSendsGoAwayBeforeItRefuses) {
  ServerProcess server(Flags({"--drain_pause=100ms", "--drain_refusal_time=200ms"}));
  Connection connection(server.grpc_address());
  connection.OpenCall(1, CallHeaders(kLive));
  EXPECT_THAT(AskWhetherLive(connection, 3), HasStatus(grpc::StatusCode::OK));
  server.Terminate();
  EXPECT_EQ(ReadLastStream(connection), kNoLastStream);
  connection.SendData(1, Prefixed(""), /*ends=*/true);
  EXPECT_THAT(connection.ReadResponse(1), HasStatus(grpc::StatusCode::OK));
  EXPECT_EQ(ReadLastStream(connection), 3);
  EXPECT_FALSE(connection.Read());
  EXPECT_EQ(server.Wait(), 0);
}

TEST(Http2ConnectionTest, ADrainingServerRefusesNoCallOfACallerThatItHasNotTold) {
  ServerProcess server(Flags({"--drain_pause=100ms", "--drain_refusal_time=200ms"}));
  Connection connection(server.grpc_address());
  server.Terminate();
  bool is_told = false;
  for (uint32_t stream = 1; !is_told; stream += 2) {
    connection.OpenCall(stream, CallHeaders(kInfer));
    connection.SendData(stream, Prefixed(""), /*ends=*/true);
    for (bool has_ended = false; !is_told && !has_ended;) {
      const auto frame = connection.Read();
      ASSERT_TRUE(frame);
      is_told = frame->type == NGHTTP2_GOAWAY;
      has_ended = frame->headers.contains("grpc-status");
      EXPECT_THAT(frame->headers, Not(HasStatus(grpc::StatusCode::UNAVAILABLE)));
    }
  }
  EXPECT_EQ(server.Wait(), 0);
}

TEST(Http2ConnectionTest, WatchesAreCountedAsOpenCalls) {
  const ServerProcess server(Flags({"--max_calls_per_caller=2"}));
  Connection connection(server.grpc_address());
  for (const uint32_t stream : {1, 3, 5}) {
    connection.OpenCall(stream, CallHeaders(kWatch));
  }
  EXPECT_THAT(connection.ReadResponse(5), HasStatus(grpc::StatusCode::RESOURCE_EXHAUSTED));
}

TEST(Http2ConnectionTest, GarbageEndsTheConnectionOnly) {
  const ServerProcess server(Flags());
  Bystander bystander(server);
  for (const std::string& garbage :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100000, 'x'),
        Frame(NGHTTP2_HEADERS, 0, 0, "x"), Frame(NGHTTP2_SETTINGS, 0, 0, "x"),
        Frame(NGHTTP2_PUSH_PROMISE, 0, 1, "1234"),
        Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, "\xFF\xFF\xFF\xFF\xFF\xFF")}) {
    Connection connection(server.grpc_address());
    connection.Send(garbage);
    while (connection.Read()) {
    }
    EXPECT_TRUE(bystander.IsServed());
  }
}

}  // namespace
}  // namespace rapt::test
