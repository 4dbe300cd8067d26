#include "attention/layer/files/layer_files.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "attention/layer/files/layer_settings.h"
#include "base/invalid.h"
#include "base/mapped_file.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Gives the tensors under a prefix to the weights that refer to them; keeps the first error.
class TensorReader {
 public:
  TensorReader(const Safetensors& file, std::string prefix)
      : file_(file), prefix_(std::move(prefix)) {}

  bool Has(absl::string_view name) const { return file_.Find(NameOf(name)) != nullptr; }

  std::optional<WeightTensor> Find(absl::string_view name) { return FindWhole(NameOf(name)); }

  // Finds a tensor by its whole name, which may lie outside of the prefix.
  std::optional<WeightTensor> FindWhole(const std::string& name) {
    const SavedTensor* const tensor = file_.Find(name);
    if (tensor == nullptr) return std::nullopt;
    if (!tensor->dtype) {
      status_.Update(Invalid("tensor ", name, " has type ", tensor->type,
                             "; it must be F32, F16, BF16 or F64"));
      return std::nullopt;
    }
    used_.insert(name);
    return WeightTensor{.name = name,
                        .dtype = *tensor->dtype,
                        .shape = tensor->shape,
                        .data = tensor->bytes.data()};
  }

  // A tensor without a value is an error.
  std::optional<WeightTensor> Take(absl::string_view name) {
    std::optional<WeightTensor> tensor = Find(name);
    if (!tensor) status_.Update(Invalid("tensor ", NameOf(name), " is missing"));
    return tensor;
  }

  // A matrix, which must be `rows` times as high as wide, or the other way round if transposed.
  std::optional<WeightTensor> TakeFused(absl::string_view name, int64_t rows, bool transposed) {
    std::optional<WeightTensor> tensor = Take(name);
    if (!tensor) return tensor;
    const Shape& shape = tensor->shape;
    const size_t high = transposed ? 1 : 0;
    if (shape.size() == 2 && shape[high] / rows == shape[1 - high] && shape[high] % rows == 0) {
      return tensor;
    }
    status_.Update(Invalid(
        "tensor ", tensor->name, " has shape ", ToString(shape), "; it must be ",
        transposed ? absl::StrCat("[E, ", rows, " E]") : absl::StrCat("[", rows, " E, E]")));
    return std::nullopt;
  }

  // NAME.weight, which must exist, and NAME.bias.
  LinearWeights TakeLinear(absl::string_view name, bool transposed = false) {
    return {.matrix = Take(absl::StrCat(name, ".weight")),
            .transposed = transposed,
            .bias = Find(absl::StrCat(name, ".bias"))};
  }

  // NAME or NAME.weight, with NAME.bias.
  LinearWeights FindPlain(const std::string& name) {
    const std::string longer = absl::StrCat(name, ".weight");
    if (Has(name) && Has(longer)) {
      status_.Update(Invalid("tensors ", NameOf(name), " and ", NameOf(longer),
                             " both exist; one of them must"));
    }
    return {.matrix = Has(name) ? Find(name) : Find(longer),
            .bias = Find(absl::StrCat(name, ".bias"))};
  }
  LinearWeights TakePlain(const std::string& name) {
    LinearWeights linear = FindPlain(name);
    if (!linear.matrix) status_.Update(Invalid("tensor ", NameOf(name), " is missing"));
    return linear;
  }

  // Permits a tensor that is not used.
  void Ignore(absl::string_view name) { ignored_.insert(NameOf(name)); }

  // Rejects tensors under the prefix that were not found, other than `harmless`.
  void RejectOthers(absl::string_view naming, absl::Span<const absl::string_view> harmless) {
    const auto& tensors = file_.tensors();
    for (auto it = tensors.lower_bound(prefix_);
         it != tensors.end() && absl::StartsWith(it->first, prefix_); ++it) {
      const absl::string_view name = absl::string_view(it->first).substr(prefix_.size());
      if (used_.count(it->first) > 0 || ignored_.count(it->first) > 0 ||
          std::find(harmless.begin(), harmless.end(), name) != harmless.end()) {
        continue;
      }
      status_.Update(Invalid("tensor ", it->first, " is none of the naming ", naming,
                             "; a layer does not compute what it is for"));
    }
  }

  void Update(const absl::Status& status) { status_.Update(status); }
  const absl::Status& status() const { return status_; }
  std::string NameOf(absl::string_view name) const { return absl::StrCat(prefix_, name); }
  std::set<std::string> TakeUsed() { return std::move(used_); }

 private:
  const Safetensors& file_;
  const std::string prefix_;
  std::set<std::string> used_, ignored_;
  absl::Status status_;
};

// Rows [begin, end) of a matrix or vector. REQUIRES: it has them.
WeightTensor Rows(WeightTensor tensor, int64_t begin, int64_t end) {
  const int64_t row = tensor.shape.size() < 2 ? 1 : tensor.shape[1];
  tensor.data += begin * row * SizeOf(tensor.dtype);
  tensor.shape[0] = end - begin;
  return tensor;
}

// Columns [begin, end) of a matrix. REQUIRES: it has them.
WeightTensor Columns(WeightTensor tensor, int64_t begin, int64_t end) {
  tensor.data += begin * SizeOf(tensor.dtype);
  tensor.row_stride = tensor.shape[1];
  tensor.shape[1] = end - begin;
  return tensor;
}

LinearWeights& LinearOf(LayerWeights& weights, int n) {
  return n == 0 ? weights.q : n == 1 ? weights.k : weights.v;
}

// Divides a bias of three vectors.
void CutBias(const std::optional<WeightTensor>& bias, TensorReader& reader, LayerWeights& weights) {
  if (!bias) return;
  if (bias->shape.size() != 1 || bias->shape[0] % 3 != 0) {
    return reader.Update(
        Invalid("tensor ", bias->name, " has shape ", ToString(bias->shape), "; it must be [3 E]"));
  }
  const int64_t third = bias->shape[0] / 3;
  for (int n = 0; n < 3; ++n) {
    LinearOf(weights, n).bias = Rows(*bias, n * third, (n + 1) * third);
  }
}

// Divides a matrix of three.
void CutMatrix(const std::optional<WeightTensor>& matrix, bool transposed, LayerWeights& weights) {
  if (!matrix) return;
  const int64_t third = matrix->shape[transposed ? 1 : 0] / 3;
  const auto cut = transposed ? Columns : Rows;
  for (int n = 0; n < 3; ++n) {
    LinearWeights& linear = LinearOf(weights, n);
    linear.matrix = cut(*matrix, n * third, (n + 1) * third);
    linear.transposed = transposed;
  }
}

// --- Namings -------------------------------------------------------------------------------------

void ReadTorch(TensorReader& reader, const LayerSettings&, LayerConfig&, LayerWeights& weights) {
  constexpr absl::string_view kFused = "in_proj_weight";
  constexpr absl::string_view kApart[] = {"q_proj_weight", "k_proj_weight", "v_proj_weight"};
  for (const absl::string_view name : kApart) {
    if (!reader.Has(kFused) || !reader.Has(name)) continue;
    reader.Update(Invalid("tensors ", reader.NameOf(kFused), " and ", reader.NameOf(name),
                          " both exist; one of them must"));
  }
  if (reader.Has(kFused)) {
    CutMatrix(reader.TakeFused(kFused, 3, /*transposed=*/false), /*transposed=*/false, weights);
  } else {
    for (int n = 0; n < 3; ++n) LinearOf(weights, n).matrix = reader.Take(kApart[n]);
  }
  CutBias(reader.Find("in_proj_bias"), reader, weights);
  weights.bias_k = reader.Find("bias_k");
  weights.bias_v = reader.Find("bias_v");
  weights.o = reader.TakeLinear("out_proj");
}

void ReadLlama(TensorReader& reader, const LayerSettings&, LayerConfig&, LayerWeights& weights) {
  weights.q = reader.TakeLinear("q_proj");
  weights.k = reader.TakeLinear("k_proj");
  weights.v = reader.TakeLinear("v_proj");
  weights.o = reader.TakeLinear("o_proj");
  weights.q_norm = reader.Find("q_norm.weight");
  weights.k_norm = reader.Find("k_norm.weight");
  weights.sinks = reader.Find("sinks");
}

void ReadBert(TensorReader& reader, const LayerSettings&, LayerConfig&, LayerWeights& weights) {
  weights.q = reader.TakeLinear("self.query");
  weights.k = reader.TakeLinear("self.key");
  weights.v = reader.TakeLinear("self.value");
  weights.o = reader.TakeLinear("output.dense");
}

void ReadGpt2(TensorReader& reader, const LayerSettings& settings, LayerConfig& config,
              LayerWeights& weights) {
  constexpr bool kTransposed = true;
  CutMatrix(reader.TakeFused("c_attn.weight", 3, kTransposed), kTransposed, weights);
  CutBias(reader.Find("c_attn.bias"), reader, weights);
  weights.o = reader.TakeLinear("c_proj", kTransposed);
  config.is_causal = settings.is_causal.value_or(true);
}

constexpr absl::string_view kBiasTable = "relative_attention_bias.weight";

// The whole name of the table that the block of a prefix uses. Block 0 of a stack has that of
// "encoder.block.3.layer.0.SelfAttention.".
std::string TableOf(TablePlace place, absl::string_view prefix) {
  constexpr absl::string_view kBlock = "block.";
  if (place == TablePlace::kEncoder) {
    return absl::StrCat(prefix.substr(0, prefix.rfind("layer.")), kBiasTable);
  }
  const size_t block = prefix.find(kBlock);
  const size_t end = prefix.find('.', block + kBlock.size());
  if (place == TablePlace::kOwn || block == absl::string_view::npos ||
      end == absl::string_view::npos) {
    return absl::StrCat(prefix, kBiasTable);
  }
  return absl::StrCat(prefix.substr(0, block), kBlock, "0", prefix.substr(end), kBiasTable);
}

void ReadBiasTable(TensorReader& reader, const LayerSettings& settings, LayerConfig& config,
                   LayerWeights& weights) {
  const ModelType* const model = settings.choice.model;
  const TablePlace place = model == nullptr ? TablePlace::kFirstBlock : model->bias_table;
  const std::string table = TableOf(place, settings.choice.prefix);
  weights.relative_attention_bias = reader.FindWhole(table);
  if (!weights.relative_attention_bias) {
    if (model == nullptr) return;
    return reader.Update(
        Invalid("tensor ", table, " is missing; model_type ", model->name, " needs it"));
  }
  config.max_distance = settings.max_distance;
  if (place != TablePlace::kEncoder) return;
  // MPNet's class has these numbers, whatever its configuration says.
  constexpr int64_t kBuckets = 32, kMaxDistance = 128;
  config.max_distance = kMaxDistance;
  const Shape& shape = weights.relative_attention_bias->shape;
  if (!shape.empty() && shape[0] == kBuckets) return;
  reader.Update(Invalid("tensor ", table, " has shape ", ToString(shape), "; it must be [",
                        kBuckets, ", H]"));
}

void ReadT5(TensorReader& reader, const LayerSettings& settings, LayerConfig& config,
            LayerWeights& weights) {
  weights.q = reader.TakeLinear("q");
  weights.k = reader.TakeLinear("k");
  weights.v = reader.TakeLinear("v");
  weights.o = reader.TakeLinear("o");
  const ModelType* const model = settings.choice.model;
  // Models without T5's scale have biases, and T5's have none.
  if (model == nullptr && weights.q.bias) {
    return reader.Update(Invalid("tensor ", weights.q.bias->name,
                                 " is none of the naming t5 without a model_type that has it"));
  }
  if (model == nullptr) config.scale = settings.scale.value_or(1);
  if (settings.is_cross_attention) return reader.Ignore(kBiasTable);  // old files have one
  ReadBiasTable(reader, settings, config, weights);
}

// Luong's W of the concatenated query and key.
void ReadConcat(TensorReader& reader, const LayerSettings& settings, LayerConfig& config,
                LayerWeights& weights) {
  config.score_function = ScoreFunction::kAdditive;
  const LinearWeights both = reader.TakePlain("W");
  weights.additive_weight = reader.TakePlain("v").matrix;
  if (!reader.status().ok()) return;
  const Shape& shape = both.matrix->shape;
  const int64_t queries = settings.embed_size.value_or(shape.size() == 2 ? shape[1] / 2 : 0);
  if (shape.size() != 2 || (!settings.embed_size && shape[1] % 2 != 0) || queries < 1 ||
      queries >= shape[1]) {
    return reader.Update(Invalid(
        "tensor ", both.matrix->name, " has shape ", ToString(shape),
        "; it must be [units, E + Ek]: E is hidden_size in config.json, or half of the columns"));
  }
  weights.q = {.matrix = Columns(*both.matrix, 0, queries), .bias = both.bias};
  weights.k.matrix = Columns(*both.matrix, queries, shape[1]);
}

void ReadPlain(TensorReader& reader, const LayerSettings& settings, LayerConfig& config,
               LayerWeights& weights) {
  std::vector<std::string> forms;  // the first matrix of each form that is there
  for (const char* name : {"W_q", "W1", "W"}) {
    if (reader.Has(name) || reader.Has(absl::StrCat(name, ".weight"))) forms.emplace_back(name);
  }
  if (forms.size() > 1) {
    return reader.Update(Invalid("tensors ", absl::StrJoin(forms, " and "), " under prefix '",
                                 reader.NameOf(""), "' are of different forms of attention"));
  }
  if (forms.empty()) {  // Luong's dot
    config.scale = settings.scale.value_or(1);
  } else if (forms[0] == "W_q") {
    weights.q = reader.TakePlain("W_q");
    weights.k = reader.TakePlain("W_k");
    weights.v = reader.TakePlain("W_v");
    weights.o = reader.FindPlain("W_o");
  } else if (forms[0] == "W1") {
    config.score_function = ScoreFunction::kAdditive;
    weights.k = reader.TakePlain("W1");
    weights.q = reader.TakePlain("W2");
    weights.additive_weight = reader.TakePlain("v").matrix;
  } else if (reader.Has("v") || reader.Has("v.weight")) {
    ReadConcat(reader, settings, config, weights);
  } else {  // Luong's general: q = s W
    weights.q = reader.TakePlain("W");
    weights.q.transposed = true;
    config.scale = settings.scale.value_or(1);
  }
}

struct Naming {
  absl::string_view name;
  // The naming fits if one of these exists.
  std::vector<absl::string_view> first_tensors;
  // These may exist, too: what precedes or follows the layer, or follows from the settings.
  std::vector<absl::string_view> harmless;
  void (*read)(TensorReader& reader, const LayerSettings& settings, LayerConfig& config,
               LayerWeights& weights);
};

absl::Span<const Naming> Namings() {
  static const auto* const namings = new std::vector<Naming>{
      {"torch", {"in_proj_weight", "q_proj_weight"}, {}, ReadTorch},
      {"llama", {"q_proj.weight"}, {"rotary_emb.inv_freq"}, ReadLlama},
      {"bert",
       {"self.query.weight"},
       {"output.LayerNorm.weight", "output.LayerNorm.bias", "output.LayerNorm.gamma",
        "output.LayerNorm.beta", "LayerNorm.weight", "LayerNorm.bias", "ln.weight", "ln.bias"},
       ReadBert},
      {"gpt2", {"c_attn.weight"}, {"bias", "masked_bias"}, ReadGpt2},
      {"t5", {"q.weight"}, {}, ReadT5},
      {"plain", {"W_q", "W_q.weight", "W1", "W1.weight", "W", "W.weight"}, {}, ReadPlain},
  };
  return *namings;
}

void AppendName(std::string* out, const Naming* naming) { absl::StrAppend(out, naming->name); }

// The prefixes under which a naming fits, in the order of the file. With a naming or a model only
// that naming counts.
std::vector<FoundLayer> FindLayersOf(const Safetensors& file, const LayerChoice& choice) {
  const absl::string_view chosen = choice.naming.empty() && choice.model != nullptr
                                       ? choice.model->naming
                                       : absl::string_view(choice.naming);
  std::vector<FoundLayer> layers;
  for (const auto& [name, tensor] : file.tensors()) {
    for (const Naming& naming : Namings()) {
      if (!chosen.empty() && chosen != naming.name) continue;
      for (const absl::string_view first : naming.first_tensors) {
        absl::string_view prefix = name;
        if (!absl::ConsumeSuffix(&prefix, first)) continue;
        if (!prefix.empty() && prefix.back() != '.') continue;
        layers.push_back({std::string(prefix), std::string(naming.name)});
      }
    }
  }
  return layers;
}

// ": 'h.0.attn.' (gpt2), ... and 10 more"
std::string FoundText(const Safetensors& file, const LayerChoice& choice) {
  constexpr size_t kShown = 4;
  std::vector<FoundLayer> layers = FindLayersOf(file, choice);
  if (layers.empty()) return "; no tensors of the file do";
  const size_t more = layers.size() - std::min(layers.size(), kShown);
  layers.resize(layers.size() - more);
  return absl::StrCat("; these fit: ",
                      absl::StrJoin(layers, ", ",
                                    [](std::string* out, const FoundLayer& layer) {
                                      absl::StrAppend(out, "'", layer.prefix, "' (", layer.naming,
                                                      ")");
                                    }),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

// Finds the naming that the settings or the model give, or the only one that fits the tensors.
absl::StatusOr<const Naming*> ChooseNaming(const LayerChoice& choice, const Safetensors& file,
                                           const TensorReader& reader) {
  std::vector<const Naming*> fitting;
  for (const Naming& naming : Namings()) {
    if (choice.naming == naming.name) return &naming;
    const auto& first = naming.first_tensors;
    if (choice.model != nullptr && choice.model->naming != naming.name) continue;
    if (std::any_of(first.begin(), first.end(), [&](auto name) { return reader.Has(name); })) {
      fitting.push_back(&naming);
    }
  }
  if (!choice.naming.empty()) {
    return Invalid(kConfigFile, ": rapt.naming is '", choice.naming.substr(0, 64),
                   "'; it must be one of ", NamingNames());
  }
  if (fitting.size() == 1) return fitting[0];
  if (fitting.empty()) {
    return Invalid(kWeightsFile, ": no naming fits the tensors under the prefix '", choice.prefix,
                   "'; rapt.prefix in ", kConfigFile, " must precede those of ",
                   choice.model != nullptr ? choice.model->naming : NamingNames(),
                   FoundText(file, choice));
  }
  return Invalid(kWeightsFile, ": the tensors under the prefix '", choice.prefix, "' fit ",
                 absl::StrJoin(fitting, " and ", AppendName), "; rapt.naming in ", kConfigFile,
                 " must choose one");
}

// --- Sizes ---------------------------------------------------------------------------------------

int64_t AxisOf(const WeightTensor& matrix, size_t axis) {
  return matrix.shape.size() == 2 ? matrix.shape[axis] : 0;  // LayerBytes() rejects other ranks
}
int64_t InOf(const LinearWeights& linear) {
  return AxisOf(*linear.matrix, linear.transposed ? 0 : 1);
}
int64_t OutOf(const LinearWeights& linear) {
  return AxisOf(*linear.matrix, linear.transposed ? 1 : 0);
}

// Returns n / heads, or nullopt if that is not a whole number: LayerBytes() then says why.
std::optional<int64_t> PerHead(int64_t n, int64_t heads) {
  if (heads < 1 || n % heads != 0) return std::nullopt;
  return n / heads;
}

// The heads of tutorials have any size; those of models have that of the configuration.
void SetPlainHeads(const LayerWeights& weights, LayerConfig& config) {
  const int64_t kv_heads = config.kv_heads.value_or(config.query_heads);
  const int64_t queries = weights.q.matrix ? OutOf(weights.q) : config.embed_size;
  const int64_t keys = config.key_embed_size.value_or(queries);
  const int64_t values =
      weights.v.matrix ? OutOf(weights.v) : config.value_embed_size.value_or(keys);
  if (!config.head_size) config.head_size = PerHead(queries, config.query_heads);
  config.value_head_size = PerHead(values, kv_heads);
}

// The rows of the matrices tell the heads' sizes where the configuration does not.
void SetModelHeads(const LayerWeights& weights, LayerConfig& config) {
  if (!config.head_size && weights.q.matrix) {
    config.head_size = PerHead(OutOf(weights.q), config.query_heads);
  }
  if (!config.kv_heads && config.head_size && weights.k.matrix) {
    config.kv_heads = PerHead(OutOf(weights.k), *config.head_size);
  }
}

absl::Status SetSizes(const LayerSettings& settings, bool is_plain, const LayerWeights& weights,
                      LayerConfig& config) {
  if (!settings.query_heads && !is_plain) {
    return Invalid(kConfigFile, ": num_attention_heads is missing");
  }
  if (!settings.embed_size && !weights.q.matrix) {
    return Invalid(kConfigFile, ": hidden_size is missing; there is no matrix that has it");
  }
  config.query_heads = settings.query_heads.value_or(1);
  config.kv_heads = settings.kv_heads;
  config.head_size = settings.head_size;
  config.embed_size = settings.embed_size ? *settings.embed_size : InOf(weights.q);
  if (weights.k.matrix) {
    config.key_embed_size = InOf(weights.k);
  } else if (weights.q.matrix) {
    config.key_embed_size = OutOf(weights.q);  // keys as they are
  }
  if (weights.v.matrix) config.value_embed_size = InOf(weights.v);
  if (is_plain) {
    SetPlainHeads(weights, config);
  } else {
    SetModelHeads(weights, config);
  }
  return absl::OkStatus();
}

absl::Status SetRotary(const LayerSettings& settings, LayerConfig& config) {
  config.rope_theta = settings.rope_theta;
  config.rope_scaling = settings.rope_scaling;
  config.interleaved = settings.interleaved.value_or(false);
  if (!settings.rope_theta || !settings.rotary_factor) return absl::OkStatus();
  const int64_t head_size =
      config.head_size.value_or(PerHead(config.embed_size, config.query_heads).value_or(0));
  if (head_size < 1 || head_size > kMaxAxis) return absl::OkStatus();  // LayerBytes() says why
  const auto rotated =
      static_cast<int64_t>(static_cast<double>(head_size) * *settings.rotary_factor);
  if (rotated < 2 || rotated % 2 != 0) {
    return Invalid(kConfigFile, ": partial_rotary_factor is ", *settings.rotary_factor,
                   ", which rotates ", rotated, " of the ", head_size,
                   " numbers of a head; it must rotate 2 or another even number");
  }
  config.rotary_embedding_dim = rotated;
  return absl::OkStatus();
}

absl::Status InFile(const char* file, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
}

}  // namespace

std::string NamingNames() {
  return absl::StrJoin(Namings(), ", ", [](std::string* out, const Naming& naming) {
    absl::StrAppend(out, naming.name);
  });
}

std::vector<FoundLayer> FindLayers(absl::string_view config, const Safetensors& file) {
  const absl::StatusOr<LayerChoice> choice = ParseLayerChoice(config);
  return FindLayersOf(file, choice.value_or(LayerChoice()));
}

absl::StatusOr<LayerFiles> ReadLayerFiles(absl::string_view config, Safetensors file,
                                          const std::optional<std::string>& prefix) {
  absl::StatusOr<LayerSettings> settings = ParseLayerSettings(config, prefix);
  // An error of the naming precedes those of the settings, which depend on the prefix.
  absl::StatusOr<LayerChoice> choice =
      settings.ok() ? absl::StatusOr<LayerChoice>(settings->choice) : ParseLayerChoice(config);
  if (!choice.ok()) return InFile(kConfigFile, choice.status());
  if (prefix) choice->prefix = *prefix;
  LayerFiles layer{.file = std::move(file), .prefix = choice->prefix};
  TensorReader reader(layer.file, layer.prefix);
  RAPT_ASSIGN_OR_RETURN(const Naming* const naming, ChooseNaming(*choice, layer.file, reader));
  layer.naming = std::string(naming->name);

  if (!settings.ok()) return InFile(kConfigFile, settings.status());
  layer.config.is_causal = settings->is_causal.value_or(false);
  layer.config.scale = settings->scale;
  layer.config.pad_token_id = settings->pad_token_id;
  layer.config.positional_base = settings->positional_base;
  layer.config.sliding_window = settings->sliding_window;
  if (settings->norm_epsilon) layer.config.norm_epsilon = *settings->norm_epsilon;
  naming->read(reader, *settings, layer.config, layer.weights);
  reader.RejectOthers(layer.naming, naming->harmless);
  if (!reader.status().ok()) return InFile(kWeightsFile, reader.status());
  layer.tensors = reader.TakeUsed();
  layer.unread = std::move(settings->unread);
  const bool is_plain = layer.naming == "plain";
  RAPT_RETURN_IF_ERROR(SetSizes(*settings, is_plain, layer.weights, layer.config));
  RAPT_RETURN_IF_ERROR(SetRotary(*settings, layer.config));
  return layer;
}

absl::StatusOr<LayerFolder> OpenLayerFolder(const std::string& folder) {
  std::error_code unknown;  // as without it
  const std::filesystem::path path(folder);
  if (!std::filesystem::is_directory(path, unknown)) {
    const std::filesystem::path last = path.has_filename() ? path : path.parent_path();
    return absl::NotFoundError(
        absl::StrCat("the folder '", last.filename().string(), "' does not exist"));
  }
  const auto config = MappedFile::Open(path / kConfigFile);
  if (config == nullptr) return InFile(kConfigFile, WhyUnreadable(path / kConfigFile));
  LayerFolder opened{.config = std::string(config->content().substr(0, kMaxConfigBytes + 1))};
  const bool is_sharded = !std::filesystem::exists(path / kWeightsFile, unknown) &&
                          std::filesystem::exists(path / kWeightsIndexFile, unknown);
  absl::StatusOr<Safetensors> file = is_sharded ? Safetensors::OpenShards(path / kWeightsIndexFile)
                                                : Safetensors::Open(path / kWeightsFile);
  if (!file.ok()) return InFile(is_sharded ? kWeightsIndexFile : kWeightsFile, file.status());
  opened.file = *std::move(file);
  return opened;
}

absl::StatusOr<LayerFiles> ReadLayerFiles(const std::string& folder) {
  RAPT_ASSIGN_OR_RETURN(LayerFolder opened, OpenLayerFolder(folder));
  return ReadLayerFiles(opened.config, *std::move(opened.file));
}

absl::StatusOr<std::shared_ptr<const Layer>> MakeLayer(const LayerFiles& files, ThreadPool& pool) {
  absl::StatusOr<std::shared_ptr<const Layer>> layer = MakeLayer(files.config, files.weights, pool);
  if (!layer.ok() || files.file.unchanged()) return layer;
  return absl::AbortedError(
      absl::StrCat(kWeightsFile, ": the file was changed while it was read; load it again"));
}

}  // namespace rapt
