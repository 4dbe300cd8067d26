// soak [minutes]: runs a server at five times its capacity. Fails if an invariant is broken:
//   - its goodput is at least nine tenths of its maximum,
//   - rejections are immediate,
//   - it reports ready all the time,
//   - its memory stays below the budget + 128 MiB + 68 KiB for each open call,
//   - every response is correct, and afterwards goodput recovers and no memory is held.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "rapt/client.h"
#include "tests/support/loopback.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using client::AttendResult;
using client::Client;
using std::chrono::duration;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBudget = 256 * kMiB;
constexpr int kQueued = 64;  // about a second of work; longer waits are useless to callers
constexpr double kOverload = 5;
constexpr double kMinGoodput = 0.9;
constexpr double kMaxRejectionSeconds = 0.25;  // p99, on a machine without a spare core

// Takes some 10 ms of a core: computing costs much more than sending.
constexpr int64_t kLength = 2048, kHeadSize = 64;

// Results of the calls of a phase.
struct Tally {
  std::vector<double> answered, refused;  // duration of each call in seconds
  int64_t failed = 0;                     // with another status or a wrong result
  double seconds = 0;                     // duration of the phase

  double goodput() const { return static_cast<double>(answered.size()) / seconds; }
};

double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at =
      values.begin() + static_cast<int64_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// Sends calls and records their results.
class Load {
 public:
  explicit Load(Client& client) : client_(client), values_(kLength * kHeadSize, 0.5f) {}

  // Keeps `callers` calls in flight, which measures the server's capacity.
  Tally RunClosed(int callers, duration<double> time) {
    Begin();
    const Clock::time_point end = Clock::now() + std::chrono::duration_cast<milliseconds>(time);
    for (int n = 0; n < callers; ++n) SendUntil(end);
    return Finish();
  }

  // Starts calls at this rate, independent of their completion.
  Tally RunOpen(double calls_per_second, duration<double> time) {
    Begin();
    const Clock::time_point begin = Clock::now();
    const auto calls = static_cast<int64_t>(calls_per_second * time.count());
    for (int64_t n = 0; n < calls; ++n) {
      std::this_thread::sleep_until(
          begin + std::chrono::duration_cast<Clock::duration>(
                      duration<double>(static_cast<double>(n) / calls_per_second)));
      Send([] {});
    }
    return Finish();
  }

  int64_t most_open() const { return most_open_; }

 private:
  void Begin() {
    MutexLock lock(mutex_);
    tally_ = {};
    begun_ = Clock::now();
  }

  // Includes the time until the last call has ended, so that all responses count.
  Tally Finish() {
    MutexLock lock(mutex_);
    while (open_ > 0) none_open_.Wait(mutex_);
    tally_.seconds = duration<double>(Clock::now() - begun_).count();
    return std::move(tally_);
  }

  void SendUntil(Clock::time_point end) {
    Send([this, end] {
      if (Clock::now() < end) SendUntil(end);
    });
  }

  void Send(absl::AnyInvocable<void()> then) {
    {
      MutexLock lock(mutex_);
      most_open_ = std::max<int64_t>(most_open_, ++open_);
    }
    const client::TensorView x = client::View<float>({1, 1, kLength, kHeadSize}, values_);
    const Clock::time_point begin = Clock::now();
    client_.AttendAsync({.q = x, .k = x, .v = x}, {.timeout = std::chrono::seconds(30)},
                        [this, begin, then = std::move(then)](auto result) mutable {
                          Note(result, duration<double>(Clock::now() - begin).count());
                          then();  // starts the next call before this one counts as finished
                          MutexLock lock(mutex_);
                          if (--open_ == 0) none_open_.SignalAll();
                        });
  }

  void Note(const absl::StatusOr<AttendResult>& result, double seconds) {
    const bool right = result.ok() && std::all_of(result->y.values<float>().begin(),
                                                  result->y.values<float>().end(), [](float y) {
                                                    return std::abs(y - .5f) < 1e-5f;
                                                  });
    MutexLock lock(mutex_);
    if (right) {
      tally_.answered.push_back(seconds);
    } else if (absl::IsResourceExhausted(result.status())) {
      tally_.refused.push_back(seconds);
    } else if (tally_.failed++ == 0) {
      std::fprintf(stderr, "soak: a call failed: %s\n", result.status().ToString().c_str());
    }
  }

  Client& client_;
  const std::vector<float> values_;
  Mutex mutex_;
  CondVar none_open_;
  int64_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  Tally tally_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point begun_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> most_open_{0};
};

// Samples memory and health until destruction.
class Watch {
 public:
  Watch(const ServerProcess& server, Client& client)
      : thread_([this, &server, &client] {
          while (!stopping_) {
            const bool ready =
                absl::StrContains(HttpGet(server.metrics_address(), "/readyz"), " 200 ");
            const auto health = client.CheckHealth();
            const bool serving = health.ok() && *health == client::HealthStatus::kServing;
            ++probes_;
            if (!ready || !serving) ++unready_;
            for (int n = 0; n < 5; ++n) {
              peak_ = std::max(peak_.load(), RssAnonBytes(server.pid()));
              std::this_thread::sleep_for(milliseconds(10));
            }
          }
        }) {}
  ~Watch() {
    stopping_ = true;
    thread_.join();
  }

  int64_t peak_bytes() const { return peak_; }
  int64_t probes() const { return probes_; }
  int64_t unready() const { return unready_; }

 private:
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> probes_{0};
  std::atomic<int64_t> unready_{0};
  std::thread thread_;
};

void PrintPhase(const char* name, const Tally& tally) {
  const auto ms = [](double seconds) { return seconds * 1000; };
  const auto calls = static_cast<double>(tally.answered.size() + tally.refused.size());
  std::printf("| %-8s | %7.1f | %7.1f | %7.0f / %7.0f | %7.1f | %7.1f / %7.1f | %6ld |\n", name,
              calls / tally.seconds, tally.goodput(), ms(Quantile(tally.answered, 0.5)),
              ms(Quantile(tally.answered, 0.99)),
              static_cast<double>(tally.refused.size()) / tally.seconds,
              ms(Quantile(tally.refused, 0.5)), ms(Quantile(tally.refused, 0.99)),
              static_cast<long>(tally.failed));
  std::fflush(stdout);
}

bool all_hold = true;

void Expect(bool holds, const std::string& invariant) {
  std::printf("%s %s\n", holds ? "ok    " : "BROKEN", invariant.c_str());
  all_hold = all_hold && holds;
}

int Soak(duration<double> time) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget),
                        absl::StrCat("--max_queued_requests=", kQueued),
                        absl::StrCat("--threads=", std::max(1, cores / 2))});
  auto connected = Client::Connect(server.grpc_address(), {.retries = {.max_attempts = 1}});
  if (!connected.ok()) {
    std::fprintf(stderr, "soak: %s\n", connected.status().ToString().c_str());
    return EXIT_FAILURE;
  }
  Client& client = **connected;
  Load load(client);
  constexpr int kCallers = 16;
  load.RunClosed(kCallers, duration<double>(2));  // warm

  std::printf(
      "| phase    | calls/s | right/s | ms p50 / p99      | refused | ms p50 / p99      | failed "
      "|\n");
  std::printf(
      "| -------- | ------- | ------- | ----------------- | ------- | ----------------- | ------ "
      "|\n");
  Tally best, overload, after;
  int64_t peak_bytes, probes, unready;
  {
    const Watch watch(server, client);
    PrintPhase("best", best = load.RunClosed(kCallers, time / 6));
    PrintPhase("overload", overload = load.RunOpen(kOverload * best.goodput(), time * 4 / 6));
    PrintPhase("after", after = load.RunClosed(kCallers, time / 6));
    peak_bytes = watch.peak_bytes();
    probes = watch.probes();
    unready = watch.unready();
  }
  WaitForMetric(server, "rapt_open_calls", 0);
  const double held = ReadMetric(server, "rapt_memory_reserved_bytes");
  server.Terminate();
  const int left = server.Wait();

  const double refusal = Quantile(overload.refused, 0.99);
  const int64_t line = kBudget + 128 * kMiB + load.most_open() * 68 * 1024;
  Expect(
      overload.goodput() >= kMinGoodput * best.goodput(),
      absl::StrCat("goodput under ", kOverload, " times the load: ",
                   static_cast<int>(100 * overload.goodput() / best.goodput()), " % of the best"));
  Expect(after.goodput() >= kMinGoodput * best.goodput(),
         absl::StrCat("goodput afterwards: ",
                      static_cast<int>(100 * after.goodput() / best.goodput()), " % of the best"));
  Expect(!overload.refused.empty() && refusal <= kMaxRejectionSeconds,
         absl::StrCat("99 % of ", overload.refused.size(), " refusals within ",
                      static_cast<int>(refusal * 1000), " ms"));
  Expect(unready == 0, absl::StrCat("ready at ", probes - unready, " of ", probes, " probes"));
  Expect(peak_bytes <= line,
         absl::StrCat("memory of ", peak_bytes / kMiB, " MiB at most; the limit is ", line / kMiB,
                      " MiB with ", load.most_open(), " open calls"));
  Expect(best.failed + overload.failed + after.failed == 0,
         "every other call gets a correct result");
  Expect(held == 0, absl::StrCat("memory held at the end: ", held, " bytes"));
  Expect(left == 0, absl::StrCat("exit status ", left));
  return all_hold ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace rapt::test

int main(int argc, char** argv) {
  const double minutes = argc > 1 ? std::atof(argv[1]) : 2;
  if (argc > 2 || !(minutes > 0)) {
    std::fprintf(stderr, "usage: soak [minutes]\n");
    return 2;
  }
  return rapt::test::Soak(std::chrono::duration<double>(60 * minutes));
}
