// What the wire costs: the server against raw TCP, memcpy and generated gRPC code, in one run, call
// by call in turn, medians. Prints Markdown for RESULTS.md.
//
// The request is Q of one row, K and V of the stated payload, and a window of a few keys, so that
// next to nothing is computed; the answer is a row. The client sends prepared bytes: it costs every
// peer the same.
#include <arpa/inet.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/server_process.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "rapt/client.h"
#include "server/base/check.h"

namespace rapt::bench {
namespace {

using Seconds = std::chrono::duration<double>;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

constexpr char kPath[] = "/inference.GRPCInferenceService/ModelInfer";
constexpr int kAnswerBytes = 256;

// --- Peers ---------------------------------------------------------------------------------------

void TellPort(int pipe, int port) {
  const std::string line = absl::StrCat(port, "\n");
  RAPT_CHECK(write(pipe, line.data(), line.size()) > 0, "the pipe is closed");
}

bool ReadAll(int connection, char* data, int64_t size) {
  while (size > 0) {
    const ssize_t n = read(connection, data, static_cast<size_t>(size));
    if (n <= 0) return false;
    data += n;
    size -= n;
  }
  return true;
}

void WriteAll(int connection, const char* data, int64_t size) {
  while (size > 0) {
    const ssize_t n = write(connection, data, static_cast<size_t>(size));
    RAPT_CHECK(n > 0, "the connection broke");
    data += n;
    size -= n;
  }
}

// A length, that many bytes into a buffer used again; answers a few.
[[noreturn]] void ServeRawTcp(int pipe) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(name);
  RAPT_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&name), size) == 0, "can't bind");
  RAPT_CHECK(listen(listener, 16) == 0, "can't listen");
  getsockname(listener, reinterpret_cast<sockaddr*>(&name), &size);
  TellPort(pipe, ntohs(name.sin_port));
  std::vector<char> buffer(256 * kMiB), answer(kAnswerBytes);
  for (;;) {
    const int connection = accept(listener, nullptr, nullptr);
    const int on = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    for (int64_t bytes; ReadAll(connection, reinterpret_cast<char*>(&bytes), sizeof(bytes));) {
      if (!ReadAll(connection, buffer.data(), bytes)) break;
      WriteAll(connection, answer.data(), kAnswerBytes);
    }
    close(connection);
  }
}

// Parses the request, answers a few bytes, reads nothing.
class GeneratedEcho final : public GRPCInferenceService::Service {
  grpc::Status ModelInfer(grpc::ServerContext*, const ModelInferRequest* request,
                          ModelInferResponse* response) override {
    response->set_id(request->id());
    response->add_raw_output_contents(std::string(kAnswerBytes, 'y'));
    return grpc::Status::OK;
  }
};

[[noreturn]] void ServeGenerated(int pipe) {
  GeneratedEcho service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(-1);
  const auto server = builder.BuildAndStart();
  TellPort(pipe, port);
  server->Wait();
  std::_Exit(0);
}

// --- Clients -------------------------------------------------------------------------------------

std::string SerializedRequest(int64_t payload_bytes) {
  constexpr int64_t kSize = 64;
  const int64_t keys = std::max<int64_t>(1, payload_bytes / 2 / kSize / 4);
  ModelInferRequest request;
  request.set_model_name("attention");
  const auto add = [&request](const char* name, int64_t rows) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (int64_t axis : {int64_t{1}, int64_t{1}, rows, kSize}) input.add_shape(axis);
    request.add_raw_input_contents(std::string(rows * kSize * 4, '\0'));
  };
  add("Q", 1);
  add("K", keys);
  add("V", keys);
  (*request.mutable_parameters())["left_window_size"].set_int64_param(4);
  (*request.mutable_parameters())["right_window_size"].set_int64_param(4);
  return request.SerializeAsString();
}

std::shared_ptr<grpc::Channel> Connect(const Server& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server.port),
                                   grpc::InsecureChannelCredentials(), arguments);
}

// Calls that may overlap, from one thread.
class Caller {
 public:
  explicit Caller(const Server& server, bool declares_size)
      : stub_(Connect(server)), declares_size_(declares_size) {}
  ~Caller() {
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  void Start(const grpc::ByteBuffer& request) {
    auto* call = new Call;
    if (declares_size_) {
      call->context.AddMetadata("rapt-message-bytes", std::to_string(request.Length()));
    }
    call->reader = stub_.PrepareUnaryCall(&call->context, kPath, request, &queue_);
    call->reader->StartCall();
    call->reader->Finish(&call->response, &call->status, call);
  }

  void WaitForOne() {
    void* tag;
    bool ok;
    RAPT_CHECK(queue_.Next(&tag, &ok), "the queue is shut down");
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    if (!call->status.ok()) std::fprintf(stderr, "%s\n", call->status.error_message().c_str());
    RAPT_CHECK(call->status.ok(), "a call failed");
  }

  void CallOnce(const grpc::ByteBuffer& request) {
    Start(request);
    WaitForOne();
  }

 private:
  struct Call {
    grpc::ClientContext context;
    grpc::ByteBuffer response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
  };

  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  const bool declares_size_;
};

class RawCaller {
 public:
  explicit RawCaller(const Server& server) : connection_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(static_cast<uint16_t>(server.port));
    RAPT_CHECK(connect(connection_, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0,
               "can't connect");
    const int on = 1;
    setsockopt(connection_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  ~RawCaller() { close(connection_); }

  void CallOnce(const std::string& bytes) {
    const auto size = static_cast<int64_t>(bytes.size());
    WriteAll(connection_, reinterpret_cast<const char*>(&size), sizeof(size));
    WriteAll(connection_, bytes.data(), size);
    char answer[kAnswerBytes];
    RAPT_CHECK(ReadAll(connection_, answer, kAnswerBytes), "no answer");
  }

 private:
  const int connection_;
};

// --- Measuring -----------------------------------------------------------------------------------

// One of those compared: its call, its server's process, what was measured.
struct Peer {
  const char* name;
  pid_t server;
  std::function<void()> call;
  std::vector<double> seconds = {};
  std::vector<double> cpu_seconds = {};

  void Measure() {
    const double cpu = CpuSeconds(server);
    const auto begin = std::chrono::steady_clock::now();
    call();
    seconds.push_back(Seconds(std::chrono::steady_clock::now() - begin).count());
    cpu_seconds.push_back(CpuSeconds(server) - cpu);
  }
};

int RoundsFor(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>(2048 * kMiB / bytes, 9, 400));
}

void CompareSizes(const Server& raw, const Server& generated, const Server& rapt) {
  std::printf(
      "| payload | peer | p50 ms | GB/s | of raw TCP | server CPU ns/byte | of generated |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  for (const int64_t bytes : {64 * kKiB, 1 * kMiB, 6 * kMiB, 48 * kMiB, 192 * kMiB}) {
    const std::string request = SerializedRequest(bytes);
    const grpc::Slice slice(request.data(), request.size(), grpc::Slice::STATIC_SLICE);
    const grpc::ByteBuffer buffer(&slice, 1);
    std::string copy(request.size(), '\0');
    RawCaller raw_caller(raw);
    Caller generated_caller(generated, false), rapt_caller(rapt, false), declaring(rapt, true);
    Peer peers[] = {
        {"raw TCP", raw.pid, [&] { raw_caller.CallOnce(request); }},
        {"generated gRPC (sync)", generated.pid, [&] { generated_caller.CallOnce(buffer); }},
        {"rapt", rapt.pid, [&] { rapt_caller.CallOnce(buffer); }},
        {"rapt, size declared", rapt.pid, [&] { declaring.CallOnce(buffer); }},
        {"memcpy", getpid(), [&] { std::memcpy(copy.data(), request.data(), copy.size()); }},
    };
    for (Peer& peer : peers) peer.call();
    for (int round = RoundsFor(bytes); round > 0; --round) {
      for (Peer& peer : peers) peer.Measure();
    }
    const double size = static_cast<double>(request.size());
    const double raw_seconds = Median(peers[0].seconds);
    const double generated_cpu = Median(peers[1].cpu_seconds);
    for (const Peer& peer : peers) {
      const double seconds = Median(peer.seconds), cpu = Median(peer.cpu_seconds);
      std::printf("| %ld KiB | %s | %.3f | %.2f | %.2f | %.3f | %.2f |\n",
                  static_cast<long>(bytes / kKiB), peer.name, seconds * 1e3, size / seconds * 1e-9,
                  raw_seconds / seconds, cpu / size * 1e9, cpu / generated_cpu);
    }
    std::fflush(stdout);
  }
}

// Calls in flight: the most anonymous memory the server has, beyond what it had before.
double PeakPerPayload(const Server& server, int64_t bytes, int in_flight, int rounds) {
  const std::string request = SerializedRequest(bytes);
  const grpc::Slice slice(request.data(), request.size(), grpc::Slice::STATIC_SLICE);
  const grpc::ByteBuffer buffer(&slice, 1);
  Caller caller(server, true);
  std::atomic<bool> stopping{false};
  std::atomic<int64_t> peak{0};
  std::thread watch([&] {
    while (!stopping) {
      peak = std::max(peak.load(), RssAnonBytes(server.pid));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  for (int n = 0; n < in_flight; ++n) caller.Start(buffer);
  for (int n = 0; n < in_flight * rounds; ++n) {
    caller.WaitForOne();
    caller.Start(buffer);
  }
  for (int n = 0; n < in_flight; ++n) caller.WaitForOne();
  stopping = true;
  watch.join();
  return static_cast<double>(peak) / static_cast<double>(bytes * in_flight);
}

double CallsPerSecond(const Server& server, bool declares_size, int in_flight, int calls) {
  const std::string request = SerializedRequest(kKiB);
  const grpc::Slice slice(request);
  const grpc::ByteBuffer buffer(&slice, 1);
  Caller caller(server, declares_size);
  for (int n = 0; n < in_flight; ++n) caller.Start(buffer);
  const auto begin = std::chrono::steady_clock::now();
  for (int n = 0; n < calls; ++n) {
    caller.WaitForOne();
    caller.Start(buffer);
  }
  const double seconds = Seconds(std::chrono::steady_clock::now() - begin).count();
  for (int n = 0; n < in_flight; ++n) caller.WaitForOne();
  return calls / seconds;
}

// One attention call of K and V of so many bytes together, by our client library and by generated
// code, which a client without it would use.
class AttendCaller {
 public:
  AttendCaller(const Server& server, int64_t payload_bytes, bool wants_present)
      : keys_(payload_bytes / 2 / kSize / 4),
        wants_present_(wants_present),
        row_(kSize),
        kv_(keys_ * kSize),
        stub_(v1::AttentionService::NewStub(Connect(server))) {
    auto client = client::Client::Connect(absl::StrCat("127.0.0.1:", server.port));
    RAPT_CHECK(client.ok(), "no connection");
    client_ = *std::move(client);
  }

  void CallByLibrary() {
    const auto kv = client::View<float>({1, 1, keys_, kSize}, kv_);
    const auto result = client_->Attend({.q = client::View<float>({1, 1, 1, kSize}, row_),
                                         .k = kv,
                                         .v = kv,
                                         .window = {.left = 4, .right = 4},
                                         .wants_present = wants_present_});
    RAPT_CHECK(result.ok(), "a call failed");
  }

  void CallByGeneratedCode() {
    v1::AttendRequest request;
    Fill({1, 1, 1, kSize}, row_, *request.mutable_q());
    Fill({1, 1, keys_, kSize}, kv_, *request.mutable_k());
    Fill({1, 1, keys_, kSize}, kv_, *request.mutable_v());
    request.mutable_attention()->mutable_window()->set_left(4);
    request.mutable_attention()->mutable_window()->set_right(4);
    request.set_want_present(wants_present_);
    grpc::ClientContext context;
    context.AddMetadata("rapt-message-bytes", std::to_string(request.ByteSizeLong()));
    v1::AttendResponse response;
    RAPT_CHECK(stub_->Attend(&context, request, &response).ok(), "a call failed");
  }

 private:
  static constexpr int64_t kSize = 64;

  static void Fill(std::initializer_list<int64_t> shape, const std::vector<float>& values,
                   v1::Tensor& tensor) {
    tensor.set_dtype(v1::FP32);
    tensor.mutable_shape()->Add(shape.begin(), shape.end());
    tensor.set_data(values.data(), values.size() * sizeof(float));
  }

  const int64_t keys_;
  const bool wants_present_;
  const std::vector<float> row_, kv_;
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<client::Client> client_;
};

void CompareClients(const Server& rapt) {
  std::printf(
      "\n| request | answer | client | p50 ms | client CPU ns/byte | of generated |\n"
      "| --- | --- | --- | --- | --- | --- |\n");
  for (const int64_t bytes : {64 * kKiB, 1 * kMiB, 6 * kMiB, 48 * kMiB}) {
    for (const bool wants_present : {false, true}) {
      AttendCaller caller(rapt, bytes, wants_present);
      Peer peers[] = {
          {"generated code", getpid(), [&] { caller.CallByGeneratedCode(); }},
          {"rapt::client", getpid(), [&] { caller.CallByLibrary(); }},
      };
      for (Peer& peer : peers) peer.call();
      for (int round = RoundsFor(4 * bytes); round > 0; --round) {
        for (Peer& peer : peers) peer.Measure();
      }
      const double size = static_cast<double>(bytes);
      const double generated_cpu = Median(peers[0].cpu_seconds);
      for (const Peer& peer : peers) {
        const double cpu = Median(peer.cpu_seconds);
        std::printf("| %ld KiB | %s | %s | %.3f | %.3f | %.2f |\n", static_cast<long>(bytes / kKiB),
                    wants_present ? "as large" : "a row", peer.name, Median(peer.seconds) * 1e3,
                    cpu / size * 1e9, cpu / generated_cpu);
      }
      std::fflush(stdout);
    }
  }
}

void CompareSmallCalls(const Server& generated, const Server& rapt) {
  std::vector<double> echo, undeclared, declared;
  for (int round = 0; round < 5; ++round) {
    echo.push_back(CallsPerSecond(generated, false, 64, 10'000));
    undeclared.push_back(CallsPerSecond(rapt, false, 64, 10'000));
    declared.push_back(CallsPerSecond(rapt, true, 64, 10'000));
  }
  std::printf(
      "\n1 KiB calls/s, 64 in flight: generated gRPC (sync) %.0f, rapt %.0f, rapt with declared "
      "size "
      "%.0f\n",
      Median(echo), Median(undeclared), Median(declared));
}

int Main() {
  // Before this process has gRPC threads, which fork() would lose.
  const Server raw = Fork(ServeRawTcp);
  const Server generated = Fork(ServeGenerated);
  const Server rapt = StartRapt({});
  std::string congestion;
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> congestion;
  std::printf("TCP congestion control: %s, for every peer\n\n", congestion.c_str());
  CompareSizes(raw, generated, rapt);
  CompareClients(rapt);
  CompareSmallCalls(generated, rapt);
  std::printf(
      "\nPeak anonymous memory per payload, 48 MiB, 4 in flight: rapt %.2f, generated %.2f\n",
      PeakPerPayload(rapt, 48 * kMiB, 4, 5), PeakPerPayload(generated, 48 * kMiB, 4, 5));
  for (const Server& server : {raw, generated, rapt}) Stop(server);
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main() { return rapt::bench::Main(); }
