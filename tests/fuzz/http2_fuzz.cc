// Any bytes as a caller's side of an HTTP/2 connection to the server, with all methods behind it.
// The first byte chooses how the others are sent: as they are or as frames, in which pieces, and
// whether the answers are read.
#include <arpa/inet.h>
#include <google/protobuf/stubs/logging.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/buffer_pool.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "base/metric_sink.h"
#include "base/timer.h"
#include "proto/grpc/health/v1/health.pb.h"
#include "server/admission/gate.h"
#include "server/calls/access.h"
#include "server/calls/call.h"
#include "server/calls/open_calls.h"
#include "server/calls/stream_counts.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/health_status.h"
#include "server/wire/health_watch.h"
#include "server/wire/http2/http2_server.h"
#include "server/wire/oip/methods.h"
#include "server/wire/rapt/methods.h"
#include "server/wire/reflection.h"

// Of sanitizers; g++ has no header with it.
extern "C" __attribute__((weak)) size_t __sanitizer_get_current_allocated_bytes();

namespace rapt {
namespace {

// A few megabytes, so that no input takes long.
constexpr int64_t kBudgetBytes = 4 << 20;
// The most that the heap grows by during a conversation. Messages and results are not part of it.
constexpr size_t kMaxHeapGrowth = 16 << 20;
constexpr int kThreads = 2;
constexpr std::chrono::seconds kPatience{5};

// Sums up all gauges exported to it.
class Gauges final : public MetricSink {
 public:
  double Sum() const {
    double sum = 0;
    for (const auto& read : readers_) sum += read();
    return sum;
  }

 private:
  void AddGauge(const std::string&, const std::string&, Labels,
                std::function<double()> read) override {
    readers_.push_back(std::move(read));
  }
  void AddCounter(const std::string&, const std::string&, Labels,
                  std::function<double()>) override {}

  std::vector<std::function<double()>> readers_;
};

CallObserver Ignore(absl::string_view) {
  return [](const CallReport&) {};
}

// A server on a free port of the loopback.
struct Service {
  Service() {
    google::protobuf::SetLogHandler(nullptr);  // as in the server
    health.SetServing(true);
    oip_methods.AddTo(methods);
    oip_methods.AddTo(streams, environment);
    native_methods.AddTo(methods);
    native_methods.AddTo(streams);
    methods["/grpc.health.v1.Health/Check"] =
        SmallMethod(health, &HealthStatus::Respond, Ignore(""), /*is_public=*/true);
    streams["/grpc.health.v1.Health/Watch"] = [this](MessageStream& stream) {
      return std::make_unique<HealthWatch>(environment, health, stream);
    };
    reflection = std::make_unique<Reflection>(environment, methods, streams);
    reflection->AddTo(streams);
    open_calls.ExportTo(gauges);
    small_calls.ExportTo(gauges);
    stream_counts.ExportTo(gauges);
    server.ExportTo(gauges);
    RAPT_CHECK(server.Start().ok(), "the server doesn't start");
  }

  // Returns when the server's thread has handled everything that was sent before.
  void WaitForWire() {
    for (int round = 0; round < 2; ++round) {
      std::promise<void> done;
      server.Post([&done] { done.set_value(); });
      done.get_future().wait();
    }
  }

  // Returns when everything that was sent is also computed.
  void WaitForAnswers() {
    WaitForWire();
    while (executor.busy_threads() > 0 || executor.waiting().depth > 0) std::this_thread::yield();
    WaitForWire();
  }

  bool IsAtRest() const {
    return gauges.Sum() == 0 && open_calls.places() == 0 && small_calls.places() == 0 &&
           gate.reserved_bytes() == 0;
  }

  SteadyClock clock;
  Timer timer{clock};
  AdmissionGate gate{
      {.budget_bytes = kBudgetBytes, .max_queued = 4, .max_queue_delay = {}}, timer, clock};
  BufferPool pool{kBudgetBytes, clock};
  Executor executor{kThreads, clock};
  Engine engine{{.threads = kThreads}, gate, pool, executor};
  OpenCalls open_calls{{.calls = 16, .calls_per_caller = 16}};
  OpenCalls small_calls{{.calls = 16, .calls_per_caller = 16}};
  StreamCounts stream_counts;
  const std::unique_ptr<Access> access = *Access::Open("", clock);
  const CallEnvironment environment{*access,
                                    engine,
                                    open_calls,
                                    small_calls,
                                    stream_counts,
                                    timer,
                                    clock,
                                    {.max_message_bytes = kBudgetBytes / 4,
                                     .min_receive_bytes_per_second = 1000,
                                     .default_deadline = kPatience,
                                     .max_deadline = kPatience}};
  SharedMemory shared_memory{{}};
  HealthStatus health{{oip::kServiceName, native::kServiceName}};
  oip::Methods oip_methods{shared_memory, [] { return true; }, Ignore, clock, {}};
  native::Methods native_methods{environment, shared_memory, nullptr, nullptr, Ignore};
  UnaryMethods methods;
  StreamMethods streams;
  std::unique_ptr<Reflection> reflection;
  Http2Server server{
      {.address = "127.0.0.1:0",
       .max_connections = 4,
       .max_connections_per_address = 4,
       .connection = {.max_streams = 64, .max_idle = kPatience, .max_call_time = kPatience}},
      environment,
      pool,
      methods,
      streams};
  Gauges gauges;
};

Service& TheService() {
  static auto* const service = new Service;
  return *service;
}

sockaddr_in LoopbackAddress(uint32_t number, int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + number);
  return address;
}

// libFuzzer's timer may interrupt it.
bool Connect(int socket, const sockaddr_in& address) {
  while (connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EISCONN) return true;
    if (errno != EINTR && errno != EALREADY) return false;
  }
  return true;
}

// The caller's side. Each has an address of its own, because closed connections keep their port for
// a minute.
class Caller {
 public:
  Caller() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    constexpr uint32_t kAddresses = 1 << 20;
    static uint32_t callers = 0;
    const sockaddr_in from = LoopbackAddress(++callers % kAddresses, 0);
    const sockaddr_in to = LoopbackAddress(0, TheService().server.port());
    RAPT_CHECK(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0 &&
                   Connect(socket_.get(), to),
               std::strerror(errno));
  }

  // Returns false if the server has closed the connection.
  bool Send(absl::string_view bytes) {
    return send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
  }

  void ReadAll() {
    std::array<char, 16384> bytes;
    while (recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
  }

 private:
  const Descriptor socket_;
};

// Replaces each head of [type, flags, stream, length / 256, length % 256] by that of a frame, so
// that a mutation seldom breaks the frames that follow. The length is at most what is left.
std::string Framed(absl::string_view input) {
  constexpr size_t kHead = 5;
  std::string frames = NGHTTP2_CLIENT_MAGIC;
  while (input.size() >= kHead) {
    const auto at = [input](size_t i) { return static_cast<uint8_t>(input[i]); };
    const size_t length = std::min<size_t>(at(3) << 8 | at(4), input.size() - kHead);
    frames += {0, static_cast<char>(length >> 8), static_cast<char>(length), input[0], input[1]};
    frames += {0, 0, 0, input[2]};
    frames.append(input.data() + kHead, length);
    input.remove_prefix(kHead + length);
  }
  return frames;
}

void Converse(absl::string_view bytes, uint8_t pieces, bool reads) {
  Service& service = TheService();
  Caller caller;
  std::minstd_rand random(pieces);
  // Up to 1, 16, 256 or 4096 bytes, more if there were many pieces, as each waits for a thread.
  constexpr size_t kPieces = 8;
  std::uniform_int_distribution<size_t> sizes(
      1, std::max(size_t{1} << 4 * (pieces % 4), 2 * bytes.size() / kPieces));
  while (!bytes.empty()) {
    const absl::string_view piece = bytes.substr(0, sizes(random));
    if (!caller.Send(piece)) break;
    bytes.remove_prefix(piece.size());
    service.WaitForWire();
    if (reads) caller.ReadAll();
  }
  service.WaitForAnswers();
  if (reads) caller.ReadAll();
  service.WaitForAnswers();
}

// 0 without a sanitizer, which counts them.
size_t HeapBytes() {
  const auto count = __sanitizer_get_current_allocated_bytes;
  return count == nullptr ? 0 : count();
}

void Check(absl::string_view bytes, uint8_t choice) {
  const bool is_framed = (choice & 1) != 0, reads = (choice & 2) != 0;
  const size_t heap_before = HeapBytes();
  Converse(is_framed ? Framed(bytes) : std::string(bytes), choice >> 2, reads);
  RAPT_CHECK(HeapBytes() < heap_before + kMaxHeapGrowth, "a connection holds much memory");
  const Service& service = TheService();
  const Instant end = service.clock.Now() + kPatience;
  while (!service.IsAtRest()) {
    RAPT_CHECK(service.clock.Now() < end, "a closed connection holds calls or memory");
    std::this_thread::yield();
  }
}

}  // namespace
}  // namespace rapt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  rapt::Check({reinterpret_cast<const char*>(data) + 1, size - 1}, data[0]);
  return 0;
}
