// Calls of the Open Inference Protocol over HTTP/1.1 with binary data, compared with the same calls
// over gRPC to the same server. Calls are interleaved in one run; figures are medians. Takes about
// a minute. Prints Markdown for RESULTS.md.
//
// A request has one row of Q, and K and V of the stated payload; a window of a few keys keeps the
// computation negligible. The client sends bytes that were prepared before. Its own cost, that of
// gRPC's library or of client/http, is a part of the time, not of the server's CPU time.
//
// The client has a core of its own. Otherwise the scheduler puts it on the core of the server's
// network thread in some runs, where a large call takes twice as long.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "bench/comparison.h"
#include "bench/infer_call.h"
#include "bench/server_process.h"
#include "client/http/connection.h"
#include "client/http/target.h"

namespace rapt::bench {
namespace {

using client::HttpConnection;
using client::HttpTarget;

constexpr int64_t kHeadSize = 64;
constexpr int64_t kWindow = 4;

int64_t KeysOf(int64_t payload_bytes) {
  return std::max<int64_t>(1, payload_bytes / 2 / kHeadSize / 4);
}

std::string GrpcRequest(int64_t payload_bytes) {
  return SerializedInfer({.keys = KeysOf(payload_bytes), .size = kHeadSize, .window = kWindow});
}

struct HttpRequest {
  HttpRequest(const HttpTarget& target, int64_t payload_bytes) {
    const auto input = [](const char* name, int64_t rows) {
      return absl::StrFormat(
          R"({"name":"%s","datatype":"FP32","shape":[1,1,%d,%d],"parameters":{"binary_data_size":%d}})",
          name, rows, kHeadSize, rows * kHeadSize * 4);
    };
    const int64_t keys = KeysOf(payload_bytes);
    body = absl::StrFormat(
        R"({"inputs":[%s,%s,%s],"parameters":{"left_window_size":%d,"right_window_size":%d,"binary_data_output":true}})",
        input("Q", 1), input("K", keys), input("V", keys), kWindow, kWindow);
    const std::string json_bytes = absl::StrCat(body.size());
    body.append(static_cast<size_t>((1 + 2 * keys) * kHeadSize * 4), '\0');
    head = target.Head("POST", "/v2/models/attention/infer",
                       {{"Inference-Header-Content-Length", json_bytes}}, body.size());
  }

  std::string head, body;
};

// Overlapping calls from one thread, each on a connection of its own.
class HttpCaller {
 public:
  // `target` outlives it.
  HttpCaller(const HttpTarget& target, int connections) : waits_(static_cast<size_t>(connections)) {
    for (int i = 0; i < connections; ++i) {
      connections_.push_back(std::make_unique<HttpConnection>(target));
    }
  }

  // `request` outlives the call.
  void Start(size_t connection, const HttpRequest& request) {
    connections_[connection]->Start(
        request.head, {{const_cast<char*>(request.body.data()), request.body.size()}});
    Continue(connection);
  }

  // Waits for one of the calls, which are in flight on every connection. Returns its connection.
  size_t ExpectOne() {
    while (ended_.empty()) {
      RAPT_CHECK(poll(waits_.data(), waits_.size(), 20'000) > 0, "no call has ended for 20 s");
      for (size_t i = 0; i < waits_.size(); ++i) {
        if (waits_[i].revents != 0) Continue(i);
      }
    }
    const size_t connection = ended_.back();
    ended_.pop_back();
    const absl::StatusOr<client::HttpResponse> response = connections_[connection]->TakeResponse();
    if (!response.ok()) std::fprintf(stderr, "%s\n", response.status().ToString().c_str());
    RAPT_CHECK(response.ok() && response->status == 200, "a call failed");
    return connection;
  }

  void CallOnce(const HttpRequest& request) {
    Start(0, request);
    ExpectOne();
  }

 private:
  void Continue(size_t i) {
    const HttpConnection::Wait wait = connections_[i]->Continue();
    waits_[i].revents = 0;
    if (wait == HttpConnection::Wait::kNothing) {
      waits_[i].fd = -1;  // ignored by poll()
      ended_.push_back(i);
      return;
    }
    waits_[i].fd = connections_[i]->descriptor();
    waits_[i].events = wait == HttpConnection::Wait::kReading ? POLLIN : POLLOUT;
  }

  std::vector<std::unique_ptr<HttpConnection>> connections_;
  std::vector<pollfd> waits_;  // of the connections
  std::vector<size_t> ended_;
};

void CompareSizes(const Server& rapt, const HttpTarget& target, Goals& goals) {
  std::printf(
      "| payload | interface | p50 ms | GB/s | speed of gRPC | server CPU ns/byte | of gRPC |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  for (const int64_t bytes : {64 * kKiB, 1 * kMiB, 6 * kMiB, 48 * kMiB, 192 * kMiB}) {
    const std::string message = GrpcRequest(bytes);
    const grpc::ByteBuffer buffer = BufferOf(message);
    const HttpRequest request(target, bytes);
    InferCaller grpc_caller(rapt.address());
    HttpCaller http_caller(target, 1);
    Peer peers[] = {
        {"gRPC", rapt.pid, [&] { grpc_caller.CallOnce(buffer); }},
        {"HTTP", rapt.pid, [&] { http_caller.CallOnce(request); }},
    };
    for (Peer& peer : peers) peer.call();  // also connects
    Measure(absl::MakeSpan(peers), 3 * RoundsFor(bytes));
    const double grpc_seconds = Median(peers[0].seconds);
    const double grpc_cpu = Median(peers[0].cpu_seconds);
    for (const Peer& peer : peers) PrintRow(peer, bytes, grpc_seconds, grpc_cpu);
    std::fflush(stdout);
    if (bytes != 6 * kMiB && bytes != 48 * kMiB) continue;
    goals.push_back({absl::StrCat(bytes / kMiB, " MiB, speed of gRPC"),
                     grpc_seconds / Median(peers[1].seconds), 0.9, 1.0});
    goals.push_back({absl::StrCat(bytes / kMiB, " MiB, server CPU of gRPC"),
                     Median(peers[1].cpu_seconds) / grpc_cpu, 1.1, 1.0});
  }
}

// The rate of calls of 1 KiB, and what one costs the server.
struct SmallCalls {
  const char* name;
  std::vector<double> per_second = {}, cpu_us = {};

  // `call` waits for one call and starts the next.
  void Measure(const Server& server, const std::function<void()>& call) {
    const double cpu = CpuSeconds(server.pid);
    const auto begin = std::chrono::steady_clock::now();
    int calls = 0;
    for (; Since(begin) < Seconds(0.5); ++calls) call();
    per_second.push_back(calls / Since(begin).count());
    cpu_us.push_back((CpuSeconds(server.pid) - cpu) * 1e6 / calls);
  }
};

// gRPC multiplexes calls over a connection, and reads and writes several at once. Independent
// callers have a connection each, as with HTTP.
void CompareSmallCalls(const Server& rapt, const HttpTarget& target, Goals& goals) {
  std::printf(
      "\n| 1 KiB, in flight | interface | calls/s | of gRPC | server CPU us/call |\n"
      "| --- | --- | --- | --- | --- |\n");
  const std::string message = GrpcRequest(kKiB);
  const grpc::ByteBuffer buffer = BufferOf(message);
  const HttpRequest request(target, kKiB);
  for (const int in_flight : {1, 64}) {
    InferCaller one_connection(rapt.address()), connections(rapt.address(), in_flight);
    HttpCaller http_caller(target, in_flight);
    for (int n = 0; n < in_flight; ++n) {
      one_connection.Start(buffer);
      connections.Start(buffer);
      http_caller.Start(static_cast<size_t>(n), request);
    }
    SmallCalls interfaces[] = {{"gRPC, one connection"}, {"gRPC, a connection each"}, {"HTTP"}};
    for (int round = 0; round < 7; ++round) {
      for (InferCaller* const caller : {&one_connection, &connections}) {
        interfaces[caller == &connections].Measure(rapt, [&] {
          caller->ExpectOne();
          caller->Start(buffer);
        });
      }
      interfaces[2].Measure(rapt, [&] { http_caller.Start(http_caller.ExpectOne(), request); });
    }
    for (int n = 0; n < in_flight; ++n) {
      one_connection.ExpectOne();
      connections.ExpectOne();
      http_caller.ExpectOne();
    }
    const double grpc_rate = Median(interfaces[0].per_second);
    for (const SmallCalls& calls : interfaces) {
      const double rate = Median(calls.per_second);
      std::printf("| %d | %s | %.0f | %.2f | %.1f |\n", in_flight, calls.name, rate,
                  rate / grpc_rate, Median(calls.cpu_us));
    }
    std::fflush(stdout);
    if (in_flight == 1) continue;
    for (const SmallCalls& other : {interfaces[0], interfaces[1]}) {
      goals.push_back({absl::StrCat("1 KiB calls/s, 64 in flight, of ", other.name),
                       Median(interfaces[2].per_second) / Median(other.per_second), 1.0, 1.2});
    }
  }
}

// The server's peak anonymous memory per byte of payload in flight.
void MeasurePeak(const Server& rapt, const HttpTarget& target, Goals& goals) {
  constexpr int64_t kBytes = 48 * kMiB;
  constexpr int kInFlight = 4, kRounds = 5;
  const HttpRequest request(target, kBytes);
  HttpCaller caller(target, kInFlight);
  const PeakMemory peak(rapt.pid);
  for (size_t n = 0; n < kInFlight; ++n) caller.Start(n, request);
  for (int n = 0; n < kInFlight * kRounds; ++n) caller.Start(caller.ExpectOne(), request);
  for (int n = 0; n < kInFlight; ++n) caller.ExpectOne();
  const double reached =
      static_cast<double>(peak.bytes()) / static_cast<double>(kBytes * kInFlight);
  std::printf("\nPeak anonymous memory per payload over HTTP, 48 MiB, 4 in flight: %.2f\n",
              reached);
  goals.push_back({"48 MiB, 4 in flight, peak memory per payload", reached, 1.1, 1.06});
}

// Leaves the last core to this process, and the others to servers.
void SetCores(bool for_servers) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (cores < 2) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core = 0; core < cores; ++core) {
    if ((core < cores - 1) == for_servers) CPU_SET(static_cast<size_t>(core), &set);
  }
  sched_setaffinity(0, sizeof(set), &set);
}

// A server and its HTTP address.
struct Rapt {
  Rapt() {
    SetCores(true);  // inherited
    server = StartRapt({"--http_address=127.0.0.1:0"});
    SetCores(false);
    absl::StatusOr<HttpTarget> made = HttpTarget::Make(server.http_address(), {});
    RAPT_CHECK(made.ok(), "no target");
    target = std::make_unique<HttpTarget>(*std::move(made));
  }
  ~Rapt() { Stop(server); }

  Server server = {};
  std::unique_ptr<HttpTarget> target;
};

int Main() {
  const Rapt fresh, used;  // before this process has threads of gRPC
  // Debian's Abseil would spend the client's time on deadlock detection.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  Goals goals;
  CompareSizes(used.server, *used.target, goals);
  CompareSmallCalls(used.server, *used.target, goals);
  MeasurePeak(fresh.server, *fresh.target, goals);
  Print(goals);
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main() { return rapt::bench::Main(); }
