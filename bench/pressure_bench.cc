// The service under pressure: small requests during a long one, computation after a cancellation,
// memory after a burst, correct responses under overload. Every wait is bounded; the whole run
// takes about a minute. Prints Markdown for RESULTS.md.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "bench/infer_call.h"
#include "bench/server_process.h"

namespace rapt::bench {
namespace {

using Clock = std::chrono::steady_clock;

InferShape SelfAttention(int64_t heads, int64_t length) {
  return {.heads = heads, .queries = length, .keys = length};
}

// --- During a long request -----------------------------------------------------------------------

// One kind of request and its latencies under two conditions.
struct Timed {
  const char* name;
  std::string message;
  std::vector<double> alone = {};
  std::vector<double> concurrent = {};

  // Sends requests one after the other for half a second.
  void CallFor(InferCaller& caller, std::vector<double>& seconds) const {
    const grpc::ByteBuffer request = BufferOf(message);
    const auto begin = Clock::now();
    while (Since(begin) < Seconds(0.5)) seconds.push_back(caller.CallOnce(request).count());
  }
};

constexpr Seconds kLong{10};

// The length of a self-attention over one head that takes `seconds`, extrapolated from a shorter
// one.
int64_t LengthOfLong(InferCaller& caller) {
  constexpr int64_t kTrial = 16 * 1024, kMost = 256 * 1024;
  const std::string trial = SerializedInfer(SelfAttention(1, kTrial));
  caller.CallOnce(BufferOf(trial));
  const Seconds took = caller.CallOnce(BufferOf(trial));
  return std::min(kMost, static_cast<int64_t>(kTrial * std::sqrt(kLong / took)));
}

// Waits until the server has used that much more CPU time.
void WaitUntilItComputes(pid_t server) {
  const double cpu = CpuSeconds(server);
  const auto begin = Clock::now();
  while (CpuSeconds(server) < cpu + 0.3) {
    RAPT_CHECK(Since(begin) < Seconds(10), "the long request is not computed");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The server's activity in the 200 ms after a cancellation.
struct Afterwards {
  std::vector<double> cpu_seconds;
  std::vector<double> busy_seconds;  // when it was last observed to compute

  void Watch(pid_t server) {
    const double cpu_before = CpuSeconds(server);
    const auto begin = Clock::now();
    double cpu = cpu_before, last_busy = 0;
    while (Since(begin) < Seconds(0.2)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const double now = CpuSeconds(server);
      if (now > cpu + 1e-4) last_busy = Since(begin).count();
      cpu = now;
    }
    cpu_seconds.push_back(cpu - cpu_before);
    busy_seconds.push_back(last_busy);
  }
};

void MeasureDuringALongOne(const Server& server) {
  constexpr int kRounds = 8;
  InferCaller caller(server.address()), long_caller(server.address());
  const int64_t length = LengthOfLong(caller);
  const std::string long_message = SerializedInfer(SelfAttention(1, length));
  Timed requests[] = {{"tiny, 1x1x16x64", SerializedInfer(SelfAttention(1, 16))},
                      {"about 1 ms, 1x8x384x64", SerializedInfer(SelfAttention(8, 384))}};
  Afterwards afterwards;
  for (int round = 0; round < kRounds; ++round) {
    for (Timed& timed : requests) timed.CallFor(caller, timed.alone);
    long_caller.Start(BufferOf(long_message));
    grpc::StatusCode code;
    std::thread sender([&] { code = long_caller.WaitForOne().status.error_code(); });
    WaitUntilItComputes(server.pid);
    for (Timed& timed : requests) timed.CallFor(caller, timed.concurrent);
    long_caller.CancelAll();
    afterwards.Watch(server.pid);
    sender.join();
    RAPT_CHECK(code == grpc::StatusCode::CANCELLED, "the long request was over too early");
  }
  std::printf(
      "Alone, and during a request of about %.0f s (1x1x%ldx64), alternating, %d times:\n\n"
      "| request | alone p50 ms | p99 | during it p50 ms | p99 |\n| --- | --- | --- | --- | --- "
      "|\n",
      kLong.count(), static_cast<long>(length), kRounds);
  for (const Timed& timed : requests) {
    std::printf("| %s | %.3f | %.3f | %.3f | %.3f |\n", timed.name, 1e3 * Median(timed.alone),
                1e3 * Quantile(timed.alone, 0.99), 1e3 * Median(timed.concurrent),
                1e3 * Quantile(timed.concurrent, 0.99));
  }
  std::printf(
      "\nAfter the cancellation, the server computed for %.1f ms more (%.1f at most; 20 allowed) "
      "and used %.1f ms\nof its cores (%.1f at most).\n",
      1e3 * Median(afterwards.busy_seconds), 1e3 * Quantile(afterwards.busy_seconds, 1),
      1e3 * Median(afterwards.cpu_seconds), 1e3 * Quantile(afterwards.cpu_seconds, 1));
}

// --- Overload ------------------------------------------------------------------------------------

// Results of calls, each of which is repeated as soon as it ends.
struct Load {
  int in_flight;
  double seconds = 0;
  std::vector<double> correct = {};  // latencies of correct responses
  int rejected = 0;

  Load(const Server& server, const std::string& message, int calls) : in_flight(calls) {
    const grpc::ByteBuffer request = BufferOf(message);
    InferCaller caller(server.address());
    for (int n = 0; n < calls; ++n) caller.Start(request);
    const auto begin = Clock::now();
    while (Since(begin) < Seconds(3)) {
      const InferCaller::Ended ended = caller.WaitForOne();
      if (ended.status.ok()) {
        correct.push_back(ended.took.count());
      } else {
        RAPT_CHECK(ended.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED,
                   "a call failed other than by rejection");
        ++rejected;
      }
      caller.Start(request);
    }
    seconds = Since(begin).count();
  }

  double correct_per_second() const { return static_cast<double>(correct.size()) / seconds; }
};

void MeasureOverload(const Server& server) {
  const std::string message = SerializedInfer(SelfAttention(8, 384));
  std::vector<Load> loads;
  for (const int in_flight : {4, 32, 256, 1024}) loads.emplace_back(server, message, in_flight);
  std::printf(
      "\nThe same request of 1 ms from one caller, --memory_budget_bytes=%ld,\n"
      "--max_queued_requests=256; rejected calls are retried at once:\n\n"
      "| in flight | correct responses/s | of those at 4 | p50 ms | p99 | rejected/s |\n"
      "| --- | --- | --- | --- | --- | --- |\n",
      static_cast<long>(256 * kMiB));
  for (const Load& load : loads) {
    RAPT_CHECK(!load.correct.empty(), "no call succeeded");
    std::printf(
        "| %d | %.0f | %.2f | %.1f | %.1f | %.0f |\n", load.in_flight, load.correct_per_second(),
        load.correct_per_second() / loads[0].correct_per_second(), 1e3 * Median(load.correct),
        1e3 * Quantile(load.correct, 0.99), load.rejected / load.seconds);
  }
}

// --- Memory after a burst ------------------------------------------------------------------------

void MeasureMemory(const Server& server) {
  constexpr Seconds kPatience{20};
  const int64_t before = RssAnonBytes(server.pid);
  const std::string message = SerializedInfer({.keys = 48 * kMiB / 2 / 64 / 4, .window = 4});
  int64_t peak;
  {
    const PeakMemory watch(server.pid);
    const Load load(server, message, 16);
    peak = watch.bytes();
  }
  const auto begin = Clock::now();
  int64_t now = RssAnonBytes(server.pid);
  while (now > before + 16 * kMiB && Since(begin) < kPatience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    now = RssAnonBytes(server.pid);
  }
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };
  std::printf(
      "\nMemory (RssAnon) around 3 s of 16 calls of 48 MiB at once: %.0f MiB before, %.0f at most, "
      "%.0f\n%.1f s afterwards.\n",
      mib(before), mib(peak), mib(now), Since(begin).count());
}

int Main() {
  const Server usual = StartRapt({});
  MeasureDuringALongOne(usual);
  Stop(usual);
  const Server small =
      StartRapt({absl::StrCat("--memory_budget_bytes=", 256 * kMiB), "--max_queued_requests=256"});
  MeasureMemory(small);
  MeasureOverload(small);
  Stop(small);
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main() { return rapt::bench::Main(); }
