#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/attend_report.h"
#include "client/console/json.h"
#include "client/console/text.h"

namespace rapt {
namespace {

using client::Diagnosis;
using client::Range;

struct Step {
  const char* name;
  const char* key;  // in JSON
  Range Diagnosis::*range;
};

constexpr Step kSteps[] = {
    {"raw scores", "raw_scores", &Diagnosis::raw_scores},
    {"scaled, softcapped", "scaled_scores", &Diagnosis::scaled_scores},
    {"after the mask", "biased_scores", &Diagnosis::biased_scores},
    {"weights", "weights", &Diagnosis::weights},
    {"row sums", "row_sums", &Diagnosis::row_sums},
    {"output", "output", &Diagnosis::output},
};

// --- Text output ---

std::string Bound(const std::optional<double>& bound) {
  return bound ? absl::StrFormat("%.5g", *bound) : "-";
}

// Prints 0 as a dot, so that other counts stand out.
std::string Count(int64_t count) { return count == 0 ? "." : absl::StrCat(count); }

std::string Columns(const Range& range, const std::string& mean) {
  return absl::StrFormat("%11s %11s %11s %8s %8s %8s", Bound(range.min), Bound(range.max), mean,
                         Count(range.nan_count), Count(range.positive_inf_count),
                         Count(range.negative_inf_count));
}

std::string Share(int64_t count, int64_t all) {
  if (count == 0 || all == 0) return absl::StrCat(count);
  return absl::StrFormat("%d (%.1f%%)", count, 100.0 * count / all);
}

void PrintWarnings(const Diagnosis& diagnosis) {
  if (diagnosis.warnings.empty()) {
    std::printf("\nNo problem found.\n");
    return;
  }
  std::printf("\nLikely causes:\n");
  for (const std::string& warning : diagnosis.warnings) absl::PrintF("  * %s\n", warning);
}

void PrintEstimates(const Diagnosis& diagnosis) {
  if (diagnosis.estimates.empty()) return;
  std::printf("\nEstimates:\n");
  for (const std::string& estimate : diagnosis.estimates) absl::PrintF("  * %s\n", estimate);
}

void PrintNumbers(const Diagnosis& diagnosis) {
  std::vector<std::pair<std::string, std::string>> rows;  // name and columns
  for (const client::TensorReport& input : diagnosis.inputs) {
    rows.emplace_back(
        absl::StrCat(input.name, " ", NameOf(input.dtype), " ", client::ToString(input.shape)),
        Columns(input.range, Bound(input.mean)));
  }
  for (const Step& step : kSteps) {
    rows.emplace_back(step.name, Columns(diagnosis.*step.range, ""));
  }
  size_t width = 0;
  for (const auto& [name, columns] : rows) width = std::max(width, name.size());
  absl::PrintF("\n  %-*s %11s %11s %11s %8s %8s %8s\n", static_cast<int>(width), "", "min", "max",
               "mean", "NaN", "+Inf", "-Inf");
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i == diagnosis.inputs.size()) std::puts("");
    absl::PrintF("  %-*s %s\n", static_cast<int>(width), rows[i].first, rows[i].second);
  }
}

void PrintVisibility(const Diagnosis& diagnosis) {
  absl::PrintF("\n  %d pairs of query and key; hidden by position: %s, by the mask: %s\n",
               diagnosis.pairs, Share(diagnosis.masked_by_position, diagnosis.pairs),
               Share(diagnosis.masked_by_mask, diagnosis.pairs));
  const std::pair<const char*, int64_t> causes[] = {
      {"by the block mask", diagnosis.masked_by_block_mask},
      {"because they are not selected", diagnosis.masked_by_selection}};
  for (const auto& [cause, count] : causes) {
    if (count == 0) continue;
    absl::PrintF("  hidden %s, not by position: %s\n", cause, Share(count, diagnosis.pairs));
  }
  absl::PrintF(
      "  %d query %s is zero\n", diagnosis.empty_rows,
      diagnosis.empty_rows == 1 ? "row sees no key; its output" : "rows see no key; their output");
  for (const client::QueryRow& row : diagnosis.first_empty_rows) {
    absl::PrintF("    batch %d, head %d, query %d\n", row.batch, row.head, row.query);
  }
  const auto shown = static_cast<int64_t>(diagnosis.first_empty_rows.size());
  if (shown < diagnosis.empty_rows) absl::PrintF("    and %d more\n", diagnosis.empty_rows - shown);
}

// The positions with the least and the largest norm, of which at most a few of each are shown.
void PrintFlow(const Diagnosis& diagnosis) {
  constexpr size_t kShown = 3;
  if (diagnosis.gradients.empty()) return;
  absl::PrintF("\n  %-9s %11s %11s  %s\n", "gradient", "norm", "NaN, Inf", "norm by position");
  for (const client::GradientReport& gradient : diagnosis.gradients) {
    const std::vector<double>& norms = gradient.position_norms;
    std::vector<size_t> order(norms.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return norms[a] < norms[b]; });
    std::vector<std::string> shown;
    for (size_t n = 0; n < order.size(); ++n) {
      if (n == kShown && order.size() > 2 * kShown) {
        shown.emplace_back("...");
        n = order.size() - kShown;
      }
      shown.push_back(absl::StrFormat("%d: %.3g", order[n], norms[order[n]]));
    }
    const Range& range = gradient.range;
    absl::PrintF("  %-9s %11.5g %11s  %s\n", gradient.name, gradient.norm,
                 Count(range.nan_count + range.positive_inf_count + range.negative_inf_count),
                 absl::StrJoin(shown, ", "));
  }
}

void PrintBackends(const Diagnosis& diagnosis) {
  std::puts("");
  for (const client::BackendChoice& choice : diagnosis.backends) {
    if (choice.plan.empty()) {
      absl::PrintF("  %-10s can't run this: %s\n", choice.backend, choice.reason);
      continue;
    }
    absl::PrintF("  %-10s %s: %s, %s of workspace\n", choice.backend,
                 choice.chosen ? "runs this" : "could run this", choice.plan,
                 HumanBytes(choice.workspace_bytes));
    if (!choice.chosen) absl::PrintF("  %-10s %s\n", "", choice.reason);
  }
}

// --- JSON output ---

void WriteBound(const char* key, const std::optional<double>& bound, JsonWriter& json) {
  if (bound) json.Key(key).Number(*bound);
}

void WriteRange(const Range& range, JsonWriter& json) {
  WriteBound("min", range.min, json);
  WriteBound("max", range.max, json);
  json.Key("nan_count").Integer(range.nan_count);
  json.Key("positive_inf_count").Integer(range.positive_inf_count);
  json.Key("negative_inf_count").Integer(range.negative_inf_count);
}

void WriteInputs(const Diagnosis& diagnosis, JsonWriter& json) {
  json.Key("inputs").BeginArray();
  for (const client::TensorReport& input : diagnosis.inputs) {
    json.BeginObject().Key("name").String(input.name);
    json.Key("dtype").String(std::string(NameOf(input.dtype)));
    json.Key("shape").Integers(input.shape).Key("elements").Integer(input.elements);
    WriteRange(input.range, json);
    WriteBound("mean", input.mean, json);
    json.EndObject();
  }
  json.EndArray();
}

void WriteEmptyRows(const Diagnosis& diagnosis, JsonWriter& json) {
  json.Key("empty_rows").BeginObject().Key("count").Integer(diagnosis.empty_rows);
  json.Key("first").BeginArray();
  for (const client::QueryRow& row : diagnosis.first_empty_rows) {
    json.BeginObject().Key("batch").Integer(row.batch).Key("head").Integer(row.head);
    json.Key("query").Integer(row.query).EndObject();
  }
  json.EndArray().EndObject();
}

void WriteGradients(const Diagnosis& diagnosis, JsonWriter& json) {
  json.Key("gradients").BeginArray();
  for (const client::GradientReport& gradient : diagnosis.gradients) {
    json.BeginObject().Key("name").String(gradient.name);
    WriteRange(gradient.range, json);
    json.Key("norm").Number(gradient.norm).Key("position_norms").BeginArray();
    for (const double norm : gradient.position_norms) json.Number(norm);
    json.EndArray().EndObject();
  }
  json.EndArray();
}

void WriteBackends(const Diagnosis& diagnosis, JsonWriter& json) {
  json.Key("backends").BeginArray();
  for (const client::BackendChoice& choice : diagnosis.backends) {
    json.BeginObject().Key("backend").String(choice.backend).Key("chosen").Boolean(choice.chosen);
    json.Key("plan").String(choice.plan);
    json.Key("workspace_bytes").Integer(choice.workspace_bytes);
    json.Key("reason").String(choice.reason).EndObject();
  }
  json.EndArray();
}

void Print(const Diagnosis& diagnosis) {
  absl::PrintF("%s\n", diagnosis.problem);
  PrintWarnings(diagnosis);
  PrintEstimates(diagnosis);
  PrintNumbers(diagnosis);
  PrintVisibility(diagnosis);
  PrintFlow(diagnosis);
  PrintBackends(diagnosis);
}

void PrintJson(const Diagnosis& diagnosis) {
  JsonWriter json;
  json.BeginObject().Key("problem").String(diagnosis.problem);
  json.Key("warnings").Strings(diagnosis.warnings);
  json.Key("estimates").Strings(diagnosis.estimates);
  if (diagnosis.favor_squared_norm) {
    json.Key("favor_squared_norm").Number(*diagnosis.favor_squared_norm);
  }
  if (diagnosis.lsh_reachable_weight) {
    json.Key("lsh_reachable_weight").Number(*diagnosis.lsh_reachable_weight);
  }
  WriteInputs(diagnosis, json);
  for (const Step& step : kSteps) {
    json.Key(step.key).BeginObject();
    WriteRange(diagnosis.*step.range, json);
    json.EndObject();
  }
  json.Key("pairs").Integer(diagnosis.pairs);
  json.Key("masked_by_mask").Integer(diagnosis.masked_by_mask);
  json.Key("masked_by_position").Integer(diagnosis.masked_by_position);
  json.Key("masked_by_block_mask").Integer(diagnosis.masked_by_block_mask);
  json.Key("masked_by_selection").Integer(diagnosis.masked_by_selection);
  WriteEmptyRows(diagnosis, json);
  if (!diagnosis.gradients.empty()) WriteGradients(diagnosis, json);
  WriteBackends(diagnosis, json);
  std::puts(json.EndObject().Take().c_str());
}

}  // namespace

void PrintDiagnosis(const Diagnosis& diagnosis, bool json) {
  (json ? PrintJson : Print)(diagnosis);
}

}  // namespace rapt
