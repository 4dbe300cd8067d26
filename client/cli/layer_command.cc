// rapt layer: what a folder of a model repository contains.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "attention/layer/files/layer_files.h"
#include "attention/layer/files/layer_settings.h"
#include "attention/layer/files/model_types.h"
#include "base/utf8.h"
#include "client/cli/commands.h"
#include "client/console/command_line.h"
#include "client/console/json.h"
#include "client/console/text.h"

namespace rapt {
namespace {

struct Row {
  std::string name;
  const SavedTensor* tensor;
  bool is_used;

  int64_t count() const {
    return std::accumulate(tensor->shape.begin(), tensor->shape.end(), int64_t{1},
                           std::multiplies<>());
  }
};

// The tensors under the layer's prefix, by name.
std::vector<Row> RowsOf(const LayerFiles& layer) {
  std::vector<Row> rows;
  for (const auto& [name, tensor] : layer.file.tensors()) {
    if (absl::StartsWith(name, layer.prefix)) {
      rows.push_back({name, &tensor, layer.tensors.contains(name)});
    }
  }
  return rows;
}

int64_t ParametersOf(const std::vector<Row>& rows) {
  int64_t parameters = 0;
  for (const Row& row : rows) parameters += row.is_used ? row.count() : 0;
  return parameters;
}

std::string RotaryText(const LayerConfig& config) {
  if (!config.rope_theta) return ", no rotary embedding";
  std::string text = absl::StrCat(", rope_theta ", *config.rope_theta);
  if (config.rope_scaling) {
    absl::StrAppend(&text, " scaled by ", config.rope_scaling->factor, " (",
                    NameOf(config.rope_scaling->type), ")");
  }
  if (config.rotary_embedding_dim != 0) {
    absl::StrAppend(&text, " of the first ", config.rotary_embedding_dim, " numbers of a head");
  }
  if (config.interleaved) absl::StrAppend(&text, " of neighbours");
  return text;
}

std::string Summary(const LayerConfig& config) {
  std::string text =
      absl::StrFormat("%d head%s", config.query_heads, config.query_heads == 1 ? "" : "s");
  const int64_t kv_heads = config.kv_heads.value_or(config.query_heads);
  if (kv_heads != config.query_heads) {
    absl::StrAppendFormat(&text, ", %d of keys and values", kv_heads);
  }
  absl::StrAppend(&text, config.is_causal ? ", causal" : ", bidirectional");
  if (config.score_function == ScoreFunction::kAdditive) absl::StrAppend(&text, ", additive");
  if (config.scale) absl::StrAppend(&text, ", scale ", *config.scale);
  absl::StrAppend(&text, RotaryText(config));
  if (config.sliding_window) absl::StrAppend(&text, ", window of ", *config.sliding_window);
  if (config.positional_base) {
    absl::StrAppend(&text, ", sinusoidal encoding of base ", *config.positional_base);
  }
  if (config.pad_token_id) absl::StrAppend(&text, ", pad token ", *config.pad_token_id);
  return text;
}

void PrintTable(const std::vector<Row>& rows) {
  size_t width = sizeof("tensor") - 1;
  for (const Row& row : rows) width = std::max(width, Printable(row.name).size());
  const auto w = static_cast<int>(width);
  absl::PrintF("%-*s  %-4s  %14s  %12s\n", w, "tensor", "type", "shape", "parameters");
  for (const Row& row : rows) {
    absl::PrintF("%-*s  %-4s  %14s  %12d%s\n", w, Printable(row.name), Printable(row.tensor->type),
                 ToString(row.tensor->shape), row.count(), row.is_used ? "" : "  not used");
  }
  absl::PrintF("%-*s  %-4s  %14s  %12d\n", w, "total", "", "", ParametersOf(rows));
}

// "vocab_size, hidden_act and 3 more". A file may have any number of names, and long ones.
std::string NamesText(absl::Span<const std::string> names) {
  constexpr size_t kMaxNames = 32, kMaxNameBytes = 64;
  const absl::Span<const std::string> shown = names.subspan(0, kMaxNames);
  const size_t more = names.size() - shown.size();
  const auto append = [](std::string* out, const std::string& name) {
    absl::StrAppend(out, Printable(Utf8Prefix(name, kMaxNameBytes)));
  };
  return absl::StrCat(absl::StrJoin(shown, ", ", append),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

void Print(const LayerFiles& layer, int64_t packed_bytes, bool by_tensor) {
  const std::vector<Row> rows = RowsOf(layer);
  absl::PrintF("naming %s, embed size %d, %s\n", layer.naming, layer.config.embed_size,
               Summary(layer.config));
  absl::PrintF("%d parameters, packed for the projections: %s\n", ParametersOf(rows),
               HumanBytes(packed_bytes));
  if (!layer.unread.empty()) {
    absl::PrintF("settings that are not read: %s\n", NamesText(layer.unread));
  }
  if (!by_tensor) return;
  std::puts("");
  PrintTable(rows);
}

std::string Json(const LayerFiles& layer, int64_t packed_bytes) {
  const std::vector<Row> rows = RowsOf(layer);
  JsonWriter json;
  json.BeginObject().Key("naming").String(layer.naming);
  json.Key("embed_size").Integer(layer.config.embed_size);
  json.Key("heads").Integer(layer.config.query_heads);
  json.Key("causal").Boolean(layer.config.is_causal);
  json.Key("rotary").Boolean(layer.config.rope_theta.has_value());
  json.Key("unread_settings").Strings(layer.unread);
  json.Key("parameters").Integer(ParametersOf(rows));
  json.Key("packed_bytes").Integer(packed_bytes);
  json.Key("tensors").BeginArray();
  for (const Row& row : rows) {
    json.BeginObject().Key("name").String(row.name).Key("type").String(row.tensor->type);
    json.Key("shape").Integers(row.tensor->shape);
    json.Key("parameters").Integer(row.count()).Key("used").Boolean(row.is_used).EndObject();
  }
  return json.EndArray().EndObject().Take();
}

// A line for each layer of a folder whose config.json has the prefix of none.
void PrintLayers(const LayerFolder& folder, const std::vector<FoundLayer>& layers) {
  for (const FoundLayer& found : layers) {
    const absl::StatusOr<LayerFiles> layer =
        ReadLayerFiles(folder.config, *folder.file, found.prefix);
    const std::string text = layer.ok() ? absl::StrCat("embed size ", layer->config.embed_size,
                                                       ", ", Summary(layer->config))
                                        : std::string(layer.status().message());
    absl::PrintF("%s: naming %s, %s\n", Printable(found.prefix), found.naming, Printable(text));
  }
}

// Whether the folder has layers, but none under the prefix that config.json gives.
bool HasLayersElsewhere(const LayerFolder& folder, const std::vector<FoundLayer>& layers) {
  const absl::StatusOr<LayerChoice> choice = ParseLayerChoice(folder.config);
  return choice.ok() && !layers.empty() &&
         std::none_of(layers.begin(), layers.end(),
                      [&](const FoundLayer& layer) { return layer.prefix == choice->prefix; });
}

}  // namespace

ExitCode RunLayerCommand(CommandArguments arguments) {
  bool by_tensor = false, as_json = false;
  std::optional<std::string> prefix;
  const std::string summary = absl::StrCat(
      "Checks the layer in a folder with config.json and model.safetensors, or its shards, as a "
      "server with --model_repository does, and prints its heads, the number of its parameters and "
      "the settings that are not read. By naming, these model_types are computed. ",
      ModelTypesText(), ".");
  const CommandLine line{
      .usage = "rapt layer FOLDER [flags]",
      .summary = summary,
      .flags = {{"describe", "",
                 "print the parameters by tensor, too; of a whole model without rapt.prefix the "
                 "layers that it has",
                 &by_tensor},
                {"prefix", "PREFIX", "of the layer's tensors, in place of rapt.prefix", &prefix},
                {"json", "", "print all of it as JSON", &as_json}},
      .examples = {"rapt layer models/torch_block", "rapt layer models/torch_block --describe",
                   "rapt layer models/llama_block --prefix model.layers.0.self_attn."},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (operands.empty()) return Fail(ExitCode::kUsage, "no folder given");
  RAPT_ASSIGN_OR_EXIT(const LayerFolder folder, FailUsage, OpenLayerFolder(operands.front()));
  const std::vector<FoundLayer> layers = FindLayers(folder.config, *folder.file);
  if (by_tensor && !as_json && !prefix && HasLayersElsewhere(folder, layers)) {
    PrintLayers(folder, layers);
    return ExitCode::kOk;
  }
  RAPT_ASSIGN_OR_EXIT(const LayerFiles layer, FailUsage,
                      ReadLayerFiles(folder.config, *folder.file, prefix));
  RAPT_ASSIGN_OR_EXIT(const int64_t bytes, FailUsage, LayerBytes(layer.config, layer.weights));
  if (as_json) {
    absl::PrintF("%s\n", Json(layer, bytes));
  } else {
    Print(layer, bytes, by_tensor);
  }
  return ExitCode::kOk;
}

}  // namespace rapt
