// The JSON and CSV reports.
#include <grpcpp/grpcpp.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/version.h"
#include "client/console/json.h"
#include "client/load/result.h"

namespace rapt::load {
namespace {

// NaN, which becomes null, if the histogram is empty.
double QuantileMs(const Histogram& histogram, double share) {
  return histogram.count() == 0 ? NAN : Milliseconds(histogram.ValueAt(share));
}

void WritePercentiles(const Histogram& histogram, JsonWriter& json) {
  json.BeginObject().Key("count").Integer(histogram.count());
  json.Key("min").Number(histogram.count() == 0 ? NAN : Milliseconds(histogram.min()));
  json.Key("mean").Number(histogram.count() == 0 ? NAN : histogram.mean() * 1e-6);
  for (const Percentile& percentile : Percentiles()) {
    json.Key(percentile.name).Number(QuantileMs(histogram, percentile.share));
  }
  json.Key("max").Number(QuantileMs(histogram, 1)).EndObject();
}

void WriteBuckets(const Histogram& histogram, JsonWriter& json) {
  json.BeginArray();
  for (const auto& [value, count] : histogram.Buckets()) {
    json.BeginArray().Integer(value).Integer(count).EndArray();
  }
  json.EndArray();
}

void WriteContext(const Result& result, JsonWriter& json) {
  json.Key("started").String(result.started).Key("label").String(result.label);
  json.Key("command").String(result.command);
  json.Key("build").BeginObject();
  const absl::string_view version = Version();
  json.Key("version").String({version.data(), version.size()});
  json.Key("grpc").String(grpc::Version()).EndObject();
  json.Key("machine").BeginObject().Key("cpu").String(result.machine.cpu);
  json.Key("cores").Integer(result.machine.cores).Key("kernel").String(result.machine.kernel);
  json.Key("tcp_congestion_control").String(result.machine.congestion_control).EndObject();
  json.Key("server").BeginObject().Key("address").String(result.address);
  json.Key("name").String(result.server.name);
  json.Key("version").String(result.server.version).Key("isa").String(result.server.isa);
  json.Key("compute_threads").Integer(result.server.compute_threads).EndObject();
  json.Key("scenario").String(result.scenario);
  json.Key("settings").BeginObject();
  for (const auto& [name, value] : result.settings) json.Key(name).String(value);
  json.EndObject();
}

void WriteSummary(const Result& result, const Summary& summary, JsonWriter& json) {
  const Run& run = result.run;
  json.Key("summary").BeginObject();
  json.Key("seconds").Number(summary.seconds).Key("ok").Integer(summary.ok);
  json.Key("failed").Integer(summary.failed).Key("dropped").Integer(summary.dropped);
  json.Key("ended_after").Integer(summary.ended_after);
  json.Key("late_sends").Integer(run.totals.late_sends);
  json.Key("rate").Number(summary.rate);
  json.Key("offered_rate");
  result.is_open_loop ? json.Number(summary.offered_rate) : json.Number(NAN);
  json.Key("goodput").Number(summary.goodput);
  json.Key("error_share").Number(summary.error_share);
  json.Key("gigabytes_per_s").Number(summary.gigabytes_per_s);
  json.Key("request_bytes").Integer(run.totals.request_bytes);
  json.Key("response_bytes").Integer(run.totals.response_bytes);
  json.Key("meets_objective").Boolean(summary.meets_objective).EndObject();
  if (result.objective) {
    json.Key("objective").BeginObject().Key("p99_ms").Number(result.objective->p99_ms);
    json.Key("error_share").Number(result.objective->error_share).EndObject();
  }
}

void WriteTrials(const Result& result, JsonWriter& json) {
  json.Key("search").BeginArray();
  for (const Trial& trial : result.trials) {
    json.BeginObject().Key("offered").Number(trial.offered).Key("achieved").Number(trial.achieved);
    json.Key("p99_ms").Number(trial.p99_ms).Key("error_share").Number(trial.error_share);
    json.Key("passed").Boolean(trial.passed).EndObject();
  }
  json.EndArray();
}

void WriteDurations(const Result& result, JsonWriter& json) {
  const Totals& totals = result.run.totals;
  const std::pair<const char*, const Histogram*> kinds[] = {
      {"latency", &totals.latency}, {"service", &totals.service}, {"query", &result.run.groups},
      {"queue", &totals.queue},     {"compute", &totals.compute}, {"server", &totals.server},
      {"between", &totals.between}};
  json.Key("milliseconds").BeginObject();
  for (const auto& [name, histogram] : kinds) {
    if (histogram->count() == 0) continue;
    json.Key(name);
    WritePercentiles(*histogram, json);
  }
  json.EndObject().Key("shapes").BeginArray();
  for (size_t i = 0; i < result.shapes.size(); ++i) {
    json.BeginObject().Key("shape").String(Describe(result.shapes[i])).Key("latency_ms");
    WritePercentiles(totals.shapes[i], json);
    json.EndObject();
  }
  json.EndArray().Key("failures").BeginArray();
  for (const auto& [code, failures] : totals.failures) {
    json.BeginObject().Key("code").String(absl::StatusCodeToString(code));
    json.Key("count").Integer(failures.count).Key("example").String(failures.example);
    json.Key("causes").BeginArray();
    for (const auto& [cause, count] : failures.causes) {
      json.BeginObject().Key("message").String(cause).Key("count").Integer(count).EndObject();
    }
    json.EndArray().Key("latency_ms");
    WritePercentiles(failures.latency, json);
    json.EndObject();
  }
  json.EndArray();
}

void WriteTester(const Result& result, const Summary& summary, JsonWriter& json) {
  const Run& run = result.run;
  json.Key("tester").BeginObject().Key("cpu_seconds").Number(run.tester.cpu_seconds);
  json.Key("cores").Number(summary.seconds > 0 ? run.tester.cpu_seconds / summary.seconds : 0);
  json.Key("busiest_thread").Number(run.tester.busiest_thread);
  json.Key("held_up_sends").Integer(run.tester.held_up).EndObject();
  json.Key("checked").BeginObject().Key("responses").Integer(run.checked);
  json.Key("wrong").Integer(static_cast<int64_t>(run.wrong.size())).Key("examples").BeginArray();
  for (const absl::Status& wrong : run.wrong) json.String(std::string(wrong.message()));
  json.EndArray().EndObject();
  json.Key("warnings").Strings(summary.warnings);
}

void WriteSeries(const Run& run, JsonWriter& json) {
  const auto seconds = [](std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
  };
  json.Key("series").BeginArray();
  for (const TimedInterval& interval : run.intervals) {
    const double length = seconds(interval.length);
    const Interval& calls = interval.calls;
    const auto rate = [length](int64_t count) {
      return length > 0 ? static_cast<double>(count) / length : 0;
    };
    json.BeginObject()
        .Key("begin_s")
        .Number(seconds(interval.begin))
        .Key("length_s")
        .Number(length);
    json.Key("rate").Number(rate(calls.ok)).Key("failed_rate").Number(rate(calls.failed));
    json.Key("offered_rate")
        .Number(rate(interval.due))
        .Key("in_flight")
        .Integer(interval.in_flight);
    json.Key("p50_ms").Number(QuantileMs(calls.latency, 0.5));
    json.Key("p99_ms").Number(QuantileMs(calls.latency, 0.99));
    json.Key("max_ms").Number(QuantileMs(calls.latency, 1));
    json.Key("service_p99_ms").Number(QuantileMs(calls.service, 0.99)).EndObject();
  }
  json.EndArray();
}

// Quotes a cell as RFC 4180 requires.
std::string Cell(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

}  // namespace

std::string Json(const Result& result) {
  const Summary summary = Summarize(result);
  JsonWriter json;
  json.BeginObject().Key("format").String("rapt-load/1");
  WriteContext(result, json);
  WriteSummary(result, summary, json);
  WriteTrials(result, json);
  WriteDurations(result, json);
  WriteTester(result, summary, json);
  WriteSeries(result.run, json);
  json.Key("histograms_ns").BeginObject().Key("latency");
  WriteBuckets(result.run.totals.latency, json);
  json.Key("service");
  WriteBuckets(result.run.totals.service, json);
  json.EndObject().EndObject();
  return json.Take() + "\n";
}

std::string Csv(const Result& result, bool with_header) {
  const Summary summary = Summarize(result);
  const Run& run = result.run;
  std::vector<std::pair<std::string, std::string>> cells = {
      {"started", result.started},
      {"label", result.label},
      {"version", std::string(Version())},
      {"cpu", result.machine.cpu},
      {"cores", absl::StrCat(result.machine.cores)},
      {"server", absl::StrCat(result.server.name, " ", result.server.version)}};
  cells.insert(cells.end(), result.settings.begin(), result.settings.end());
  const auto add = [&cells](const std::string& name, double value) {
    cells.emplace_back(name, std::isnan(value) ? "" : absl::StrFormat("%.8g", value));
  };
  add("seconds", summary.seconds);
  add("ok", static_cast<double>(summary.ok));
  add("failed", static_cast<double>(summary.failed));
  add("dropped", static_cast<double>(summary.dropped));
  add("late_sends", static_cast<double>(run.totals.late_sends));
  add("rate", summary.rate);
  add("offered_rate", summary.offered_rate);
  add("goodput", summary.goodput);
  add("gigabytes_per_s", summary.gigabytes_per_s);
  for (const auto& [name, histogram] :
       {std::pair("latency", &run.totals.latency), std::pair("service", &run.totals.service)}) {
    for (const Percentile& percentile : Percentiles()) {
      add(absl::StrCat(name, "_", percentile.name, "_ms"),
          QuantileMs(*histogram, percentile.share));
    }
    add(absl::StrCat(name, "_max_ms"), QuantileMs(*histogram, 1));
  }
  add("tester_cpu_seconds", run.tester.cpu_seconds);
  const auto join = [&cells](const auto& of) {
    return absl::StrJoin(cells, ",",
                         [&of](std::string* out, const auto& cell) {
                           absl::StrAppend(out, Cell(of(cell)));
                         }) +
           "\n";
  };
  std::string out;
  if (with_header) out = join([](const auto& cell) { return cell.first; });
  return out + join([](const auto& cell) { return cell.second; });
}

}  // namespace rapt::load
