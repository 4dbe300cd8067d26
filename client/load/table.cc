// The report for terminals.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/load/result.h"

namespace rapt::load {
namespace {

constexpr size_t kMaxShapes = 12;

std::string Row(const std::string& name, const Histogram& histogram) {
  std::string row = absl::StrFormat("  %-14s", name);
  for (const Percentile& percentile : Percentiles()) {
    absl::StrAppendFormat(&row, "%10s", MillisecondsAt(histogram, percentile.share));
  }
  absl::StrAppendFormat(&row, "%10s%10s\n", MillisecondsAt(histogram, 1),
                        MeanMilliseconds(histogram));
  return row;
}

std::string DurationTable(const Run& run) {
  std::string out = absl::StrFormat("\n  %-14s", "ms");
  for (const Percentile& percentile : Percentiles()) {
    absl::StrAppendFormat(&out, "%10s", percentile.name);
  }
  absl::StrAppendFormat(&out, "%10s%10s\n", "max", "mean");
  absl::StrAppend(&out, Row("latency", run.totals.latency),
                  Row("service time", run.totals.service));
  if (run.groups.count() > 0) absl::StrAppend(&out, Row("whole query", run.groups));
  if (run.totals.server.count() > 0) {
    absl::StrAppend(&out, Row("  in queue", run.totals.queue),
                    Row("  computing", run.totals.compute), Row("  at server", run.totals.server),
                    Row("  between", run.totals.between));
  }
  return out;
}

std::string Shapes(const Result& result) {
  if (result.shapes.size() < 2) return "";
  std::string out =
      absl::StrFormat("\n  %-44s%10s%10s%10s\n", "by shape", "calls", "p50 ms", "p99 ms");
  for (size_t i = 0; i < result.shapes.size() && i < kMaxShapes; ++i) {
    const Histogram& latency = result.run.totals.shapes[i];
    absl::StrAppendFormat(&out, "  %-44s%10d%10s%10s\n", Describe(result.shapes[i]),
                          latency.count(), MillisecondsAt(latency, 0.5),
                          MillisecondsAt(latency, 0.99));
  }
  if (result.shapes.size() > kMaxShapes) {
    absl::StrAppendFormat(&out, "  and %d more in --json\n", result.shapes.size() - kMaxShapes);
  }
  return out;
}

// The causes of a code, if there is more than one.
std::string Causes(const Failures& failures) {
  std::string out;
  if (failures.causes.size() < 2) return out;
  for (const auto& [cause, count] : failures.causes) {
    absl::StrAppendFormat(&out, "\n    %d x %s", count, cause);
  }
  return out;
}

std::string Trials(const Result& result) {
  if (result.trials.empty()) return "";
  std::string out =
      absl::StrFormat("\n  %-14s%10s%10s%10s\n", "offered/s", "done/s", "p99 ms", "errors");
  for (const Trial& trial : result.trials) {
    absl::StrAppendFormat(&out, "  %-14.5g%10.5g%10.4g%9.2f%%  %s\n", trial.offered, trial.achieved,
                          trial.p99_ms, trial.error_share * 100, trial.passed ? "met" : "missed");
  }
  return out;
}

}  // namespace

std::string Table(const Result& result) {
  const Run& run = result.run;
  const Summary summary = Summarize(result);
  std::string out = Trials(result);
  absl::StrAppendFormat(&out, "\n  %d calls in %.1f s: %d succeeded, %d failed",
                        summary.ok + summary.failed + summary.dropped, summary.seconds, summary.ok,
                        summary.failed);
  if (result.is_open_loop) absl::StrAppendFormat(&out, ", %d were never sent", summary.dropped);
  if (summary.ended_after > 0) {
    absl::StrAppendFormat(&out, "; %d ended later, which the rates leave out", summary.ended_after);
  }
  absl::StrAppendFormat(&out, "\n  %.5g requests/s", summary.rate);
  if (result.is_open_loop) absl::StrAppendFormat(&out, " of %.5g offered", summary.offered_rate);
  absl::StrAppendFormat(&out, ", %.3g GB/s", summary.gigabytes_per_s);
  if (result.objective) {
    absl::StrAppendFormat(&out, "; goodput %.5g/s\n  p99 <= %g ms and errors <= %g%%: %s",
                          summary.goodput, result.objective->p99_ms,
                          result.objective->error_share * 100,
                          summary.meets_objective ? "met" : "MISSED");
  }
  absl::StrAppend(&out, "\n", DurationTable(run), Shapes(result));
  for (const auto& [code, failures] : run.totals.failures) {
    absl::StrAppendFormat(&out, "\n  %d x %s, p50 %.4g ms: %s", failures.count,
                          absl::StatusCodeToString(code),
                          Milliseconds(failures.latency.ValueAt(0.5)), failures.example);
    absl::StrAppend(&out, Causes(failures));
  }
  absl::StrAppendFormat(&out, "\n  %d responses checked against the definition, %d wrong\n",
                        run.checked, run.wrong.size());
  absl::StrAppendFormat(&out, "  load tester: %.2f cores used, busiest thread %.0f%% busy\n",
                        summary.seconds > 0 ? run.tester.cpu_seconds / summary.seconds : 0,
                        run.tester.busiest_thread * 100);
  for (const std::string& warning : summary.warnings) {
    absl::StrAppend(&out, "  warning: ", warning, "\n");
  }
  return out;
}

}  // namespace rapt::load
