#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "attention/attributes.h"
#include "attention/half.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/attend_files.h"
#include "client/cli/attention_caller.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/figures.h"
#include "client/cli/labels.h"
#include "client/cli/picture.h"
#include "client/cli/tensor_file.h"
#include "client/cli/terminal_heat_map.h"
#include "client/console/json.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

// Larger matrices do not fit a terminal.
constexpr int64_t kMostTerminalKeys = 12;

struct CompareFlags {
  CallFlags call;
  std::string without;
  std::optional<std::string> picture;
  std::string query_labels, key_labels;
  int64_t batch = 0, head = 0;
  bool json = false;
};

// What --without may name.
struct Part {
  std::string name;
  bool by_default;                          // also removed if --without is absent
  std::function<bool(LoadedCall&)> remove;  // returns false if the call does not have it
};

template <typename Value>
bool Reset(Value& value) {
  return std::exchange(value, Value()) != Value();
}

bool DescribesShapes(Attribute attribute) {
  return attribute == Attribute::kQueryHeads || attribute == Attribute::kKvHeads ||
         attribute == Attribute::kValueHeadSize;
}

bool DescribesScores(Attribute attribute) {
  return attribute == Attribute::kScale || attribute == Attribute::kScoreFunction;
}

std::vector<Part> Parts() {
  std::vector<Part> parts;
  for (Role role : kInputTensors) {
    if (InfoOf(role).has_layout || role == Role::kPastKey || role == Role::kPastValue) continue;
    parts.push_back({FlagNameOf(role), role != Role::kAdditiveWeight, [role](LoadedCall& call) {
                       const bool given = call.tensors[role].has_value();
                       call.tensors[role].reset();
                       return given;
                     }});
  }
  parts.push_back({"key-lengths", true, [](LoadedCall& call) { return Reset(call.key_lengths); }});
  parts.push_back({"window", true, [](LoadedCall& call) {
                     const bool left = Reset(call.attributes.window.left);
                     return Reset(call.attributes.window.right) || left;
                   }});
  parts.push_back({"dropout", true, [](LoadedCall& call) {
                     const bool given = call.attributes.dropout.has_value();
                     call.attributes.dropout.reset();
                     return given;
                   }});
  for (const AttributeInfo& info : Attributes()) {
    if (info.flag == nullptr || DescribesShapes(info.attribute)) continue;
    parts.push_back(
        {info.flag, !DescribesScores(info.attribute), [&info](LoadedCall& call) {
           return client::FindCallAttribute(info.native)->Visit(call.attributes, [](auto& value) {
             return Reset(value);
           });
         }});
  }
  return parts;
}

// Removes what --without names from the call. Returns the names of what was removed.
absl::StatusOr<std::string> Remove(const std::string& without, LoadedCall& call) {
  const std::vector<Part> parts = Parts();
  if (without.empty()) {
    std::vector<std::string> removed;
    for (const Part& part : parts) {
      if (part.by_default && part.remove(call)) removed.push_back(part.name);
    }
    if (!removed.empty()) return absl::StrJoin(removed, ", ");
    return Invalid("the call has no flag to compare it without; give one, such as --causal");
  }
  for (absl::string_view name : absl::StrSplit(without, ',')) {
    const auto part =
        std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.name == name; });
    if (part == parts.end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--without names '%s'; it takes any of %s", name,
          absl::StrJoin(parts, ", ", [](std::string* out, const Part& p) { *out += p.name; })));
    }
    if (!part->remove(call)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--without names '%s', which the call does not have", name));
    }
  }
  return absl::StrReplaceAll(without, {{",", ", "}});
}

// The weights of one call, [B, Hq, Sq, T].
struct Weights {
  Shape shape;
  std::vector<double> values;
  std::string plan;

  int64_t keys() const { return shape[3]; }
  // Those of one head, [Sq, T].
  absl::Span<const double> Head(int64_t batch, int64_t head) const {
    const int64_t size = shape[2] * shape[3];
    return absl::MakeConstSpan(values).subspan((batch * shape[1] + head) * size, size);
  }
};

absl::StatusOr<Weights> Compute(AttentionCaller& caller, LoadedCall call) {
  call.attributes.score_output = client::ScoreOutput::kWeights;
  RAPT_ASSIGN_OR_RETURN(const client::AttendResult result, caller.Attend(call.call()));
  const client::Tensor& tensor = *result.scores;
  const DType dtype = tensor.dtype();
  Weights weights{tensor.shape(), {}, result.plan};
  const int64_t count = static_cast<int64_t>(tensor.bytes().size()) / SizeOf(dtype);
  for (int64_t n = 0; n < count; ++n) {
    weights.values.push_back(LoadElement(tensor.bytes().data(), dtype, n));
  }
  return weights;
}

// Means over the rows of a call that see a key.
struct Summary {
  int64_t rows = 0;
  double sum = 0;             // less than 1: a sink takes the rest
  double largest = 0;         // weight
  double effective_keys = 0;  // the exponential of the entropy
  double zeros = 0;           // share of the keys
};

Summary Summarize(const Weights& weights) {
  Summary total;
  const auto keys = static_cast<double>(weights.keys());
  for (auto row = weights.values.begin(); row != weights.values.end(); row += weights.keys()) {
    double sum = 0, largest = 0, entropy = 0;
    int64_t zeros = 0;
    for (auto weight = row; weight != row + weights.keys(); ++weight) {
      sum += *weight;
      largest = std::max(largest, *weight);
      zeros += *weight == 0 ? 1 : 0;
    }
    if (sum == 0) continue;
    for (auto weight = row; weight != row + weights.keys(); ++weight) {
      if (*weight > 0) entropy -= *weight / sum * std::log(*weight / sum);
    }
    ++total.rows;
    total.sum += sum;
    total.largest += largest;
    total.effective_keys += std::exp(entropy);
    total.zeros += static_cast<double>(zeros) / keys;
  }
  if (total.rows == 0) return total;
  for (double* mean : {&total.sum, &total.largest, &total.effective_keys, &total.zeros}) {
    *mean /= static_cast<double>(total.rows);
  }
  return total;
}

// The weight that differs most.
struct Change {
  double before = 0, after = 0;
  Shape at = {0, 0, 0, 0};
};

Change LargestChange(const Weights& before, const Weights& after) {
  size_t most = 0;
  const auto difference = [&](size_t n) { return std::abs(after.values[n] - before.values[n]); };
  for (size_t n = 1; n < before.values.size(); ++n) {
    if (difference(n) > difference(most)) most = n;
  }
  Change change;
  if (before.values.empty()) return change;
  change.before = before.values[most];
  change.after = after.values[most];
  auto rest = static_cast<int64_t>(most);
  for (size_t axis = 4; axis-- > 0;) {
    change.at[axis] = rest % before.shape[axis];
    rest /= before.shape[axis];
  }
  return change;
}

struct Comparison {
  std::string without;  // the flags that `before` lacks
  Weights before, after;
  Summary summary_before, summary_after;
  Change change;
  std::vector<std::string> query_labels, key_labels;
};

absl::Status CheckIndex(const char* flag, int64_t value, int64_t count) {
  if (value >= 0 && value < count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s is %d; the weights have %d, from 0", flag, value, count));
}

absl::StatusOr<Comparison> Compare(const CompareFlags& flags, std::string without, Weights before,
                                   Weights after) {
  Comparison result{std::move(without), std::move(before), std::move(after), {}, {}, {}, {}, {}};
  RAPT_RETURN_IF_ERROR(CheckIndex("batch", flags.batch, result.after.shape[0]));
  RAPT_RETURN_IF_ERROR(CheckIndex("head", flags.head, result.after.shape[1]));
  RAPT_ASSIGN_OR_RETURN(auto queries,
                        ParseLabels("--queries", flags.query_labels, result.after.shape[2]));
  RAPT_ASSIGN_OR_RETURN(auto keys, ParseLabels("--keys", flags.key_labels, result.after.shape[3]));
  result.query_labels = std::move(queries);
  result.key_labels = std::move(keys);
  result.summary_before = Summarize(result.before);
  result.summary_after = Summarize(result.after);
  result.change = LargestChange(result.before, result.after);
  return result;
}

// ---- Output -------------------------------------------------------------------------------------

std::string HeadText(const CompareFlags& flags) {
  return absl::StrFormat("head %d, batch row %d", flags.head, flags.batch);
}

absl::Status WritePicture(const CompareFlags& flags, const Comparison& comparison,
                          Renderer render) {
  AttentionFigure figure{absl::StrCat("Attention weights of ", HeadText(flags)),
                         comparison.query_labels,
                         comparison.key_labels,
                         {}};
  for (const auto& [title, weights] :
       {std::pair{"without ", &comparison.before}, {"with ", &comparison.after}}) {
    const absl::Span<const double> head = weights->Head(flags.batch, flags.head);
    figure.heads.push_back({title + comparison.without, {head.begin(), head.end()}});
  }
  RAPT_ASSIGN_OR_RETURN(const std::string rendered, render(DrawHeatMap(figure)));
  return WriteFile(*flags.picture, rendered);
}

void PrintHeatMaps(const CompareFlags& flags, const Comparison& comparison) {
  const int64_t keys = comparison.after.keys();
  if (comparison.after.shape[2] != keys || keys > kMostTerminalKeys) return;
  const Terminal terminal = Terminal::OfStdout();
  const auto draw = [&](std::string_view title, const Weights& weights) {
    return DrawTerminalHeatMap(title, comparison.key_labels, weights.Head(flags.batch, flags.head),
                               terminal.has_colour);
  };
  absl::PrintF("%s, without and with %s\n\n%s\n", HeadText(flags), comparison.without,
               Arrange(draw("without", comparison.before), draw("with", comparison.after),
                       terminal.columns));
}

void Print(const CompareFlags& flags, const Comparison& comparison) {
  PrintHeatMaps(flags, comparison);
  const Summary& before = comparison.summary_before;
  const Summary& after = comparison.summary_after;
  absl::PrintF("without and with %s, all heads:\n\n", comparison.without);
  absl::PrintF("%-36s %9s %9s\n", "mean of the rows that see a key", "without", "with");
  const auto line = [](const char* name, double left, double right) {
    absl::PrintF("%-36s %9.4g %9.4g\n", name, left, right);
  };
  line("largest weight", before.largest, after.largest);
  line("effective number of keys", before.effective_keys, after.effective_keys);
  line("share of keys with weight 0", before.zeros, after.zeros);
  line("sum of the weights", before.sum, after.sum);
  const Change& change = comparison.change;
  absl::PrintF("\nlargest change: %.4f to %.4f, query '%s', key '%s' of head %d, batch row %d\n",
               change.before, change.after, comparison.query_labels[change.at[2]],
               comparison.key_labels[change.at[3]], change.at[1], change.at[0]);
}

void WriteJson(const Summary& summary, const Weights& weights, JsonWriter& json) {
  json.BeginObject().Key("rows").Integer(summary.rows).Key("sum").Number(summary.sum);
  json.Key("largest").Number(summary.largest);
  json.Key("effective_keys").Number(summary.effective_keys);
  json.Key("zeros").Number(summary.zeros).Key("plan").String(weights.plan).EndObject();
}

void PrintJson(const CompareFlags&, const Comparison& comparison) {
  JsonWriter json;
  json.BeginObject().Key("flags").String(comparison.without).Key("without");
  WriteJson(comparison.summary_before, comparison.before, json);
  json.Key("with");
  WriteJson(comparison.summary_after, comparison.after, json);
  const Change& change = comparison.change;
  json.Key("largest_change").BeginObject().Key("at").Integers(change.at);
  json.Key("without").Number(change.before).Key("with").Number(change.after).EndObject();
  json.EndObject();
  std::puts(json.Take().c_str());
}

ExitCode Run(const CompareFlags& flags) {
  absl::StatusOr<Renderer> render = static_cast<Renderer>(nullptr);
  if (flags.picture) render = RendererFor(*flags.picture);
  if (!render.ok()) return FailUsage(render.status());
  RAPT_ASSIGN_OR_EXIT(const LoadedCall call, FailUsage, LoadCall(flags.call));
  LoadedCall without = call;
  RAPT_ASSIGN_OR_EXIT(const std::string removed, FailUsage, Remove(flags.without, without));
  RAPT_ASSIGN_OR_EXIT(const std::unique_ptr<AttentionCaller> caller, FailConnect,
                      NewCaller(flags.call));
  RAPT_ASSIGN_OR_EXIT(Weights before, FailCall, Compute(*caller, std::move(without)));
  RAPT_ASSIGN_OR_EXIT(Weights after, FailCall, Compute(*caller, call));
  if (after.values.empty()) {
    return FailUsage(Invalid("the call has no weights: an axis is 0"));
  }

  RAPT_ASSIGN_OR_EXIT(const Comparison comparison, FailUsage,
                      Compare(flags, removed, std::move(before), std::move(after)));
  if (flags.picture) {
    absl::Status written = WritePicture(flags, comparison, *render);
    if (!written.ok()) return FailUsage(written);
  }
  (flags.json ? PrintJson : Print)(flags, comparison);
  return ExitCode::kOk;
}

std::vector<Flag> Table(CompareFlags& flags) {
  return Joined(
      {flags.call.InputTable(),
       flags.call.AttributeTable(),
       flags.call.CallerTable(),
       {{"without", "LIST",
         "flags that one side lacks: causal,head-sink (default: all but those of the scores and "
         "shapes)",
         &flags.without},
        {"output", "FILE", "a picture of one head: .svg, .html or .png", &flags.picture, 'o'},
        {"queries", "NAMES", "a label per query: a,b,c, or @file with one per line",
         &flags.query_labels},
        {"keys", "NAMES", "a label per key, in the same form", &flags.key_labels},
        {"batch", "N", "batch row to draw (default: 0)", &flags.batch},
        {"head", "N", "head to draw (default: 0)", &flags.head},
        {"json", "", "print a report as JSON", &flags.json}}});
}

}  // namespace

ExitCode RunCompareCommand(CommandArguments arguments) {
  CompareFlags flags;
  const CommandLine line{
      .usage = "rapt compare [ARCHIVE.npz] [--q FILE ...] [flags]",
      .summary =
          "Computes a call with and without some of its flags and shows what they change: the "
          "weights of one head side by side, and how concentrated the weights of all heads are. "
          "Inputs and flags are those of rapt attend.",
      .flags = Table(flags),
      .examples = {"rapt compare --q x.npy --causal --local",
                   "rapt compare --q x.npy --causal --head-sink sink.npy --without head-sink",
                   "rapt compare --q x.npy --pad-ids ids.npy --pad-token 0 -o padding.svg",
                   "rapt compare --q x.npy --window 2,0 -o window.html"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (!operands.empty()) flags.call.sources.archive = operands.front();
  return Run(flags);
}

}  // namespace rapt
