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
#include "attention/layer/files/layer_files.h"
#include "client/cli/commands.h"
#include "client/console/bytes.h"
#include "client/console/command_line.h"
#include "client/console/json.h"

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

std::string Summary(const LayerConfig& config) {
  std::string text =
      absl::StrFormat("%d head%s", config.query_heads, config.query_heads == 1 ? "" : "s");
  const int64_t kv_heads = config.kv_heads.value_or(config.query_heads);
  if (kv_heads != config.query_heads) {
    absl::StrAppendFormat(&text, ", %d of keys and values", kv_heads);
  }
  if (config.is_causal) absl::StrAppend(&text, ", causal");
  if (config.score_function == ScoreFunction::kAdditive) absl::StrAppend(&text, ", additive");
  if (config.scale) absl::StrAppend(&text, ", scale ", *config.scale);
  if (config.rope_theta) absl::StrAppend(&text, ", rope_theta ", *config.rope_theta);
  if (config.rope_scaling) {
    absl::StrAppend(&text, " scaled by ", config.rope_scaling->factor, " (",
                    NameOf(config.rope_scaling->type), ")");
  }
  if (config.sliding_window) absl::StrAppend(&text, ", window of ", *config.sliding_window);
  if (config.positional_base) {
    absl::StrAppend(&text, ", sinusoidal encoding of base ", *config.positional_base);
  }
  if (config.pad_token_id) absl::StrAppend(&text, ", pad token ", *config.pad_token_id);
  return text;
}

void PrintTable(const std::vector<Row>& rows) {
  size_t width = sizeof("tensor") - 1;
  for (const Row& row : rows) width = std::max(width, row.name.size());
  const auto w = static_cast<int>(width);
  absl::PrintF("%-*s  %-4s  %14s  %12s\n", w, "tensor", "type", "shape", "parameters");
  for (const Row& row : rows) {
    absl::PrintF("%-*s  %-4s  %14s  %12d%s\n", w, row.name, row.tensor->type,
                 ToString(row.tensor->shape), row.count(), row.is_used ? "" : "  not used");
  }
  absl::PrintF("%-*s  %-4s  %14s  %12d\n", w, "total", "", "", ParametersOf(rows));
}

void Print(const LayerFiles& layer, int64_t packed_bytes, bool by_tensor) {
  const std::vector<Row> rows = RowsOf(layer);
  absl::PrintF("naming %s, embed size %d, %s\n", layer.naming, layer.config.embed_size,
               Summary(layer.config));
  absl::PrintF("%d parameters, packed for the projections: %s\n", ParametersOf(rows),
               HumanBytes(packed_bytes));
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

}  // namespace

ExitCode RunLayerCommand(CommandArguments arguments) {
  bool by_tensor = false, as_json = false;
  const CommandLine line{
      .usage = "rapt layer FOLDER [flags]",
      .summary =
          "Checks the layer in a folder with config.json and model.safetensors, as a server with "
          "--model_repository does, and prints its heads and the number of its parameters.",
      .flags = {{"describe", "", "print the parameters by tensor, too", &by_tensor},
                {"json", "", "print all of it as JSON", &as_json}},
      .examples = {"rapt layer models/torch_block", "rapt layer models/torch_block --describe"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (operands.empty()) return Fail(ExitCode::kUsage, "no folder given");
  const absl::StatusOr<LayerFiles> layer = ReadLayerFiles(operands.front());
  if (!layer.ok()) return FailUsage(layer.status());
  const absl::StatusOr<int64_t> bytes = LayerBytes(layer->config, layer->weights);
  if (!bytes.ok()) return FailUsage(bytes.status());
  if (as_json) {
    absl::PrintF("%s\n", Json(*layer, *bytes));
  } else {
    Print(*layer, *bytes, by_tensor);
  }
  return ExitCode::kOk;
}

}  // namespace rapt
