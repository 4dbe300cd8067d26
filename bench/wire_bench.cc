// The cost of the transport: the server compared with raw TCP, memcpy, generated gRPC code and
// Python's grpcio, and its alternatives to TCP compared with TCP. Calls are interleaved in one run;
// figures are medians. Takes about two minutes. Prints Markdown for RESULTS.md.
//
// A request has one row of Q, and K and V of the stated payload. If only the transport is
// measured, a window of a few keys keeps the computation negligible. The response is one row. The
// client sends serialized requests, so its cost is the same for every peer.
#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "bench/comparison.h"
#include "bench/infer_call.h"
#include "bench/server_process.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "rapt/client.h"

namespace rapt::bench {
namespace {

using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

constexpr int kResponseBytes = 256;
constexpr char kPythonVariable[] = "RAPT_BENCH_PYTHON";

// --- Peers ---------------------------------------------------------------------------------------

void WritePort(int pipe, int port) {
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

// Reads a length and that many bytes into a reused buffer; responds with a few bytes.
[[noreturn]] void ServeRawTcp(int pipe) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(name);
  RAPT_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&name), size) == 0, "can't bind");
  RAPT_CHECK(listen(listener, 16) == 0, "can't listen");
  getsockname(listener, reinterpret_cast<sockaddr*>(&name), &size);
  WritePort(pipe, ntohs(name.sin_port));
  std::vector<char> buffer(256 * kMiB), reply(kResponseBytes);
  for (;;) {
    const int connection = accept(listener, nullptr, nullptr);
    const int on = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    for (int64_t bytes; ReadAll(connection, reinterpret_cast<char*>(&bytes), sizeof(bytes));) {
      if (!ReadAll(connection, buffer.data(), bytes)) break;
      WriteAll(connection, reply.data(), kResponseBytes);
    }
    close(connection);
  }
}

// Parses the request, does not read its tensors, and responds with a few bytes.
class GeneratedEcho final : public GRPCInferenceService::Service {
  grpc::Status ModelInfer(grpc::ServerContext*, const ModelInferRequest* request,
                          ModelInferResponse* response) override {
    response->set_id(request->id());
    response->add_raw_output_contents(std::string(kResponseBytes, 'y'));
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
  WritePort(pipe, port);
  server->Wait();
  std::_Exit(0);
}

// A handler that returns constant bytes, run by the Python interpreter RAPT_BENCH_PYTHON.
[[noreturn]] void ServePython(int pipe) {
  dup2(pipe, STDOUT_FILENO);
  const std::string response_bytes = absl::StrCat(kResponseBytes);
  const char* python = std::getenv(kPythonVariable);
  RAPT_CHECK(python != nullptr, "RAPT_BENCH_PYTHON is not set");
  execl(python, python, RAPT_BENCH_DIRECTORY "/grpcio_echo.py", response_bytes.c_str(), nullptr);
  std::_Exit(1);
}

// --- Clients -------------------------------------------------------------------------------------

// K and V with that total size.
InferShape ShapeOf(int64_t payload_bytes) {
  constexpr int64_t kSize = 64;
  return {.keys = std::max<int64_t>(1, payload_bytes / 2 / kSize / 4), .size = kSize};
}

// A request with negligible computation.
std::string SerializedRequest(int64_t payload_bytes) {
  InferShape shape = ShapeOf(payload_bytes);
  shape.window = 4;
  return SerializedInfer(shape);
}

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
  RawCaller(const RawCaller&) = delete;
  RawCaller& operator=(const RawCaller&) = delete;

  void CallOnce(const std::string& bytes) const {
    const auto size = static_cast<int64_t>(bytes.size());
    WriteAll(connection_, reinterpret_cast<const char*>(&size), sizeof(size));
    WriteAll(connection_, bytes.data(), size);
    char reply[kResponseBytes];
    RAPT_CHECK(ReadAll(connection_, reply, kResponseBytes), "no response");
  }

 private:
  const int connection_;
};

// --- Measuring -----------------------------------------------------------------------------------

// Sets the congestion control of all TCP connections of this process, which sends the large
// messages. Returns false if the system does not permit it.
bool UseCongestionControl(const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::atoi(entry.path().filename().c_str());
    char old[16];
    socklen_t size = sizeof(old);
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, old, &size) != 0) continue;
    if (setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name.c_str(),
                   static_cast<socklen_t>(name.size())) != 0) {
      return false;
    }
  }
  return true;
}

std::string DefaultCongestionControl() {
  std::string name;
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> name;
  return name;
}

void CompareSizes(const Server& raw, const Server& generated, const Server& rapt,
                  const std::string& congestion_control, Goals& goals) {
  std::printf(
      "\nTCP congestion control: %s, for every peer.\n\n"
      "| payload | peer | p50 ms | GB/s | of raw TCP | server CPU ns/byte | of generated |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n",
      congestion_control.c_str());
  std::map<int64_t, double> raw_per_byte, rapt_per_byte;
  for (const int64_t bytes : {64 * kKiB, 1 * kMiB, 6 * kMiB, 48 * kMiB, 192 * kMiB}) {
    const std::string request = SerializedRequest(bytes);
    const grpc::ByteBuffer buffer = BufferOf(request);
    std::string copy(request.size(), '\0');
    RawCaller raw_caller(raw);
    InferCaller generated_caller(generated.address()), rapt_caller(rapt.address());
    Peer peers[] = {
        {"raw TCP", raw.pid, [&] { raw_caller.CallOnce(request); }},
        {"rapt", rapt.pid, [&] { rapt_caller.CallOnce(buffer); }},
        {"memcpy", getpid(), [&] { std::memcpy(copy.data(), request.data(), copy.size()); }},
        {"generated gRPC (sync)", generated.pid, [&] { generated_caller.CallOnce(buffer); }},
    };
    const Peer &raw_peer = peers[0], &rapt_peer = peers[1], &generated_peer = peers[3];
    for (Peer& peer : peers) peer.call();  // also connects
    if (!UseCongestionControl(congestion_control)) {
      std::printf("\nThe system does not permit it.\n");
      return;
    }
    Measure(absl::MakeSpan(peers), RoundsFor(bytes));
    const double size = static_cast<double>(request.size());
    const double raw_seconds = Median(raw_peer.seconds);
    const double generated_cpu = Median(generated_peer.cpu_seconds);
    for (const Peer& peer : peers) {
      PrintRow(peer, static_cast<int64_t>(request.size()), raw_seconds, generated_cpu);
    }
    std::fflush(stdout);
    raw_per_byte[bytes] = raw_seconds / size;
    rapt_per_byte[bytes] = Median(rapt_peer.seconds) / size;
    const auto note = [&](const char* what, double reached, double floor, double aim) {
      goals.push_back({absl::StrCat(bytes / kMiB, " MiB, ", what, ", ", congestion_control),
                       reached, floor, aim});
    };
    if (bytes == 6 * kMiB || bytes == 48 * kMiB) {
      note("speed of raw TCP", raw_seconds / Median(rapt_peer.seconds), 0.45, 0.6);
    }
    if (bytes == 6 * kMiB) {
      note("server CPU of generated code", Median(rapt_peer.cpu_seconds) / generated_cpu, 0.45,
           0.35);
    }
  }
  const auto growth = [](std::map<int64_t, double>& per_byte) {
    return per_byte[192 * kMiB] / per_byte[48 * kMiB];
  };
  goals.push_back({absl::StrCat("192 MiB, time per byte against 48 MiB, ", congestion_control,
                                absl::StrFormat(" (raw TCP: %.2f)", growth(raw_per_byte))),
                   growth(rapt_per_byte), 1.1, 1.0});
}

// The server's peak anonymous memory per byte of payload in flight.
double PeakPerPayload(const Server& server, int64_t bytes, int in_flight, int rounds) {
  const std::string request = SerializedRequest(bytes);
  const grpc::ByteBuffer buffer = BufferOf(request);
  InferCaller caller(server.address());
  const PeakMemory peak(server.pid);
  for (int n = 0; n < in_flight; ++n) caller.Start(buffer);
  for (int n = 0; n < in_flight * rounds; ++n) {
    caller.ExpectOne();
    caller.Start(buffer);
  }
  for (int n = 0; n < in_flight; ++n) caller.ExpectOne();
  return static_cast<double>(peak.bytes()) / static_cast<double>(bytes * in_flight);
}

void ComparePeaks(const Server& generated, const Server& rapt, Goals& goals) {
  const double ours = PeakPerPayload(rapt, 48 * kMiB, 4, 5);
  std::printf(
      "\nPeak anonymous memory per payload, 48 MiB, 4 in flight: rapt %.2f, generated %.2f\n", ours,
      PeakPerPayload(generated, 48 * kMiB, 4, 5));
  goals.push_back({"48 MiB, 4 in flight, peak memory per payload", ours, 1.6, 1.4});
}

// One attention call whose K and V have that total size, through the client library and through
// generated code.
class AttendCaller {
 public:
  // `window`: negligible computation; `wants_present`: the response is as large as the request.
  struct Options {
    bool shared_memory = false;
    std::optional<int64_t> window = {};
    bool wants_present = false;
  };

  AttendCaller(const Server& server, int64_t payload_bytes, const Options& options)
      : keys_(payload_bytes / 2 / kSize / 4),
        options_(options),
        row_(kSize),
        kv_(keys_ * kSize),
        stub_(v1::AttentionService::NewStub(Connect(server.address()))) {
    auto client =
        client::Client::Connect(server.address(), {.shared_memory = options.shared_memory});
    RAPT_CHECK(client.ok(), "no connection");
    client_ = *std::move(client);
  }

  void CallByLibrary() {
    const auto kv = client::View<float>({1, 1, keys_, kSize}, kv_);
    const auto result =
        client_->Attend({.q = client::View<float>({1, 1, 1, kSize}, row_),
                         .k = kv,
                         .v = kv,
                         .window = {.left = options_.window, .right = options_.window},
                         .wants_present = options_.wants_present});
    RAPT_CHECK(result.ok(), "a call failed");
  }

  void CallByGeneratedCode() {
    v1::AttendRequest request;
    Fill({1, 1, 1, kSize}, row_, *request.mutable_q());
    Fill({1, 1, keys_, kSize}, kv_, *request.mutable_k());
    Fill({1, 1, keys_, kSize}, kv_, *request.mutable_v());
    if (options_.window) {
      request.mutable_attention()->mutable_window()->set_left(*options_.window);
      request.mutable_attention()->mutable_window()->set_right(*options_.window);
    }
    request.set_want_present(options_.wants_present);
    grpc::ClientContext context;
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
  const Options options_;
  const std::vector<float> row_, kv_;
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<client::Client> client_;
};

void CompareClients(const Server& rapt) {
  std::printf(
      "\n| request | response | client | p50 ms | client CPU ns/byte | of generated |\n"
      "| --- | --- | --- | --- | --- | --- |\n");
  for (const int64_t bytes : {64 * kKiB, 1 * kMiB, 6 * kMiB, 48 * kMiB}) {
    for (const bool wants_present : {false, true}) {
      AttendCaller caller(rapt, bytes, {.window = 4, .wants_present = wants_present});
      Peer peers[] = {
          {"generated code", getpid(), [&] { caller.CallByGeneratedCode(); }},
          {"rapt::client", getpid(), [&] { caller.CallByLibrary(); }},
      };
      for (Peer& peer : peers) peer.call();
      Measure(absl::MakeSpan(peers), RoundsFor(8 * bytes));
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

// Makes calls of 1 KiB for half a second.
double SmallCallsPerSecond(const Server& server, int in_flight) {
  const std::string request = SerializedRequest(kKiB);
  const grpc::ByteBuffer buffer = BufferOf(request);
  InferCaller caller(server.address());
  for (int n = 0; n < in_flight; ++n) caller.Start(buffer);
  int calls = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (; Since(begin) < Seconds(0.5); ++calls) {
    caller.ExpectOne();
    caller.Start(buffer);
  }
  const double seconds = Since(begin).count();
  for (int n = 0; n < in_flight; ++n) caller.ExpectOne();
  return calls / seconds;
}

// The same as messages of one ModelStreamInfer stream.
class SmallMessages {
 public:
  explicit SmallMessages(const Server& server) : stub_(Connect(server.address())) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream_ =
        stub_.PrepareCall(&context_, "/inference.GRPCInferenceService/ModelStreamInfer", &queue_);
    stream_->StartCall(&start_);
    RAPT_CHECK(Next() == &start_, "the stream did not start");
  }
  ~SmallMessages() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  SmallMessages(const SmallMessages&) = delete;
  SmallMessages& operator=(const SmallMessages&) = delete;

  // REQUIRES: called once.
  double PerSecond(int in_flight) {
    constexpr int kMessages = 10000;
    int sent = 0;
    int received = 0;
    bool is_writing = false;
    const auto write = [&] {
      if (is_writing || sent == kMessages || sent - received == in_flight) return;
      is_writing = true;
      ++sent;
      stream_->Write(buffer_, &write_);
    };
    const auto begin = std::chrono::steady_clock::now();
    stream_->Read(&response_, &read_);
    write();
    while (received < kMessages) {
      if (Next() == &write_) {
        is_writing = false;
      } else {
        if (received == 0) ExpectAnswer();
        if (++received < kMessages) stream_->Read(&response_, &read_);
      }
      write();
    }
    return kMessages / Since(begin).count();
  }

 private:
  const void* Next() {
    void* tag;
    bool ok;
    RAPT_CHECK(queue_.Next(&tag, &ok) && ok, "the stream ended");
    return tag;
  }

  void ExpectAnswer() {
    inference::ModelStreamInferResponse answer;
    grpc::ProtoBufferReader reader(&response_);
    RAPT_CHECK(answer.ParseFromZeroCopyStream(&reader), "the response is not parsed");
    if (!answer.error_message().empty())
      std::fprintf(stderr, "%s\n", answer.error_message().c_str());
    RAPT_CHECK(answer.error_message().empty(), "a message failed");
  }

  const std::string request_ = SerializedRequest(kKiB);
  const grpc::ByteBuffer buffer_ = BufferOf(request_);
  grpc::ByteBuffer response_;
  char start_ = 0, write_ = 0, read_ = 0;  // tags
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

void CompareSmallCalls(const Server& generated, const Server& rapt,
                       const std::optional<Server>& python, Goals& goals) {
  std::printf(
      "\n| 1 KiB calls/s, in flight | generated gRPC (sync) | Python grpcio | rapt | streamed |\n"
      "| --- | --- | --- | --- | --- |\n");
  for (const int in_flight : {1, 64}) {
    std::vector<double> by_generated, by_python, by_rapt, streamed;
    for (int round = 0; round < 5; ++round) {
      by_generated.push_back(SmallCallsPerSecond(generated, in_flight));
      if (python) by_python.push_back(SmallCallsPerSecond(*python, in_flight));
      by_rapt.push_back(SmallCallsPerSecond(rapt, in_flight));
      streamed.push_back(SmallMessages(rapt).PerSecond(in_flight));
    }
    std::printf("| %d | %.0f | %s | %.0f | %.0f |\n", in_flight, Median(by_generated),
                python ? absl::StrFormat("%.0f", Median(by_python)).c_str() : "-", Median(by_rapt),
                Median(streamed));
    if (python && in_flight == 64) {
      goals.push_back({"1 KiB calls/s, 64 in flight, of Python grpcio's",
                       Median(by_rapt) / Median(by_python), 12, 20});
    }
  }
}

// --- Alternatives to TCP -------------------------------------------------------------------------

// Shared memory of zeros with that size, registered with `server`.
class Region {
 public:
  Region(const Server& server, int64_t bytes)
      : stub_(GRPCInferenceService::NewStub(Connect(server.address()))) {
    const std::string key = absl::StrCat("/", kName);
    const int descriptor = shm_open(key.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    RAPT_CHECK(descriptor >= 0 && posix_fallocate(descriptor, 0, bytes) == 0, "no shared memory");
    close(descriptor);
    inference::SystemSharedMemoryRegisterRequest request;
    request.set_name(kName);
    request.set_key(key);
    request.set_byte_size(static_cast<uint64_t>(bytes));
    inference::SystemSharedMemoryRegisterResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->SystemSharedMemoryRegister(&context, request, &response);
    shm_unlink(key.c_str());
    RAPT_CHECK(status.ok(), "the region is not registered");
  }
  ~Region() {
    inference::SystemSharedMemoryUnregisterRequest request;
    request.set_name(kName);
    inference::SystemSharedMemoryUnregisterResponse response;
    grpc::ClientContext context;
    stub_->SystemSharedMemoryUnregister(&context, request, &response);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static constexpr char kName[] = "rapt-wire-bench";

 private:
  const std::unique_ptr<GRPCInferenceService::Stub> stub_;
};

// Reads all of K and V, like a decoding step.
void ComparePaths(const Server& rapt, const std::string& unix_address, Goals& goals) {
  std::printf(
      "\nK and V computed over, one query:\n\n"
      "| payload | path | p50 ms | times as fast as TCP | server CPU ns/byte |\n"
      "| --- | --- | --- | --- | --- |\n");
  for (const int64_t bytes : {1 * kMiB, 6 * kMiB, 48 * kMiB, 192 * kMiB}) {
    InferShape shape = ShapeOf(bytes);
    const std::string message = SerializedInfer(shape);
    shape.region = Region::kName;
    const std::string reference = SerializedInfer(shape);
    const Region region(rapt, bytes + kMiB);
    InferCaller tcp(rapt.address()), unix_socket(unix_address);
    AttendCaller library(rapt, bytes, {.shared_memory = false});
    AttendCaller sharing_library(rapt, bytes, {.shared_memory = true});
    const grpc::ByteBuffer message_buffer = BufferOf(message), small_buffer = BufferOf(reference);
    Peer peers[] = {
        {"TCP", rapt.pid, [&] { tcp.CallOnce(message_buffer); }},
        {"Unix socket", rapt.pid, [&] { unix_socket.CallOnce(message_buffer); }},
        {"shared memory, tensors there", rapt.pid, [&] { tcp.CallOnce(small_buffer); }},
        {"rapt::client, TCP", rapt.pid, [&] { library.CallByLibrary(); }},
        {"rapt::client, copies to shared memory", rapt.pid,
         [&] { sharing_library.CallByLibrary(); }},
    };
    for (Peer& peer : peers) peer.call();
    Measure(absl::MakeSpan(peers), RoundsFor(2 * bytes));
    const double tcp_seconds = Median(peers[0].seconds);
    for (const Peer& peer : peers) {
      std::printf("| %ld KiB | %s | %.3f | %.2f | %.3f |\n", static_cast<long>(bytes / kKiB),
                  peer.name, 1e3 * Median(peer.seconds), tcp_seconds / Median(peer.seconds),
                  1e9 * Median(peer.cpu_seconds) / static_cast<double>(bytes));
    }
    std::fflush(stdout);
    if (bytes < 6 * kMiB) continue;
    goals.push_back({absl::StrCat(bytes / kMiB, " MiB, shared memory against TCP"),
                     tcp_seconds / Median(peers[2].seconds), 3.5, 5});
  }
}

int Main() {
  // Fork before this process has gRPC threads, which the child would lack.
  const Server raw = Fork(ServeRawTcp);
  // A new server for each: after freeing large messages, glibc retains memory for later ones.
  const Server generated = Fork(ServeGenerated), generated_for_cubic = Fork(ServeGenerated);
  std::optional<Server> python;
  if (std::getenv(kPythonVariable) != nullptr) python = Fork(ServePython);
  std::string folder = "/tmp/rapt-bench-XXXXXX";
  RAPT_CHECK(mkdtemp(folder.data()) != nullptr, "no folder for a socket");
  const std::string socket = folder + "/socket";
  const Server rapt = StartRapt({"--allow_shared_memory", absl::StrCat("--unix_socket=", socket)});

  // Debian's Abseil would spend the client's time on deadlock detection, whatever the peer.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);

  Goals goals;
  const std::string usual = DefaultCongestionControl();
  CompareSizes(raw, generated, rapt, usual, goals);
  if (usual != "cubic") CompareSizes(raw, generated_for_cubic, rapt, "cubic", goals);
  ComparePaths(rapt, absl::StrCat("unix:", socket), goals);
  CompareClients(rapt);
  CompareSmallCalls(generated, rapt, python, goals);
  ComparePeaks(generated, rapt, goals);
  Print(goals);
  for (const Server& server : {raw, generated, generated_for_cubic, rapt}) Stop(server);
  if (python) Stop(*python);
  std::filesystem::remove_all(folder);
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main() { return rapt::bench::Main(); }
