#include "attention/layer/files/layer_settings.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/invalid.h"
#include "base/strict_json.h"

namespace rapt {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxShownBytes = 64;  // of a text from the file, in errors

// Parses a file, in which Python writes infinity and NaN as such.
absl::StatusOr<Json> ParseFile(absl::string_view text) {
  absl::StatusOr<Json> root = ParseStrictJson(text, JsonNumberSyntax::kNonFinite);
  if (root.ok() && !root->is_object()) return Invalid("the file is not a JSON object");
  return root;
}

// A value as errors show it.
std::string TextOf(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return absl::StrCat(value.get<double>());  // dump() writes null
  }
  return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, kMaxShownBytes);
}

// Reads the members of an object; keeps the first error.
class ObjectReader {
 public:
  // `path` precedes names in errors: "rapt.".
  ObjectReader(const Json& object, std::string path, absl::Status& status)
      : object_(object), path_(std::move(path)), status_(status) {}

  // Reads a setting that may have several names. Leaves `out` if none has a value.
  void Read(std::initializer_list<const char*> names, std::optional<int64_t>& out) {
    const Json* const value = Find(names);
    if (value == nullptr) return;
    if (!value->is_number_integer() ||
        (value->is_number_unsigned() &&
         value->get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()})) {
      return Reject(*value, "an integer");
    }
    out = value->get<int64_t>();
  }
  void Read(std::initializer_list<const char*> names, std::optional<double>& out) {
    const Json* const value = Find(names);
    if (value == nullptr) return;
    if (!value->is_number()) return Reject(*value, "a number");
    if (!std::isfinite(value->get<double>())) return Reject(*value, "finite");
    out = value->get<double>();
  }
  void Read(std::initializer_list<const char*> names, std::optional<bool>& out) {
    const Json* const value = Find(names);
    if (value == nullptr) return;
    if (!value->is_boolean()) return Reject(*value, "true or false");
    out = value->get<bool>();
  }
  void Read(std::initializer_list<const char*> names, std::string& out) {
    const Json* const value = Find(names);
    if (value == nullptr) return;
    if (!value->is_string()) return Reject(*value, "a string");
    out = value->get<std::string>();
  }

  // Returns the value of these names of one setting, which must not differ; null if none has a
  // value other than null.
  const Json* Find(std::initializer_list<const char*> names) {
    const Json* found = nullptr;
    for (const char* name : names) {
      const auto value = object_.find(name);
      if (value == object_.end() || value->is_null()) continue;
      if (found == nullptr) {
        found = &*value;
        name_ = name;
      } else if (*value != *found) {
        status_.Update(Invalid(path_, name_, " is ", TextOf(*found), " and ", path_, name, " is ",
                               TextOf(*value), "; they must be equal"));
      }
    }
    return found;
  }

  // Returns the number of a name that must have one.
  double Need(const char* name) {
    std::optional<double> number;
    Read({name}, number);
    if (!number) status_.Update(Invalid(path_, name, " is missing"));
    return number.value_or(0);
  }

  // The name of the value that Find() returned last.
  const char* name() const { return name_; }

  // Rejects the value that Find() returned last.
  void Reject(const Json& value, absl::string_view allowed) {
    status_.Update(Invalid(path_, name_, " is ", TextOf(value), "; it must be ", allowed));
  }

  // Rejects a value other than those that leave attention as a layer computes it.
  void Allow(const char* name, std::initializer_list<Json> harmless) {
    const Json* const value = Find({name});
    if (value == nullptr) return;
    for (const Json& allowed : harmless) {
      if (*value == allowed) return;
    }
    Reject(*value, harmless.size() == 0
                       ? "null: a layer does not compute this"
                       : absl::StrCat(absl::StrJoin(harmless, " or ",
                                                    [](std::string* out, const Json& allowed) {
                                                      out->append(TextOf(allowed));
                                                    }),
                                      ": a layer does not compute other forms"));
  }

 private:
  const Json& object_;
  const std::string path_;
  absl::Status& status_;
  const char* name_ = "";
};

// Names that Hugging Face's models have for what changes their attention.
void RejectOtherAttention(ObjectReader& reader) {
  reader.Allow("attn_logit_softcapping", {});
  reader.Allow("query_pre_attn_scalar", {});
  reader.Allow("position_embedding_type", {"absolute"});
  reader.Allow("scale_attn_weights", {true});
  reader.Allow("scale_attn_by_inverse_layer_idx", {false});
  reader.Allow("clip_qkv", {});
  reader.Allow("key_multiplier", {1});  // Falcon-H1's
  // Its norms of Q and K have no weights, so that only the name of the model shows them.
  if (const Json* const model = reader.Find({"model_type"}); model && *model == "nanochat") {
    reader.Reject(*model, "another: a layer does not compute norms without weights");
  }
}

// --- Rotary embedding ----------------------------------------------------------------------------

// What cosines and sines are multiplied by: as Transformers computes it for YaRN, from the
// logarithm of the factor.
double AttentionFactor(ObjectReader& rope, double factor) {
  std::optional<double> given, mscale, mscale_all_dim;
  rope.Read({"attention_factor"}, given);
  rope.Read({"mscale"}, mscale);
  rope.Read({"mscale_all_dim"}, mscale_all_dim);
  if (given) return *given;
  const auto by = [&](double scale) {
    return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1;
  };
  const bool has_both = mscale.value_or(0) != 0 && mscale_all_dim.value_or(0) != 0;
  return has_both ? by(*mscale) / by(*mscale_all_dim) : by(1);
}

// `length` is original_max_position_embeddings, or what stands for it.
RopeScaling ReadScaling(RopeScaling::Type type, std::optional<double> length, ObjectReader& rope,
                        absl::Status& status) {
  RopeScaling scaling{.type = type, .factor = rope.Need("factor")};
  if (type == RopeScaling::Type::kLinear) return scaling;
  if (!length) {
    status.Update(Invalid("original_max_position_embeddings is missing; rope_type ", NameOf(type),
                          " needs it, or max_position_embeddings"));
  }
  scaling.original_length = length.value_or(1);
  if (type == RopeScaling::Type::kLlama3) {
    scaling.slow = rope.Need("low_freq_factor");
    scaling.fast = rope.Need("high_freq_factor");
    return scaling;
  }
  std::optional<double> slow, fast;
  std::optional<bool> truncate;
  rope.Read({"beta_slow"}, slow);
  rope.Read({"beta_fast"}, fast);
  rope.Read({"truncate"}, truncate);
  scaling.slow = slow.value_or(1);
  scaling.fast = fast.value_or(32);
  scaling.truncate = truncate.value_or(true);
  scaling.attention_factor = AttentionFactor(rope, scaling.factor);
  return scaling;
}

std::optional<RopeScaling> ReadRopeType(std::optional<double> length, ObjectReader& rope,
                                        absl::Status& status) {
  const Json* const name = rope.Find({"rope_type", "type"});
  if (name == nullptr || *name == "default") return std::nullopt;
  using Type = RopeScaling::Type;
  for (const Type type : {Type::kLinear, Type::kLlama3, Type::kYarn}) {
    if (*name == Json(std::string(NameOf(type)))) return ReadScaling(type, length, rope, status);
  }
  rope.Reject(*name, "default, linear, llama3 or yarn");
  return std::nullopt;
}

// rope_theta and how it is scaled. Since version 5 of Transformers rope_parameters has all of it;
// before, rope_scaling had the scaling alone.
void ReadRope(ObjectReader& reader, LayerSettings& settings, absl::Status& status) {
  std::optional<double> length;
  reader.Read({"rope_theta"}, settings.rope_theta);
  reader.Read({"partial_rotary_factor"}, settings.rotary_factor);
  reader.Read({"original_max_position_embeddings"}, length);
  const Json* const rope = reader.Find({"rope_parameters", "rope_scaling"});
  if (rope == nullptr) return;
  const std::string object = reader.name();
  if (!rope->is_object()) {
    return status.Update(Invalid(object, " is ", TextOf(*rope), "; it must be an object"));
  }
  for (const auto& [name, value] : rope->items()) {
    if (!value.is_object()) continue;  // of a type of layers
    return status.Update(Invalid(object, ".", name.substr(0, kMaxShownBytes),
                                 " is an object; a layer has one rope_theta, in ", object));
  }
  ObjectReader parameters(*rope, object + ".", status);
  for (const auto& [name, setting] : {std::pair{"rope_theta", &settings.rope_theta},
                                      {"partial_rotary_factor", &settings.rotary_factor},
                                      {"original_max_position_embeddings", &length}}) {
    const std::optional<double> outside = *setting;
    parameters.Read({name}, *setting);
    if (!outside || *setting == outside) continue;
    status.Update(Invalid(name, " is ", *outside, " and ", object, ".", name, " is ", **setting,
                          "; they must be equal"));
  }
  parameters.Allow("llama_4_scaling_beta", {});  // Ministral 3's: scales queries by position
  if (!length) reader.Read({"max_position_embeddings"}, length);
  settings.rope_scaling = ReadRopeType(length, parameters, status);
}

// --- Settings of one of the model's layers -------------------------------------------------------

// The number of the layer in a prefix such as "model.layers.3.self_attn."; the last one.
std::optional<size_t> LayerNumber(absl::string_view prefix) {
  std::optional<size_t> last;
  for (const absl::string_view part : absl::StrSplit(prefix, '.')) {
    size_t number = 0;
    if (absl::SimpleAtoi(part, &number)) last = number;
  }
  return last;
}

// Llama 4's and SmolLM3's list has a 0 for each layer of the model without rotary embedding. It is
// harmless if this layer, or every one, has a 1. Without a list, or with an empty one, Transformers
// makes one by no_rope_layer_interval; saved configurations have it.
void CheckNoRopeLayers(const Json& root, absl::string_view prefix, absl::Status& status) {
  const auto list = root.find("no_rope_layers");
  const auto interval = root.find("no_rope_layer_interval");
  if (list == root.end()) {
    if (interval == root.end() || interval->is_null()) return;
    return status.Update(Invalid("no_rope_layer_interval is ", TextOf(*interval),
                                 " and no_rope_layers is absent; it must be an array with a 1 for "
                                 "this layer"));
  }
  const auto has_rope = [](const Json& layer) { return layer == Json(1); };
  if (list->is_array() && !list->empty() && std::all_of(list->begin(), list->end(), has_rope)) {
    return;
  }
  const std::optional<size_t> number = LayerNumber(prefix);
  const bool has_layer = list->is_array() && number && *number < list->size();
  if (has_layer && has_rope((*list)[*number])) return;
  if (has_layer) {
    return status.Update(Invalid("no_rope_layers[", *number, "] is ", TextOf((*list)[*number]),
                                 "; it must be 1: a layer has rotary embedding if the model has"));
  }
  const bool is_empty = list->is_array() && list->empty();
  status.Update(Invalid("no_rope_layers is ", is_empty ? "empty" : TextOf(*list),
                        "; it must be an array with a 1 for every layer, or for the one whose "
                        "number rapt.prefix has: model.layers.3.self_attn."));
}

constexpr char kSlides[] = "sliding_attention";

// Returns the type of this layer, or "" if the model has no list of them.
std::string LayerTypeOf(const Json& root, absl::string_view prefix, absl::Status& status) {
  const auto list = root.find("layer_types");
  if (list == root.end() || list->is_null()) return "";
  if (!list->is_array() || list->empty()) {
    status.Update(Invalid("layer_types is ", list->is_array() ? "empty" : TextOf(*list),
                          "; it must be an array with the type of every layer"));
    return "";
  }
  if (const auto count = root.find("num_hidden_layers");
      count != root.end() && *count != Json(list->size())) {
    status.Update(Invalid("layer_types has ", list->size(), " types and num_hidden_layers is ",
                          TextOf(*count), "; they must be equal"));
  }
  const bool is_one =
      std::all_of(list->begin(), list->end(), [&](const Json& type) { return type == (*list)[0]; });
  const std::optional<size_t> number = is_one ? std::optional<size_t>(0) : LayerNumber(prefix);
  if (!number || *number >= list->size()) {
    status.Update(Invalid("layer_types has ", list->size(),
                          " types that differ, and rapt.prefix is '",
                          prefix.substr(0, kMaxShownBytes),
                          "'; it must have the number of a layer below that: "
                          "model.layers.3.self_attn."));
    return "";
  }
  const Json& type = (*list)[*number];
  if (type == "full_attention" || type == kSlides) return type.get<std::string>();
  status.Update(Invalid("layer_types[", *number, "] is ", TextOf(type),
                        "; it must be \"full_attention\" or \"", kSlides, "\""));
  return "";
}

// Which layers of a model have its window: those of layer_types, or without such a list all, or
// those from a number on.
enum class Windows : uint8_t { kListed, kOfEveryLayer, kFromMaxWindowLayers };

// The models whose layers differ in nothing but the window. Other models have layers without rotary
// embedding, or with another theta, beside those with a window.
constexpr std::pair<absl::string_view, Windows> kModelsWithWindows[] = {
    {"gpt_oss", Windows::kListed},
    {"mistral", Windows::kOfEveryLayer},
    {"mixtral", Windows::kOfEveryLayer},
    {"qwen2", Windows::kFromMaxWindowLayers},
    {"qwen3", Windows::kFromMaxWindowLayers},
    {"starcoder2", Windows::kOfEveryLayer},
};

// Returns which layers of the model have its window; nullopt if the model is none of the above.
std::optional<Windows> WindowsOfModel(absl::string_view model) {
  for (const auto& [name, windows] : kModelsWithWindows) {
    if (model == name) return windows;
  }
  return std::nullopt;
}

// The same of a model that may have no name.
Windows WindowsOf(const Json& root, absl::string_view model, absl::Status& status) {
  if (model.empty()) {
    return root.contains("max_window_layers") ? Windows::kFromMaxWindowLayers
                                              : Windows::kOfEveryLayer;
  }
  if (const std::optional<Windows> windows = WindowsOfModel(model)) return *windows;
  status.Update(
      Invalid("model_type is ", model.substr(0, kMaxShownBytes),
              "; with sliding_window it must be absent or one of ",
              absl::StrJoin(kModelsWithWindows, ", ", [](std::string* out, const auto& known) {
                absl::StrAppend(out, known.first);
              })));
  return Windows::kListed;
}

bool IsFromMaxWindowLayers(ObjectReader& reader, absl::string_view prefix, absl::Status& status) {
  std::optional<int64_t> first;
  reader.Read({"max_window_layers"}, first);
  const std::optional<size_t> number = LayerNumber(prefix);
  if (!first || *first < 0) {
    status.Update(Invalid("max_window_layers is ", first ? absl::StrCat(*first) : "missing",
                          "; it must be at least 0"));
  } else if (!number) {
    status.Update(Invalid("max_window_layers is ", *first, " and rapt.prefix is '",
                          prefix.substr(0, kMaxShownBytes),
                          "'; it must have the number of the layer: model.layers.3.self_attn."));
  }
  return first && number && std::cmp_greater_equal(*number, *first);
}

// Whether this layer has the window if there are no layer_types.
bool HasWindow(Windows windows, ObjectReader& reader, absl::string_view prefix,
               absl::Status& status) {
  switch (windows) {
    case Windows::kOfEveryLayer:
      return true;
    case Windows::kFromMaxWindowLayers:
      return IsFromMaxWindowLayers(reader, prefix, status);
    case Windows::kListed:
      status.Update(Invalid("layer_types is missing; sliding_window of this model_type needs it"));
  }
  return false;
}

// The window of this layer of the model.
void ReadWindow(const Json& root, LayerSettings& settings, absl::Status& status) {
  ObjectReader reader(root, "", status);
  const std::string type = LayerTypeOf(root, settings.prefix, status);
  std::optional<bool> is_on;
  std::optional<int64_t> window;
  reader.Read({"use_sliding_window"}, is_on);
  const bool is_qwen = WindowsOfModel(settings.model_type) == Windows::kFromMaxWindowLayers;
  if (!is_on.value_or(!is_qwen)) {
    if (type != kSlides) return;
    return status.Update(Invalid("use_sliding_window is ", is_on ? "false" : "missing",
                                 "; it must be true, because the layer's type is ", kSlides));
  }
  reader.Read({"sliding_window"}, window);
  if (!window) {
    if (type != kSlides) return;
    return status.Update(
        Invalid("sliding_window is missing; a layer of type ", kSlides, " needs it"));
  }
  if (*window < 1) {
    status.Update(Invalid("sliding_window is ", *window, "; it must be null or at least 1"));
  }
  const Windows windows = WindowsOf(root, settings.model_type, status);
  const bool slides =
      type.empty() ? HasWindow(windows, reader, settings.prefix, status) : type == kSlides;
  if (slides) settings.sliding_window = window;
}

// The models that rotate neighbours, other than those whose attention is refused.
constexpr absl::string_view kInterleavedModels[] = {"cohere", "ernie4_5", "ernie4_5_moe",
                                                    "glm",    "glm4",     "helium"};

void ReadHuggingFace(const Json& root, LayerSettings& settings, absl::Status& status) {
  ObjectReader reader(root, "", status);
  reader.Read({"hidden_size", "n_embd", "d_model"}, settings.embed_size);
  reader.Read({"num_attention_heads", "n_head", "num_heads"}, settings.query_heads);
  reader.Read({"num_key_value_heads"}, settings.kv_heads);
  reader.Read({"head_dim", "d_kv"}, settings.head_size);
  reader.Read({"attention_multiplier"}, settings.scale);  // Granite's
  reader.Read({"rms_norm_eps"}, settings.norm_epsilon);
  reader.Read({"relative_attention_max_distance"}, settings.max_distance);
  reader.Read({"pad_token_id"}, settings.pad_token_id);
  ReadRope(reader, settings, status);
  reader.Read({"model_type"}, settings.model_type);
  if (std::find(std::begin(kInterleavedModels), std::end(kInterleavedModels),
                settings.model_type) != std::end(kInterleavedModels)) {
    settings.interleaved = true;
  }
  RejectOtherAttention(reader);
}

constexpr const char* kOwnNames[] = {"prefix",       "naming",      "is_causal",      "scale",
                                     "pad_token_id", "interleaved", "positional_base"};

void ReadOwn(const Json& own, LayerSettings& settings, absl::Status& status) {
  if (!own.is_object()) {
    return status.Update(Invalid("rapt is ", TextOf(own), "; it must be an object"));
  }
  for (const auto& [name, value] : own.items()) {
    const bool is_known =
        std::find(std::begin(kOwnNames), std::end(kOwnNames), name) != std::end(kOwnNames);
    if (!is_known) {
      return status.Update(Invalid("rapt.", name.substr(0, kMaxShownBytes),
                                   " is unknown; rapt may have ", absl::StrJoin(kOwnNames, ", ")));
    }
  }
  ObjectReader reader(own, "rapt.", status);
  reader.Read({"prefix"}, settings.prefix);
  reader.Read({"naming"}, settings.naming);
  reader.Read({"is_causal"}, settings.is_causal);
  reader.Read({"scale"}, settings.scale);
  reader.Read({"pad_token_id"}, settings.pad_token_id);
  reader.Read({"interleaved"}, settings.interleaved);
  reader.Read({"positional_base"}, settings.positional_base);
}

}  // namespace

absl::StatusOr<LayerSettings> ParseLayerSettings(absl::string_view json) {
  if (json.size() > kMaxConfigBytes) {
    return Invalid("the file has ", json.size(), " bytes; at most ", kMaxConfigBytes,
                   " are allowed");
  }
  const absl::StatusOr<Json> root = ParseFile(json);
  if (!root.ok()) return root.status();
  LayerSettings settings;
  absl::Status status;
  ReadHuggingFace(*root, settings, status);
  if (const auto own = root->find("rapt"); own != root->end()) ReadOwn(*own, settings, status);
  CheckNoRopeLayers(*root, settings.prefix, status);
  ReadWindow(*root, settings, status);
  if (const auto part = settings.rotary_factor; part && !(*part > 0 && *part <= 1)) {
    status.Update(Invalid("partial_rotary_factor is ", *part, "; it must be in (0, 1]"));
  }
  if (!status.ok()) return status;
  return settings;
}

}  // namespace rapt
