// The HTML report: one self-contained file with charts, without scripts.
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "base/version.h"
#include "client/console/text.h"
#include "client/load/chart.h"
#include "client/load/result.h"

namespace rapt::load {
namespace {

constexpr char kHead[] = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rapt-load</title>
<style>
:root { --paper: #fff; --ink: #1b1f24; --faint: #667; --grid: #e3e6ea; --bad: #b3261e;
  --line0: #2a788e; --line1: #d1495b; --line2: #7a5195; --line3: #e6912c; --line4: #3d8b40;
  --line5: #555; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #e8eaed; --faint: #9aa3ad; --grid: #31363c; --bad: #ff8a80;
    --line0: #4fc3dc; --line1: #ff7b8c; --line2: #c39ae6; --line3: #ffb65c; --line4: #7ccf7f;
    --line5: #bbb; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 60em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 2em; }
.figures { display: flex; flex-wrap: wrap; gap: 1em 2.5em; margin: 1.5em 0; }
.figures b { display: block; font-size: 1.6em; font-weight: 600; }
.figures span, .faint { color: var(--faint); }
.bad { color: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .9em .2em 0; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin: .6em 0; }
svg .grid { stroke: var(--grid); } svg .tick { fill: var(--faint); font-size: 12px; }
svg .title { fill: var(--ink); font-size: 14px; font-weight: 600; }
svg polyline { fill: none; stroke-width: 1.8; } svg .key { stroke-width: 3; }
</style></head><body>
)";

std::string Number(double value) { return absl::StrFormat("%.4g", value); }

std::string Figure(const std::string& value, const char* of) {
  return absl::StrCat("<div><b>", value, "</b><span>", of, "</span></div>\n");
}

using Cells = std::vector<std::string>;

// The first row is the header.
std::string HtmlTable(const std::vector<Cells>& rows) {
  std::string html = "<table>\n";
  const char* tag = "th";
  for (const Cells& row : rows) {
    absl::StrAppend(&html, "<tr>");
    for (const std::string& cell : row) {
      absl::StrAppend(&html, "<", tag, ">", EscapeXml(cell), "</", tag, ">");
    }
    absl::StrAppend(&html, "</tr>\n");
    tag = "td";
  }
  return html + "</table>\n";
}

std::string Figures(const Result& result, const Summary& summary) {
  const Histogram& latency = result.run.totals.latency;
  std::string html = "<div class='figures'>\n";
  absl::StrAppend(&html, Figure(Number(summary.rate), "responses/s"));
  if (result.is_open_loop) {
    absl::StrAppend(&html, Figure(Number(summary.offered_rate), "offered/s"));
  }
  if (result.objective) absl::StrAppend(&html, Figure(Number(summary.goodput), "goodput/s"));
  absl::StrAppend(&html, Figure(MillisecondsAt(latency, 0.5), "ms at p50"),
                  Figure(MillisecondsAt(latency, 0.99), "ms at p99"),
                  Figure(Number(summary.gigabytes_per_s), "GB/s"),
                  Figure(absl::StrFormat("%.3g%%", summary.error_share * 100), "failed"));
  absl::StrAppend(&html, "</div>\n");
  if (result.objective) {
    absl::StrAppendFormat(&html, "<p class='%s'>p99 &le; %g ms and errors &le; %g%%: %s</p>\n",
                          summary.meets_objective ? "faint" : "bad", result.objective->p99_ms,
                          result.objective->error_share * 100,
                          summary.meets_objective ? "met" : "missed");
  }
  for (const std::string& warning : summary.warnings) {
    absl::StrAppend(&html, "<p class='bad'>", EscapeXml(warning), "</p>\n");
  }
  return html;
}

// --- Charts ---

// `value` returns nullopt if an interval has none.
template <typename Value>
Line OverTime(const std::string& name, absl::Span<const TimedInterval> intervals,
              const Value& value) {
  Line line{name, {}};
  for (const TimedInterval& interval : intervals) {
    const std::chrono::duration<double> middle = interval.begin + interval.length / 2;
    const std::chrono::duration<double> length = interval.length;
    if (!(length.count() > 0)) continue;
    const std::optional<double> y = value(interval, length.count());
    if (y) line.points.emplace_back(middle.count(), *y);
  }
  return line;
}

std::string LatencyOverTime(const Run& run) {
  const auto quantile = [](double share) {
    return [share](const TimedInterval& interval, double) -> std::optional<double> {
      if (interval.calls.latency.count() == 0) return std::nullopt;
      return Milliseconds(interval.calls.latency.ValueAt(share));
    };
  };
  // With the calls that ended later, as in the table: the slowest are often among them.
  std::vector<TimedInterval> intervals = run.intervals;
  intervals.push_back(run.after);
  return DrawSvg({.title = "Latency over time",
                  .x_label = "seconds",
                  .y_label = "ms",
                  .lines = {OverTime("p50", intervals, quantile(0.5)),
                            OverTime("p99", intervals, quantile(0.99)),
                            OverTime("max", intervals, quantile(1))}});
}

std::string ThroughputOverTime(const Result& result) {
  const auto rate = [](auto count) {
    return [count](const TimedInterval& interval, double seconds) {
      return static_cast<double>(count(interval)) / seconds;
    };
  };
  const std::vector<TimedInterval>& intervals = result.run.intervals;
  std::vector<Line> lines = {
      OverTime("succeeded", intervals, rate([](const TimedInterval& s) { return s.calls.ok; })),
      OverTime("failed", intervals, rate([](const TimedInterval& s) { return s.calls.failed; }))};
  if (result.is_open_loop) {
    lines.push_back(
        OverTime("offered", intervals, rate([](const TimedInterval& s) { return s.due; })));
  }
  return DrawSvg({.title = "Throughput",
                  .x_label = "seconds",
                  .y_label = "calls/s",
                  .lines = std::move(lines)});
}

// Logarithmic axis: 90 to 99 % is as long as 99 to 99.9 %.
std::string PercentileChart(const Totals& totals) {
  const auto place = [](double share) { return -std::log10(1 - share); };
  const auto line = [](const char* name, const Histogram& histogram) {
    Line line{name, {}};
    if (histogram.count() == 0) return line;
    for (int tenths = 0; tenths <= 40; ++tenths) {
      const double x = tenths / 10.0;
      line.points.emplace_back(x, Milliseconds(histogram.ValueAt(1 - std::pow(10, -x))));
    }
    return line;
  };
  std::vector<Line> lines = {line("latency", totals.latency), line("service time", totals.service)};
  if (totals.server.count() > 0) lines.push_back(line("at server", totals.server));
  return DrawSvg({.title = "Percentiles",
                  .x_label = "percentile",
                  .y_label = "ms",
                  .x_ticks = {{place(0), "0"},
                              {place(0.5), "50 %"},
                              {place(0.9), "90 %"},
                              {place(0.99), "99 %"},
                              {place(0.999), "99.9 %"},
                              {place(0.9999), "99.99 %"}},
                  .lines = std::move(lines)});
}

// --- Tables ---

std::string Durations(const Run& run) {
  std::vector<Cells> rows = {{"ms"}};
  for (const Percentile& percentile : Percentiles()) rows.front().emplace_back(percentile.name);
  rows.front().insert(rows.front().end(), {"max", "mean"});
  const Totals& totals = run.totals;
  for (const auto& [name, histogram] : std::vector<std::pair<const char*, const Histogram*>>{
           {"latency", &totals.latency},
           {"service time", &totals.service},
           {"whole query", &run.groups},
           {"queued at the server", &totals.queue},
           {"computing", &totals.compute},
           {"at the server", &totals.server},
           {"between", &totals.between}}) {
    if (histogram->count() == 0) continue;
    Cells& row = rows.emplace_back(Cells{name});
    for (const Percentile& percentile : Percentiles()) {
      row.push_back(MillisecondsAt(*histogram, percentile.share));
    }
    row.push_back(MillisecondsAt(*histogram, 1));
    row.push_back(MeanMilliseconds(*histogram));
  }
  return HtmlTable(rows);
}

std::string Shapes(const Result& result) {
  std::vector<Cells> rows = {{"shape", "calls", "p50 ms", "p99 ms", "max ms"}};
  for (size_t i = 0; i < result.shapes.size(); ++i) {
    const Histogram& latency = result.run.totals.shapes[i];
    rows.push_back({Describe(result.shapes[i]), absl::StrCat(latency.count()),
                    MillisecondsAt(latency, 0.5), MillisecondsAt(latency, 0.99),
                    MillisecondsAt(latency, 1)});
  }
  return HtmlTable(rows);
}

std::string FailureTable(const Totals& totals) {
  if (totals.failures.empty()) return "";
  std::vector<Cells> rows = {{"code", "calls", "p50 ms", "first message"}};
  for (const auto& [code, failures] : totals.failures) {
    rows.push_back({absl::StatusCodeToString(code), absl::StrCat(failures.count),
                    MillisecondsAt(failures.latency, 0.5), failures.example});
  }
  return absl::StrCat("<h2>Failures</h2>\n", HtmlTable(rows));
}

std::string TrialTable(const std::vector<Trial>& trials) {
  if (trials.empty()) return "";
  std::vector<Cells> rows = {{"offered/s", "achieved/s", "p99 ms", "failed", "objective"}};
  for (const Trial& trial : trials) {
    rows.push_back({Number(trial.offered), Number(trial.achieved), Number(trial.p99_ms),
                    absl::StrFormat("%.2f%%", trial.error_share * 100),
                    trial.passed ? "met" : "missed"});
  }
  return absl::StrCat("<h2>Search</h2>\n", HtmlTable(rows));
}

// "rapt-server 1.0.0 avx512 at 127.0.0.1:8001"
std::string ServerText(const Result& result) {
  std::string text;
  for (const std::string& part :
       {result.server.name, result.server.version, result.server.isa, "at " + result.address}) {
    if (!part.empty()) absl::StrAppend(&text, text.empty() ? "" : " ", part);
  }
  return text;
}

std::string Head(const Result& result, const Summary& summary) {
  return absl::StrCat(
      kHead, "<h1>", EscapeXml(result.label.empty() ? "Load" : result.label),
      "</h1>\n<p class='faint'>",
      absl::StrFormat("%d calls in %.1f s, %s loop%s%s", summary.ok + summary.failed,
                      summary.seconds, result.is_open_loop ? "open" : "closed",
                      result.scenario.empty() ? "" : ", MLPerf ", EscapeXml(result.scenario)),
      summary.ended_after == 0 ? "" : absl::StrFormat("; %d ended later", summary.ended_after),
      "<br>", EscapeXml(ServerText(result)), ", ", EscapeXml(result.started), "<br><code>",
      EscapeXml(result.command), "</code></p>\n");
}

std::string Context(const Result& result, const Summary& summary) {
  const absl::string_view version = Version();
  std::vector<Cells> rows = {
      {"", ""},
      {"rapt-load", std::string(version.data(), version.size())},
      {"machine",
       absl::StrFormat("%s, %d cores, %s, TCP %s", result.machine.cpu, result.machine.cores,
                       result.machine.kernel, result.machine.congestion_control)},
      {"load tester",
       absl::StrFormat("%.2f cores; busiest thread %.0f%% busy",
                       summary.seconds > 0 ? result.run.tester.cpu_seconds / summary.seconds : 0,
                       result.run.tester.busiest_thread * 100)},
      {"responses checked",
       absl::StrFormat("%d, %d wrong", result.run.checked, result.run.wrong.size())}};
  for (const auto& [name, value] : result.settings) rows.push_back({name, value});
  return absl::StrCat("<h2>Settings</h2>\n", HtmlTable(rows));
}

}  // namespace

std::string Html(const Result& result) {
  const Summary summary = Summarize(result);
  return absl::StrCat(Head(result, summary), Figures(result, summary), LatencyOverTime(result.run),
                      ThroughputOverTime(result), PercentileChart(result.run.totals),
                      "<h2>Durations</h2>\n", Durations(result.run), "<h2>Shapes</h2>\n",
                      Shapes(result), FailureTable(result.run.totals), TrialTable(result.trials),
                      Context(result, summary), "</body></html>\n");
}

}  // namespace rapt::load
