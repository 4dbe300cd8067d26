#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "attention/half.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/commands.h"
#include "client/cli/figures.h"
#include "client/cli/labels.h"
#include "client/cli/local_memory.h"
#include "client/cli/tensor_file.h"
#include "client/console/json.h"
#include "client/console/text.h"

namespace rapt {
namespace {

constexpr int kMaxFiles = 64;

struct PlotFlags {
  std::string output;
  std::string query_labels, key_labels;
  std::string heads = "all", layers = "all";
  std::optional<std::string> title, query, curves;
  std::string dtype;
  int64_t batch = 0;
  bool gradients = false;
  bool scaling = false;
  std::vector<int64_t> lengths = DoubledLengths();
  bool json = false;
};

// Weights, or a bool mask, from one file: [layers, heads, queries, keys] of one batch row.
struct WeightFile {
  std::string name;
  int64_t layers = 0, heads = 0, queries = 0, keys = 0;
  bool is_mask = false;
  std::vector<double> values;
};

absl::StatusOr<WeightFile> LoadWeights(const std::string& reference, const PlotFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(const NpyArray array, LoadArray(reference, "weights"));
  const bool is_mask = array.type == NpyType{'b', 1};
  RAPT_ASSIGN_OR_RETURN(const DType dtype,
                        is_mask ? DType::kBool : FloatTypeOf(array, reference, flags.dtype));
  Shape shape = array.shape;
  if (shape.size() < 2 || shape.size() > 5) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has shape %s; weights are [queries, keys], [heads, queries, keys], "
                        "[batch, heads, queries, keys] or [layers, batch, heads, queries, keys]",
                        reference, ToString(shape)));
  }
  while (shape.size() < 5) shape.insert(shape.begin(), 1);
  if (array.size() == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has shape %s; it must not be empty", reference, ToString(array.shape)));
  }
  const auto [layers, batch, heads, queries, keys] =
      std::array{shape[0], shape[1], shape[2], shape[3], shape[4]};
  if (flags.batch < 0 || flags.batch >= batch) {
    return absl::InvalidArgumentError(absl::StrFormat("--batch is %d; %s has batch rows 0 to %d",
                                                      flags.batch, reference, batch - 1));
  }
  WeightFile weights{
      reference.substr(reference.rfind('/') + 1), layers, heads, queries, keys, is_mask, {}};
  const int64_t size = heads * queries * keys;
  weights.values.reserve(layers * size);
  const std::byte* elements = array.bytes().data();
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t first = (layer * batch + flags.batch) * size;
    for (int64_t at = first; at < first + size; ++at) {
      weights.values.push_back(is_mask ? static_cast<double>(elements[at] != std::byte{0})
                                       : LoadElement(elements, dtype, at));
    }
  }
  return weights;
}

// Of `what`, heads or layers, those that the flag of this name lists.
absl::StatusOr<std::vector<int64_t>> ParseList(std::string_view what, const std::string& text,
                                               int64_t count, const std::string& file) {
  std::vector<int64_t> chosen;
  if (text == "all") {
    for (int64_t n = 0; n < count; ++n) chosen.push_back(n);
    return chosen;
  }
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t& n = chosen.emplace_back();
    if (!absl::SimpleAtoi(part, &n)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--%s is '%s'; it takes all, or numbers like 0,1,3", what, text));
    }
    if (n < 0 || n >= count) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--%s names %d; %s has %s 0 to %d", what, n, file, what, count - 1));
    }
  }
  return chosen;
}

// Names of files in titles: the members if all are of one archive, else without folders. One file
// needs none.
std::vector<std::string> TitlesOf(const std::vector<std::string>& references) {
  if (references.size() == 1) return {""};
  const auto archive_of = [](const std::string& reference) {
    const size_t end = reference.rfind(".npz:");
    return end == std::string::npos ? std::string() : reference.substr(0, end + 5);
  };
  const std::string archive = archive_of(references.front());
  const bool is_one = !archive.empty() &&
                      std::all_of(references.begin(), references.end(), [&](const auto& reference) {
                        return archive_of(reference) == archive;
                      });
  std::vector<std::string> titles;
  titles.reserve(references.size());
  for (const std::string& reference : references) {
    titles.push_back(reference.substr(is_one ? archive.size() : reference.rfind('/') + 1));
  }
  return titles;
}

// "before, layer 3, head 5", of the parts that are not empty.
std::string JoinParts(std::vector<std::string> parts) {
  std::erase(parts, "");
  return absl::StrJoin(parts, ", ");
}

// Heads of several layers are a table.
absl::Status AddHeads(const WeightFile& file, const PlotFlags& flags, const std::string& name,
                      AttentionFigure* figure) {
  RAPT_ASSIGN_OR_RETURN(const auto layers,
                        ParseList("layers", flags.layers, file.layers, file.name));
  RAPT_ASSIGN_OR_RETURN(const auto heads, ParseList("heads", flags.heads, file.heads, file.name));
  const int64_t size = file.queries * file.keys;
  HeadTable table;
  for (const int64_t head : heads) {
    table.columns.push_back(file.heads > 1 ? absl::StrCat("head ", head) : "");
  }
  for (const int64_t layer : layers) {
    table.rows.push_back(JoinParts({name, file.layers > 1 ? absl::StrCat("layer ", layer) : ""}));
    for (size_t n = 0; n < heads.size(); ++n) {
      const auto first = file.values.begin() + (layer * file.heads + heads[n]) * size;
      figure->heads.push_back(
          {JoinParts({table.rows.back(), table.columns[n]}), {first, first + size}});
    }
  }
  if (layers.size() > 1) figure->table = std::move(table);
  return absl::OkStatus();
}

// The labels of an axis: those of the flag, else the tokens if they are as many, else numbers.
absl::StatusOr<std::vector<std::string>> LabelsOf(std::string_view flag, const std::string& text,
                                                  const std::vector<std::string>& tokens,
                                                  int64_t count) {
  const bool has_tokens = static_cast<int64_t>(tokens.size()) == count;
  if (!text.empty() || !has_tokens) return ParseLabels(flag, text, count);
  std::vector<std::string> labels;
  for (const std::string& token : tokens) labels.push_back(Printable(token));
  return labels;
}

absl::StatusOr<AttentionFigure> LoadFigure(const std::vector<std::string>& references,
                                           const PlotFlags& flags) {
  AttentionFigure figure;
  int64_t queries = 0, keys = 0;
  bool masks = true;
  const std::vector<std::string> titles = TitlesOf(references);
  for (size_t n = 0; n < references.size(); ++n) {
    const std::string& reference = references[n];
    RAPT_ASSIGN_OR_RETURN(const WeightFile file, LoadWeights(reference, flags));
    masks = masks && file.is_mask;
    if (figure.heads.empty()) {
      queries = file.queries;
      keys = file.keys;
    }
    if (file.queries != queries || file.keys != keys) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s is %d x %d, %s is %d x %d; all files must have the same queries and keys",
          references.front(), queries, keys, reference, file.queries, file.keys));
    }
    RAPT_RETURN_IF_ERROR(AddHeads(file, flags, titles[n], &figure));
    if (figure.table && references.size() > 1) {
      return Invalid(
          absl::StrFormat("%s has %d layers; of several files, --layers has to choose one layer",
                          reference, file.layers));
    }
  }
  const char* const title = flags.curves ? "Values by position"
                            : masks      ? "Mask"
                                         : "Attention weights";
  figure.title = flags.title.value_or(title);
  // Tokens that can't be read are no labels.
  const auto tokens = LoadTexts(references.front(), "tokens").value_or(std::vector<std::string>());
  RAPT_ASSIGN_OR_RETURN(std::vector<std::string> query_labels,
                        LabelsOf("--queries", flags.query_labels, tokens, queries));
  RAPT_ASSIGN_OR_RETURN(std::vector<std::string> key_labels,
                        LabelsOf("--keys", flags.key_labels, tokens, keys));
  figure.query_labels = std::move(query_labels);
  figure.key_labels = std::move(key_labels);
  return figure;
}

absl::StatusOr<std::vector<int64_t>> ParseCurves(const std::string& text,
                                                 const std::vector<std::string>& labels) {
  std::vector<int64_t> columns;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    RAPT_ASSIGN_OR_RETURN(const int64_t column, FindLabel("--curves", labels, std::string(part)));
    columns.push_back(column);
  }
  if (columns.size() <= kMaxCurves) return columns;
  return absl::InvalidArgumentError(absl::StrFormat(
      "--curves names %d columns; it takes at most %d", columns.size(), kMaxCurves));
}

absl::StatusOr<AttentionFigure> LoadGradients(const std::vector<std::string>& references,
                                              const PlotFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(AttentionFigure figure,
                        LoadGradientFigure(references, flags.batch, flags.dtype));
  figure.title = flags.title.value_or("Norm of the gradient by position");
  const auto positions =
      static_cast<int64_t>(figure.heads[0].values.size() / figure.key_labels.size());
  RAPT_ASSIGN_OR_RETURN(figure.query_labels,
                        ParseLabels("--queries", flags.query_labels, positions));
  return figure;
}

absl::StatusOr<Picture> Draw(const AttentionFigure& figure, const PlotFlags& flags) {
  if (flags.gradients) {
    std::vector<int64_t> all(figure.key_labels.size());
    std::iota(all.begin(), all.end(), 0);
    return DrawCurves(figure, all, {.columns = "gradients"});
  }
  if (flags.curves) {
    RAPT_ASSIGN_OR_RETURN(const auto columns, ParseCurves(*flags.curves, figure.key_labels));
    CurveTitles titles;  // labels say more
    if (!flags.key_labels.empty()) titles.columns.clear();
    if (!flags.query_labels.empty()) titles.rows.clear();
    return DrawCurves(figure, columns, std::move(titles));
  }
  if (!flags.query) return figure.table ? DrawHeadTable(figure) : DrawHeatMap(figure);
  RAPT_ASSIGN_OR_RETURN(const int64_t query,
                        FindLabel("--query", figure.query_labels, *flags.query));
  return DrawBars(figure, query);
}

absl::Status Write(const Picture& picture, const PlotFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(const Renderer render, RendererFor(flags.output));
  RAPT_ASSIGN_OR_RETURN(const std::string rendered, render(picture));
  return WriteFile(flags.output, rendered);
}

// Of one head of 64; more heads shift the curves and hardly bend them.
absl::Status PlotScaling(const std::vector<std::string>& files, const PlotFlags& flags) {
  if (!files.empty() || flags.query || flags.curves || flags.gradients || flags.heads != "all" ||
      flags.layers != "all" || flags.batch != 0 || !flags.query_labels.empty() ||
      !flags.key_labels.empty() || !flags.dtype.empty()) {
    return Invalid(
        "--scaling draws estimates; it excludes files, --queries, --keys, --heads, --layers, "
        "--batch, --query, --curves, --gradients and --dtype");
  }
  for (const int64_t length : flags.lengths) RAPT_RETURN_IF_ERROR(CheckAtLeastOne("seq", length));
  RAPT_ASSIGN_OR_RETURN(
      const client::MemoryEstimates estimates,
      EstimateMemoryHere({.kv_heads = 1, .lengths = flags.lengths, .value_head_size = 64}));
  const std::string title = flags.title.value_or("Memory of one head of 64 by length, FP32");
  RAPT_RETURN_IF_ERROR(Write(DrawScaling(estimates, title), flags));
  if (!flags.json) return absl::OkStatus();
  JsonWriter json;
  json.BeginObject().Key("output").String(flags.output);
  json.Key("lengths").Integers(flags.lengths).EndObject();
  std::puts(json.Take().c_str());
  return absl::OkStatus();
}

absl::Status Plot(const std::vector<std::string>& files, const PlotFlags& flags) {
  if (files.empty()) {
    return Invalid("no file with weights given; usage: rapt plot WEIGHTS.npy -o PICTURE");
  }
  if (flags.query && flags.curves) {
    return Invalid("--query and --curves are both set; set one of them");
  }
  if (flags.gradients && (flags.query || flags.curves || flags.heads != "all" ||
                          flags.layers != "all" || !flags.key_labels.empty())) {
    return Invalid(
        "--gradients draws norms over all heads; it excludes --query, --curves, --heads, --layers "
        "and --keys");
  }
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  RAPT_RETURN_IF_ERROR(RendererFor(flags.output).status());
  RAPT_ASSIGN_OR_RETURN(const AttentionFigure figure,
                        flags.gradients ? LoadGradients(files, flags) : LoadFigure(files, flags));
  RAPT_ASSIGN_OR_RETURN(const Picture picture, Draw(figure, flags));
  RAPT_RETURN_IF_ERROR(Write(picture, flags));

  if (flags.json) {
    JsonWriter json;
    json.BeginObject().Key("output").String(flags.output);
    json.Key("panels").Integer(figure.heads.size());
    json.Key("queries").Integer(figure.query_labels.size());
    json.Key("keys").Integer(figure.key_labels.size()).EndObject();
    std::puts(json.Take().c_str());
  }
  return absl::OkStatus();
}

}  // namespace

ExitCode RunPlotCommand(CommandArguments arguments) {
  PlotFlags flags;
  const CommandLine line{
      .usage = "rapt plot WEIGHTS.npy... -o PICTURE [flags]",
      .summary =
          "Draws attention weights or scores from files: a heat map per head, or with --query one "
          "query's attention as bars, or with --curves columns as curves over the rows, such as "
          "dimensions of a positional encoding over the positions. WEIGHTS is a .npy file, or a "
          "member of an archive such as w.npz:weights, of shape [queries, keys], [heads, queries, "
          "keys], [batch, heads, queries, keys] or [layers, batch, heads, queries, keys]. Several "
          "layers are a table of small pictures, layers by heads, whose colours grow with the "
          "square root. An archive's tokens, such as those of python -m rapt.capture, are the "
          "labels. Several files are drawn on one scale. With "
          "--gradients, files of gradients are drawn instead, [S, D], [B, S, H*D] or [B, H, S, D] "
          "each: the norm over heads and head size, as curves over the positions. Of an archive, "
          "dq, dk and dv are drawn. With --scaling, no file: the memory of attention against the "
          "length, as rapt memory estimates it on this machine, of the full score matrix, the "
          "fused kernel, LSH and linear attention.",
      .flags =
          {{"output", "FILE",
            "the picture: .svg, .html (shows the value under the pointer) or .png", &flags.output,
            'o', true},
           {"queries", "NAMES", "a label per query: a,b,c, or @file with one per line",
            &flags.query_labels},
           {"keys", "NAMES", "a label per key, in the same form", &flags.key_labels},
           {"heads", "LIST", "heads to draw: all, or 0,1,3 (default: all)", &flags.heads},
           {"layers", "LIST", "layers to draw, in the same form", &flags.layers},
           {"batch", "N", "batch row to draw (default: 0)", &flags.batch},
           {"query", "NAME", "draw bars for this query only, by label or number", &flags.query},
           {"curves", "LIST",
            "draw these columns only, as curves over the rows, by label or number: 0,1,4",
            &flags.curves},
           {"gradients", "", "draw the norms of gradients over the positions", &flags.gradients},
           {"scaling", "", "draw the memory of attention against the length", &flags.scaling},
           Of("--scaling",
              {"seq", "LIST", "lengths (default: 128 to 32768, doubling)", &flags.lengths}),
           {"title", "TEXT",
            "title of the picture (default: Attention weights, Mask, Values by position, Norm of "
            "the gradient by position or Memory of one head of 64 by length, FP32)",
            &flags.title},
           {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &flags.dtype},
           {"json", "", "print a report as JSON", &flags.json}},
      .examples = {"rapt plot w.npy --queries the,cat,sat --keys le,chat,assis -o w.svg",
                   "rapt plot w.npy --heads 0,1,3 -o heads.html", "rapt plot bank.npz -o heads.svg",
                   "rapt plot bank.npz --layers 3 --heads 5 -o head.svg",
                   "rapt plot before.npy after.npy -o compared.png",
                   "rapt plot w.npy --queries the,cat,sat --query cat -o cat.svg",
                   "rapt plot gradients.npz --gradients -o flow.svg",
                   "rapt plot --scaling -o scaling.svg",
                   "rapt plot encoding.npy --curves 0,1,4,5 --title Encoding -o curves.svg"},
      .max_operands = kMaxFiles};
  std::vector<std::string> files;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &files)) return *done;
  const absl::Status plotted = flags.scaling ? PlotScaling(files, flags) : Plot(files, flags);
  return plotted.ok() ? ExitCode::kOk : FailUsage(plotted);
}

}  // namespace rapt
