// rapt-server with TLS: peers that are slow, mistaken or many.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/support/certificates.h"
#include "tests/support/loopback.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_http2.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

// OpenSSL's client on a blocking socket, which trusts every server.
class RawTls {
 public:
  explicit RawTls(const std::string& address)
      : descriptor_(ConnectTo(address)),
        context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free),
        ssl_(SSL_new(context_.get()), SSL_free) {
    SSL_set_alpn_protos(ssl_.get(), reinterpret_cast<const unsigned char*>("\2h2"), 3);
    SSL_set_fd(ssl_.get(), descriptor_.get());
    SSL_set_connect_state(ssl_.get());
  }

  int descriptor() const { return descriptor_.get(); }

  bool Handshake() { return SSL_do_handshake(ssl_.get()) == 1; }
  bool Send(const std::string& bytes) {
    return SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size())) > 0;
  }
  // Reads until the server ends the connection.
  std::string ReadToEnd() {
    std::string all, part(16384, '\0');
    for (size_t count; SSL_read_ex(ssl_.get(), part.data(), part.size(), &count) == 1;) {
      all.append(part, 0, count);
    }
    return all;
  }
  // Whether the server has ended it by an alert, after what it had to send.
  bool HasEndedCleanly() const {
    return (SSL_get_shutdown(ssl_.get()) & SSL_RECEIVED_SHUTDOWN) != 0;
  }

 private:
  const Descriptor descriptor_;
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context_;
  const std::unique_ptr<SSL, void (*)(SSL*)> ssl_;
};

class Http2TlsTest : public ::testing::Test {
 protected:
  Http2TlsTest() { std::signal(SIGPIPE, SIG_IGN); }

  std::vector<std::string> Flags(std::vector<std::string> flags = {}) const {
    flags.push_back("--threads=2");
    for (const std::string& flag : certificate_.Flags()) flags.push_back(flag);
    return flags;
  }

  // gRPC's client, which other peers must not disturb.
  std::unique_ptr<inference::GRPCInferenceService::Stub> Stub(const ServerProcess& server) const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    return inference::GRPCInferenceService::NewStub(grpc::CreateCustomChannel(
        server.grpc_address(), grpc::SslCredentials({certificate_.authority(), "", ""}),
        arguments));
  }

  const ServerCertificate certificate_;
};

grpc::Status AskWhetherLive(inference::GRPCInferenceService::Stub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  inference::ServerLiveResponse response;
  return stub.ServerLive(&context, {}, &response);
}

void ExpectServed(inference::GRPCInferenceService::Stub& stub) {
  const grpc::Status status = AskWhetherLive(stub);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// The first bytes of a ClientHello.
const std::string kHalfHello("\x16\x03\x01\x02\x00\x01\x00\x01\xFC\x03\x03", 11);

// Blocks until the server closes the connection. Returns the time since `begin`.
steady_clock::duration TimeToEnd(int descriptor, steady_clock::time_point begin) {
  char buffer[4096];
  while (read(descriptor, buffer, sizeof(buffer)) > 0) {
  }
  return steady_clock::now() - begin;
}

TEST_F(Http2TlsTest, SlowHandshakesEndAndOthersAreServed) {
  const ServerProcess server(Flags());
  const auto begin = steady_clock::now();
  const Descriptor silent(ConnectTo(server.grpc_address()));
  const Descriptor half(ConnectTo(server.grpc_address()));
  ASSERT_GT(send(half.get(), kHalfHello.data(), kHalfHello.size(), MSG_NOSIGNAL), 0);
  RawTls without_settings(server.grpc_address());
  ASSERT_TRUE(without_settings.Handshake());
  const auto stub = Stub(server);
  ExpectServed(*stub);
  for (const int descriptor : {silent.get(), half.get(), without_settings.descriptor()}) {
    const auto time = TimeToEnd(descriptor, begin);
    EXPECT_GT(time, seconds(15));
    EXPECT_LT(time, seconds(40));
  }
  ExpectServed(*stub);
  WaitForMetric(server, "rapt_open_connections", 1);
}

TEST_F(Http2TlsTest, ConnectionsInAHandshakeAreCounted) {
  const ServerProcess server(Flags({"--max_connections_per_address=3"}));
  const Descriptor silent(ConnectTo(server.grpc_address()));
  const Descriptor half(ConnectTo(server.grpc_address()));
  ASSERT_GT(send(half.get(), kHalfHello.data(), kHalfHello.size(), MSG_NOSIGNAL), 0);
  const auto stub = Stub(server);
  ExpectServed(*stub);
  EXPECT_EQ(ReadMetric(server, "rapt_open_connections"), 3);
  EXPECT_FALSE(RawTls(server.grpc_address()).Handshake());
  WaitForMetric(server, "rapt_refused_connections_total", 1);
  ExpectServed(*stub);
}

TEST_F(Http2TlsTest, PlainTextIsRefused) {
  const ServerProcess server(Flags());
  const auto stub = Stub(server);
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\n\r\n"), Preface(), std::string(100000, 'x')}) {
    const Descriptor connection(ConnectTo(server.grpc_address()));
    send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL);
    EXPECT_LT(TimeToEnd(connection.get(), steady_clock::now()), seconds(15));
    ExpectServed(*stub);
  }
  EXPECT_EQ(RawHttp2(server.grpc_address()).ReadGoAway(), std::nullopt);
}

TEST_F(Http2TlsTest, TlsToAPlainTextPortFails) {
  const ServerProcess server;
  EXPECT_FALSE(RawTls(server.grpc_address()).Handshake());
  const grpc::Status status = AskWhetherLive(*Stub(server));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  RawHttp2 connection(server.grpc_address());
  EXPECT_TRUE(connection.ReadUntil(NGHTTP2_SETTINGS)) << "others are served";
}

TEST_F(Http2TlsTest, LargeMessagesBothWays) {
  const ServerProcess server(Flags());
  constexpr int64_t kHeads = 16, kQueries = 1024, kSize = 256;  // 16 MiB each way
  const std::vector<float> q(kHeads * kQueries * kSize, 0.5f), k(kHeads * kSize, 0.25f);
  std::vector<float> v(kHeads * kSize);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  const auto add = [&request](const char* name, int64_t tokens, const std::vector<float>& x) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, kHeads, tokens, kSize}) input.add_shape(axis);
    request.add_raw_input_contents(x.data(), x.size() * sizeof(float));
  };
  add("Q", kQueries, q);
  add("K", 1, k);
  add("V", 1, v);
  grpc::ClientContext context;
  inference::ModelInferResponse response;
  const grpc::Status status = Stub(server)->ModelInfer(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  // Each query sees one key only, so that the output repeats its value.
  const auto* y = reinterpret_cast<const float*>(response.raw_output_contents(0).data());
  ASSERT_EQ(response.raw_output_contents(0).size(), q.size() * sizeof(float));
  for (size_t i = 0; i < q.size(); ++i) {
    const size_t head = i / (kQueries * kSize);
    ASSERT_FLOAT_EQ(y[i], v[head * kSize + i % kSize]) << i;
  }
}

TEST_F(Http2TlsTest, FloodsEndTheConnection) {
  const ServerProcess server(Flags());
  const auto stub = Stub(server);
  const std::string headers =
      HeaderBlock(CallHeaders("/inference.GRPCInferenceService/ModelInfer"));
  const std::string open = Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1, headers);
  const std::function<std::string(uint32_t n)> floods[] = {
      [](uint32_t) { return Frame(NGHTTP2_PING, 0, 0, "12345678"); },
      [](uint32_t) { return Frame(NGHTTP2_SETTINGS, 0, 0, ""); },
      [&open](uint32_t n) { return n == 0 ? open : Frame(NGHTTP2_DATA, 0, 1, ""); },
  };
  for (const auto& flood : floods) {
    RawTls attacker(server.grpc_address());
    ASSERT_TRUE(attacker.Handshake());
    // Fewer bytes than the server reads of a connection that it has ended.
    std::string bytes = Preface();
    for (uint32_t n = 0; n < 20000 && bytes.size() < 900000; ++n) bytes += flood(n);
    attacker.Send(bytes);
    const std::string calm = BigEndian(NGHTTP2_ENHANCE_YOUR_CALM);
    EXPECT_THAT(attacker.ReadToEnd(), HasSubstr(calm));
    EXPECT_TRUE(attacker.HasEndedCleanly());
    ExpectServed(*stub);
  }
  WaitForMetric(server, "rapt_open_calls", 0);
}

// Each costs a decryption.
TEST_F(Http2TlsTest, TinyRecordsStopNobody) {
  const ServerProcess server(Flags());
  const auto stub = Stub(server);
  std::atomic<bool> has_ended{false};
  std::thread attacker([&] {
    RawTls connection(server.grpc_address());
    EXPECT_TRUE(connection.Handshake());
    connection.Send(Preface());
    const std::string ignored = Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(1));
    for (int n = 0; n < 5000; ++n) {
      for (const char byte : ignored) connection.Send(std::string(1, byte));
    }
    has_ended = true;
  });
  do {
    ExpectServed(*stub);
  } while (!has_ended);
  attacker.join();
}

TEST_F(Http2TlsTest, ADrainEndsConnectionsCleanly) {
  ServerProcess server(Flags());
  RawTls connection(server.grpc_address());
  ASSERT_TRUE(connection.Handshake());
  connection.Send(Preface());
  const Descriptor in_handshake(ConnectTo(server.grpc_address()));
  ASSERT_GT(send(in_handshake.get(), kHalfHello.data(), kHalfHello.size(), MSG_NOSIGNAL), 0);
  WaitForMetric(server, "rapt_open_connections", 2);
  server.Terminate();
  connection.ReadToEnd();
  EXPECT_TRUE(connection.HasEndedCleanly());
  EXPECT_LT(TimeToEnd(in_handshake.get(), steady_clock::now()), seconds(15));
  EXPECT_EQ(server.Wait(), 0);
}

TEST_F(Http2TlsTest, ManyHandshakesAtOnceStopNobody) {
  constexpr int kConnections = 200, kThreads = 4;
  const ServerProcess server(Flags({"--max_connections=1000"}));
  const auto stub = Stub(server);
  ExpectServed(*stub);
  std::atomic<int> open{0}, finished{0};
  std::vector<std::thread> threads;
  for (int n = 0; n < kThreads; ++n) {
    threads.emplace_back([&] {
      for (int i = 0; i < kConnections / kThreads; ++i) {
        if (RawTls(server.grpc_address()).Handshake()) ++open;
      }
      ++finished;
    });
  }
  do {
    ExpectServed(*stub);
  } while (finished < kThreads);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(open, kConnections);
  WaitForMetric(server, "rapt_open_connections", 1);
}

}  // namespace
}  // namespace rapt::test
