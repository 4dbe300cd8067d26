#include "client/load/compare.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/invalid.h"
#include "base/strict_json.h"
#include "client/load/random.h"

namespace rapt::load {
namespace {

constexpr const char* kFigures[] = {"rate", "p50 ms", "p99 ms"};

using Json = nlohmann::json;

// Return the value at a path such as "/summary/rate", or an empty one.
double NumberAt(const Json& json, const char* path) {
  const Json::json_pointer pointer(path);
  return json.contains(pointer) && json[pointer].is_number() ? json[pointer].get<double>() : 0;
}
std::string TextAt(const Json& json, const char* path) {
  const Json::json_pointer pointer(path);
  return json.contains(pointer) && json[pointer].is_string() ? json[pointer].get<std::string>()
                                                             : "";
}

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double MeanOfResample(const std::vector<double>& values, uint64_t seed) {
  std::vector<double> drawn;
  for (size_t i = 0; i < values.size(); ++i) {
    drawn.push_back(values[Draw(seed, i) % values.size()]);
  }
  return Mean(drawn);
}

double Ratio(double after, double before) { return before > 0 ? after / before : 0; }

Comparison CompareFigure(const std::string& figure, const Recorded& before, const Recorded& after) {
  constexpr uint64_t kResamples = 2000;
  Comparison comparison{figure, before.figures.at(figure), after.figures.at(figure)};
  comparison.ratio = Ratio(comparison.after, comparison.before);
  comparison.low = comparison.high = comparison.ratio;
  const std::vector<double>& first = before.intervals.at(figure);
  const std::vector<double>& second = after.intervals.at(figure);
  const double whole = Ratio(Mean(second), Mean(first));
  if (first.size() < 2 || second.size() < 2 || !(whole > 0)) return comparison;
  std::vector<double> ratios;
  for (uint64_t n = 0; n < kResamples; ++n) {
    ratios.push_back(Ratio(MeanOfResample(second, 2 * n), MeanOfResample(first, 2 * n + 1)));
  }
  std::sort(ratios.begin(), ratios.end());
  // The mean over intervals differs slightly from the figure of the whole run, so use only the
  // spread around it.
  comparison.low *= ratios[kResamples * 25 / 1000] / whole;
  comparison.high *= ratios[kResamples * 975 / 1000] / whole;
  return comparison;
}

}  // namespace

absl::StatusOr<Recorded> ReadReport(std::string_view text) {
  const absl::StatusOr<Json> json = ParseStrictJson({text.data(), text.size()});
  if (!json.ok()) return Invalid("not a rapt-load JSON report: ", json.status().message());
  if (TextAt(*json, "/format") != "rapt-load/1") return Invalid("not a rapt-load JSON report");
  Recorded recorded;
  recorded.label = TextAt(*json, "/label");
  const Json settings = json->value("settings", Json::object());
  for (const auto& [name, value] : settings.items()) {
    if (value.is_string()) recorded.settings[name] = value.get<std::string>();
  }
  recorded.figures = {{"rate", NumberAt(*json, "/summary/rate")},
                      {"p50 ms", NumberAt(*json, "/milliseconds/latency/p50")},
                      {"p99 ms", NumberAt(*json, "/milliseconds/latency/p99")}};
  for (const char* figure : kFigures) recorded.intervals[figure];
  for (const Json& interval : json->value("series", Json::array())) {
    const double rate = NumberAt(interval, "/rate");
    recorded.intervals["rate"].push_back(rate);
    if (rate == 0) continue;  // no responses, so no latency
    recorded.intervals["p50 ms"].push_back(NumberAt(interval, "/p50_ms"));
    recorded.intervals["p99 ms"].push_back(NumberAt(interval, "/p99_ms"));
  }
  return recorded;
}

std::vector<Comparison> Compare(const Recorded& before, const Recorded& after) {
  std::vector<Comparison> comparisons;
  for (const char* figure : kFigures) {
    comparisons.push_back(CompareFigure(figure, before, after));
  }
  return comparisons;
}

std::string Table(const Recorded& before, const Recorded& after) {
  const auto name = [](const Recorded& recorded, const char* fallback) {
    return recorded.label.empty() ? std::string(fallback) : recorded.label;
  };
  std::string out = absl::StrFormat("  %-10s%16s%16s%10s   95%% confidence\n", "",
                                    name(before, "before"), name(after, "after"), "ratio");
  for (const Comparison& one : Compare(before, after)) {
    absl::StrAppendFormat(&out, "  %-10s%16.4g%16.4g%10.3f   %.3f to %.3f\n", one.figure,
                          one.before, one.after, one.ratio, one.low, one.high);
  }
  for (const auto& [setting, value] : before.settings) {
    const auto other = after.settings.find(setting);
    if (other == after.settings.end() || other->second == value) continue;
    absl::StrAppendFormat(&out, "  %s differs: %s, %s\n", setting, value, other->second);
  }
  return out;
}

}  // namespace rapt::load
