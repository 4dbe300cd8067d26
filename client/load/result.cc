#include "client/load/result.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace rapt::load {
namespace {

constexpr Percentile kPercentiles[] = {{"p50", 0.5},      {"p75", 0.75}, {"p90", 0.9},
                                       {"p95", 0.95},     {"p99", 0.99}, {"p99.9", 0.999},
                                       {"p99.99", 0.9999}};

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string CpuModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    return std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
  }
  return "unknown";
}

// Reasons to distrust the figures.
std::vector<std::string> Warnings(const Result& result, const Summary& summary) {
  // Responses queue for a thread this busy, which adds latency.
  constexpr double kBusy = 0.85;
  constexpr double kFew = 0.01;
  const Run& run = result.run;
  std::vector<std::string> warnings;
  if (run.tester.busiest_thread > kBusy) {
    warnings.push_back(absl::StrFormat(
        "the load tester is the bottleneck: one of its threads was busy for %.0f%% of the time; "
        "try --threads or larger requests",
        run.tester.busiest_thread * 100));
  }
  const auto share_of_due = [&run](int64_t count) {
    return run.due == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(run.due);
  };
  const int64_t held_up = run.tester.held_up;
  const int64_t late = run.totals.late_sends - held_up;
  if (share_of_due(late) > kFew) {
    warnings.push_back(absl::StrFormat(
        "the load tester could not keep up: %.1f%% of the sends were late although a stream was "
        "free",
        share_of_due(late) * 100));
  }
  if (share_of_due(held_up) > kFew) {
    warnings.push_back(
        absl::StrFormat("%.1f%% of the sends waited because all %d streams were busy; their wait "
                        "counts as latency, not as service time",
                        share_of_due(held_up) * 100, result.streams));
  }
  if (result.is_open_loop && summary.rate < 0.95 * summary.offered_rate) {
    warnings.push_back(absl::StrFormat(
        "the server is overloaded: %.4g requests/s were due, but only %.4g succeeded",
        summary.offered_rate, summary.rate));
  }
  if (run.totals.latency.count() < 100) {
    warnings.push_back(absl::StrFormat(
        "only %d calls succeeded in the measured time: high percentiles are unreliable",
        run.totals.latency.count()));
  }
  if (!run.wrong.empty()) {
    warnings.push_back(absl::StrFormat("%d of %d checked responses are wrong: %s", run.wrong.size(),
                                       run.checked, run.wrong.front().message()));
  }
  return warnings;
}

}  // namespace

Machine ReadMachine() {
  utsname system;
  uname(&system);
  return {CpuModel(), static_cast<int>(std::thread::hardware_concurrency()),
          absl::StrCat(system.sysname, " ", system.release),
          FirstLine("/proc/sys/net/ipv4/tcp_congestion_control")};
}

double Milliseconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-6; }

std::string MillisecondsAt(const Histogram& histogram, double share) {
  if (histogram.count() == 0) return "-";
  return absl::StrFormat("%.4g", Milliseconds(histogram.ValueAt(share)));
}

std::string MeanMilliseconds(const Histogram& histogram) {
  return histogram.count() == 0 ? "-" : absl::StrFormat("%.4g", histogram.mean() * 1e-6);
}

absl::Span<const Percentile> Percentiles() { return kPercentiles; }

Summary Summarize(const Result& result) {
  const Run& run = result.run;
  Summary summary;
  summary.seconds = std::chrono::duration<double>(run.measured).count();
  summary.ok = run.totals.latency.count();
  summary.failed = run.totals.failed();
  summary.dropped = run.dropped;
  summary.ended_after = run.after.calls.ok + run.after.calls.failed;
  int64_t succeeded = 0, in_time = 0, bytes = 0;
  for (const TimedInterval& interval : run.intervals) {
    succeeded += interval.calls.ok;
    in_time += interval.calls.within_slo;
    bytes += interval.calls.bytes;
  }
  const auto per_second = [&summary](int64_t count) {
    return summary.seconds > 0 ? static_cast<double>(count) / summary.seconds : 0;
  };
  summary.rate = per_second(succeeded);
  summary.goodput = per_second(in_time);
  summary.offered_rate = per_second(run.due);
  summary.gigabytes_per_s = per_second(bytes) * 1e-9;
  const int64_t all = summary.ok + summary.failed + summary.dropped;
  const int64_t bad = summary.failed + summary.dropped;
  summary.error_share = all == 0 ? 0 : static_cast<double>(bad) / static_cast<double>(all);
  if (result.objective) {
    summary.meets_objective =
        summary.ok > 0 &&
        Milliseconds(run.totals.latency.ValueAt(0.99)) <= result.objective->p99_ms &&
        summary.error_share <= result.objective->error_share;
  }
  summary.warnings = Warnings(result, summary);
  return summary;
}

}  // namespace rapt::load
