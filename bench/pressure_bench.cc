// The server under pressure: what a short request waits beside a long one, how soon computing stops
// when nobody waits for the answer any more, how soon memory falls back after a burst. Prints
// Markdown for RESULTS.md.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <future>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/server_process.h"
#include "rapt/client.h"
#include "server/base/check.h"

namespace rapt::bench {
namespace {

using client::AttendResult;
using client::View;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kThreads = 2;

double SecondsSince(Clock::time_point begin) { return Seconds(Clock::now() - begin).count(); }

std::unique_ptr<client::Client> Connect(const Server& server) {
  auto connected = client::Client::Connect(absl::StrCat("127.0.0.1:", server.port),
                                           {.default_timeout = std::chrono::minutes(5)});
  RAPT_CHECK(connected.ok(), "no connection");
  return *std::move(connected);
}

// Self-attention over values that are all the same.
class SelfAttention {
 public:
  SelfAttention(int64_t heads, int64_t length, int64_t size)
      : shape_({1, heads, length, size}), values_(heads * length * size, 0.5f) {}

  client::AttendCall call() const {
    const auto x = View<float>(shape_, values_);
    return {.q = x, .k = x, .v = x};
  }
  int64_t message_bytes() const { return 3 * static_cast<int64_t>(values_.size()) * 4; }

 private:
  const client::Shape shape_;
  const std::vector<float> values_;
};

double TimeOf(client::Client& client, const SelfAttention& attention) {
  const auto begin = Clock::now();
  RAPT_CHECK(client.Attend(attention.call()).ok(), "a call failed");
  return SecondsSince(begin);
}

// About 1 ms of both threads, and about so many seconds of them in a message of a few megabytes.
SelfAttention Short() { return SelfAttention(4, 448, 64); }

SelfAttention Long(client::Client& client, double seconds) {
  constexpr int64_t kProbe = 24 * 1024;
  TimeOf(client, SelfAttention(1, kProbe, 16));
  const double probe = TimeOf(client, SelfAttention(1, kProbe, 16));
  return SelfAttention(1, static_cast<int64_t>(kProbe * std::sqrt(seconds / probe)), 16);
}

struct Times {
  std::vector<double> seconds;
  std::string Describe() const {
    char text[64];
    std::snprintf(text, sizeof(text), "%.2f | %.2f", Median(seconds) * 1e3,
                  Quantile(seconds, 0.99) * 1e3);
    return text;
  }
};

// --- A short request beside a long one -----------------------------------------------------------

void MeasureShortBesideLong(const Server& server) {
  const auto client = Connect(server);
  const SelfAttention short_call = Short();
  const SelfAttention long_call = Long(*client, 10);
  for (int n = 0; n < 50; ++n) TimeOf(*client, short_call);
  Times alone, beside;
  for (int n = 0; n < 500; ++n) alone.seconds.push_back(TimeOf(*client, short_call));

  std::vector<double> compute;
  const auto begin = Clock::now();
  std::promise<double> long_seconds;
  client->AttendAsync(long_call.call(), {}, [&](const absl::StatusOr<AttendResult>& result) {
    RAPT_CHECK(result.ok(), "the long call failed");
    long_seconds.set_value(SecondsSince(begin));
  });
  std::future<double> done = long_seconds.get_future();
  // One after the other, with pauses: they are to meet the long one at any point of its tasks.
  while (done.wait_for(milliseconds(7)) == std::future_status::timeout) {
    beside.seconds.push_back(TimeOf(*client, short_call));
  }
  const double seconds = done.get();
  std::printf(
      "| a short request | calls | p50 ms | p99 ms |\n| --- | --- | --- | --- |\n"
      "| alone | %zu | %s |\n| beside one of %.1f s | %zu | %s |\n",
      alone.seconds.size(), alone.Describe().c_str(), seconds, beside.seconds.size(),
      beside.Describe().c_str());
  std::fflush(stdout);
}

// --- Computing after the caller left -------------------------------------------------------------

// How long the server's CPU clock goes on from now, and by how much, until it has stood still for a
// while.
struct Aftermath {
  double busy_seconds = 0;
  double cpu_seconds = 0;
};

Aftermath WatchCpu(pid_t pid) {
  const auto begin = Clock::now();
  const double cpu_begin = CpuSeconds(pid);
  Aftermath aftermath;
  double last_cpu = cpu_begin;
  while (SecondsSince(begin) < aftermath.busy_seconds + 0.1) {
    usleep(250);
    const double cpu = CpuSeconds(pid);
    // Timers and connections take their microseconds at any time.
    if (cpu - last_cpu > 100e-6) aftermath.busy_seconds = SecondsSince(begin);
    last_cpu = cpu;
  }
  aftermath.cpu_seconds = last_cpu - cpu_begin;
  return aftermath;
}

void WaitUntilComputing(pid_t pid) {
  const double cpu = CpuSeconds(pid);
  while (CpuSeconds(pid) - cpu < 0.2) usleep(1000);
}

void MeasureAfterTheCallerLeft(const Server& server) {
  const auto client = Connect(server);
  const SelfAttention call = Long(*client, 30);
  std::printf(
      "\n| when the caller | calls | computing stops after, p50 ms | at most ms | CPU used, p50 ms "
      "|\n| --- | --- | --- | --- | --- |\n");
  const auto measure = [&](const char* what, const auto& leave) {
    std::vector<double> busy, cpu;
    for (int n = 0; n < 20; ++n) {
      const Aftermath aftermath = leave();
      busy.push_back(aftermath.busy_seconds);
      cpu.push_back(aftermath.cpu_seconds);
    }
    std::printf("| %s | %zu | %.1f | %.1f | %.1f |\n", what, busy.size(), Median(busy) * 1e3,
                *std::max_element(busy.begin(), busy.end()) * 1e3, Median(cpu) * 1e3);
    std::fflush(stdout);
  };
  measure("cancels", [&] {
    std::stop_source stop;
    std::promise<void> over;
    client->AttendAsync(call.call(), {.stop = stop.get_token()},
                        [&](const auto&) { over.set_value(); });
    WaitUntilComputing(server.pid);
    stop.request_stop();
    const Aftermath aftermath = WatchCpu(server.pid);
    over.get_future().wait();
    return aftermath;
  });
  measure("runs into its deadline", [&] {
    std::promise<void> over;
    client->AttendAsync(call.call(), {.timeout = milliseconds(400)},
                        [&](const auto&) { over.set_value(); });
    over.get_future().wait();
    return WatchCpu(server.pid);
  });
}

// --- Memory after a burst ------------------------------------------------------------------------

struct Burst {
  int64_t before_bytes = 0;
  int64_t peak_bytes = 0;
  double fall_seconds = 0;
  int64_t after_bytes = 0;
};

// Thirty messages of 48 MiB, four at a time; then nothing, or small calls all the time.
Burst MeasureBurst(const Server& server, bool trickles) {
  const auto client = Connect(server);
  const SelfAttention large(1, 65536, 64);  // a window keeps it short
  const SelfAttention small(1, 16, 64);
  client::AttendCall call = large.call();
  call.window = {.left = 4, .right = 4};
  Burst burst;
  TimeOf(*client, small);
  burst.before_bytes = RssAnonBytes(server.pid);

  std::atomic<bool> bursting{true};
  std::thread watch([&] {
    while (bursting) {
      burst.peak_bytes = std::max(burst.peak_bytes, RssAnonBytes(server.pid));
      usleep(2000);
    }
  });
  std::vector<std::thread> callers;
  for (int n = 0; n < 4; ++n) {
    callers.emplace_back([&] {
      for (int i = 0; i < 8; ++i) RAPT_CHECK(client->Attend(call).ok(), "a call failed");
    });
  }
  for (std::thread& caller : callers) caller.join();
  bursting = false;
  watch.join();

  const auto begin = Clock::now();
  while (RssAnonBytes(server.pid) > burst.before_bytes + 16 * kMiB) {
    if (trickles) TimeOf(*client, small);
    usleep(10'000);
  }
  burst.fall_seconds = SecondsSince(begin);
  burst.after_bytes = RssAnonBytes(server.pid);
  return burst;
}

void MeasureMemoryAfterABurst() {
  std::printf(
      "\n| after a burst of 48 MiB messages | before MiB | peak MiB | back within 16 MiB after s | "
      "then MiB |\n| --- | --- | --- | --- | --- |\n");
  for (const bool trickles : {false, true}) {
    const Server server = StartRapt({absl::StrCat("--threads=", kThreads)});
    const Burst burst = MeasureBurst(server, trickles);
    const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };
    std::printf("| %s | %.0f | %.0f | %.1f | %.0f |\n",
                trickles ? "small calls go on" : "nothing comes", mib(burst.before_bytes),
                mib(burst.peak_bytes), burst.fall_seconds, mib(burst.after_bytes));
    std::fflush(stdout);
    Stop(server);
  }
}

int Main() {
  const Server server = StartRapt({absl::StrCat("--threads=", kThreads)});
  std::printf("%d compute threads.\n\n", kThreads);
  MeasureShortBesideLong(server);
  MeasureAfterTheCallerLeft(server);
  Stop(server);
  MeasureMemoryAfterABurst();
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main() { return rapt::bench::Main(); }
