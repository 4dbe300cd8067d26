#include "attention/layer/files/layer_settings.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "attention/problem.h"
#include "base/invalid.h"
#include "base/range.h"
#include "base/status_macros.h"
#include "base/strict_json.h"

namespace rapt {
namespace {

using Json = nlohmann::json;

constexpr IntegerRange kSize = {1, kMaxAxis};
constexpr size_t kMaxShownBytes = 64;  // of a text from the file, in errors

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
  void Read(std::initializer_list<const char*> names, std::optional<int64_t>& out,
            IntegerRange range = {}) {
    const Json* const value = Find(names);
    if (value == nullptr) return;
    if (!value->is_number_integer()) return Reject(*value, "an integer");
    const absl::int128 number =
        value->is_number_unsigned() ? absl::int128(value->get<uint64_t>()) : value->get<int64_t>();
    status_.Update(CheckRange(path_ + name_, number, range));
    out = static_cast<int64_t>(number);
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
      const Json* const value = Member(name);
      if (value == nullptr || value->is_null()) continue;
      if (found == nullptr) {
        found = value;
        name_ = name;
      } else if (*value != *found) {
        status_.Update(Invalid(path_, name_, " is ", TextOf(*found), " and ", path_, name, " is ",
                               TextOf(*value), "; they must be equal"));
      }
    }
    return found;
  }

  // Returns the value of a name, also null; null if it is not written.
  const Json* Member(const char* name) {
    read_.insert(name);
    const auto value = object_.find(name);
    return value == object_.end() ? nullptr : &*value;
  }

  // Appends the names that no function has asked for.
  void AppendUnread(std::vector<std::string>& unread) const {
    for (const auto& [name, value] : object_.items()) {
      if (read_.count(name) == 0) unread.push_back(path_ + name);
    }
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
  std::set<std::string> read_;
};

// Names that Hugging Face's models have for what changes their attention.
void RejectOtherAttention(ObjectReader& reader) {
  reader.Allow("attn_logit_softcapping", {});
  reader.Allow("query_pre_attn_scalar", {});
  reader.Allow("scale_attn_weights", {true});
  reader.Allow("scale_attn_by_inverse_layer_idx", {false});
  reader.Allow("clip_qkv", {});
  reader.Allow("key_multiplier", {1});  // Falcon-H1's
  reader.Allow("use_qk_norm", {false});
  reader.Allow("qk_layernorm", {false});
  reader.Allow("use_bidirectional_attention", {false});
  reader.Allow("alibi", {false});
  for (const char* rotary : {"rotary_dim", "rope_pct", "rotary_pct", "rotary_emb_base"}) {
    reader.Allow(rotary, {});
  }
  for (const char* window : {"attention_window", "attention_window_size"}) reader.Allow(window, {});
}

// Names that change nothing in attention, or only how it is trained.
constexpr absl::string_view kHarmless =
    "_name_or_path activation_function add_cross_attention architectures attention_bias "
    "attention_dropout attention_probs_dropout_prob attn_pdrop bos_token_id classifier_dropout "
    "d_ff dropout dropout_rate dtype embd_pdrop eos_token_id feed_forward_proj hidden_act "
    "hidden_dropout_prob id2label initializer_factor initializer_range intermediate_size "
    "is_encoder_decoder label2id layer_norm_eps layer_norm_epsilon max_position_embeddings "
    "mlp_bias n_ctx n_inner n_layer n_positions num_decoder_layers num_hidden_layers num_layers "
    "pretraining_tp relative_attention_num_buckets resid_pdrop tie_word_embeddings torch_dtype "
    "transformers_version type_vocab_size use_cache vocab_size";

// Without a model's class only names that are known can be said not to change attention.
void RejectUnknown(const std::vector<std::string>& unread, absl::Status& status) {
  const std::set<absl::string_view> harmless = absl::StrSplit(kHarmless, ' ');
  for (const std::string& name : unread) {
    if (harmless.count(absl::StripPrefix(name, "text_config.")) > 0) continue;
    status.Update(Invalid(name.substr(0, kMaxShownBytes),
                          " is unknown and may change attention; without a model_type that a layer "
                          "computes, the file must not have it"));
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

std::optional<RopeScaling> ReadRopeType(std::optional<double> length, bool has_text_positions,
                                        ObjectReader& rope, absl::Status& status) {
  if (has_text_positions) {  // of text, the three positions of mrope are equal
    rope.Member("mrope_section");
    rope.Member("mrope_interleaved");
    rope.Allow("rope_type", {"default", "mrope"});
    rope.Allow("type", {"default", "mrope"});
    return std::nullopt;
  }
  const Json* const name = rope.Find({"rope_type", "type"});
  if (name == nullptr || *name == "default") return std::nullopt;
  using Type = RopeScaling::Type;
  for (const Type type : {Type::kLinear, Type::kLlama3, Type::kYarn}) {
    if (*name == Json(std::string(NameOf(type)))) return ReadScaling(type, length, rope, status);
  }
  rope.Reject(*name, "default, linear, llama3 or yarn");
  return std::nullopt;
}

// The object rope_parameters or rope_scaling. Since version 5 of Transformers rope_parameters has
// all of it; before, rope_scaling had the scaling alone.
void ReadRopeObject(const Json& rope, ObjectReader& reader, LayerSettings& settings,
                    absl::Status& status) {
  const std::string object = reader.name();
  if (!rope.is_object()) {
    return status.Update(Invalid(object, " is ", TextOf(rope), "; it must be an object"));
  }
  for (const auto& [name, value] : rope.items()) {
    if (!value.is_object()) continue;  // of a type of layers
    return status.Update(Invalid(object, ".", name.substr(0, kMaxShownBytes),
                                 " is an object; a layer has one rope_theta, in ", object));
  }
  std::optional<double> length, longest;
  reader.Read({"original_max_position_embeddings"}, length);
  reader.Read({"max_position_embeddings"}, longest);
  ObjectReader parameters(rope, object + ".", status);
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
  const ModelType* const model = settings.choice.model;
  settings.rope_scaling = ReadRopeType(
      length ? length : longest, model != nullptr && model->has_text_positions, parameters, status);
  parameters.AppendUnread(settings.unread);
}

// What the model's class says of rotary embedding where the file does not.
void CompleteRope(const ModelType& model, bool has_object, LayerSettings& settings,
                  absl::Status& status) {
  if (!model.rope_theta) {
    if (!settings.rope_theta) return;
    return status.Update(Invalid("rope_theta is ", *settings.rope_theta, "; model_type ",
                                 model.name, " has no rotary embedding"));
  }
  if (model.scales_rope && !has_object) {
    status.Update(Invalid("rope_parameters is missing; model_type ", model.name, " needs it"));
  }
  if (!model.rotary_factor && settings.rotary_factor.value_or(1) != 1) {
    status.Update(Invalid("partial_rotary_factor is ", *settings.rotary_factor, "; model_type ",
                          model.name, " rotates whole heads"));
  }
  if (model.needs_rope_theta && !settings.rope_theta) {
    status.Update(Invalid("rope_theta is missing; model_type ", model.name,
                          " needs it, because its default depends on the version of Transformers"));
  }
  if (!settings.rope_theta) settings.rope_theta = model.rope_theta;
  if (!settings.rotary_factor) settings.rotary_factor = model.rotary_factor;
  settings.interleaved = model.interleaved;
}

void ReadRope(ObjectReader& reader, LayerSettings& settings, absl::Status& status) {
  const ModelType* const model = settings.choice.model;
  reader.Read({"rope_theta"}, settings.rope_theta);
  reader.Read({"partial_rotary_factor"}, settings.rotary_factor);
  const Json* const rope = reader.Find({"rope_parameters", "rope_scaling"});
  if (rope != nullptr) ReadRopeObject(*rope, reader, settings, status);
  if (model != nullptr) CompleteRope(*model, rope != nullptr, settings, status);
  const Json* const type = reader.Find({"position_embedding_type"});
  const bool is_rope = type != nullptr && *type == "rope";
  if (model != nullptr && model->rope_by_type) {
    reader.Allow("position_embedding_type", {"rope", "nope"});
    if (is_rope) return;
    settings.rope_theta = std::nullopt;
    settings.rope_scaling = std::nullopt;
    return;
  }
  reader.Allow("position_embedding_type", {"absolute", "rope"});
  if (is_rope && !settings.rope_theta) {
    status.Update(Invalid("position_embedding_type is \"rope\" and rope_theta is missing"));
  }
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
void CheckNoRopeLayers(ObjectReader& reader, const LayerChoice& choice, absl::Status& status) {
  const Json* const list = reader.Member("no_rope_layers");
  const Json* const interval = reader.Member("no_rope_layer_interval");
  if (list == nullptr) {
    const bool has_interval = interval != nullptr && !interval->is_null();
    if (!has_interval && (choice.model == nullptr || !choice.model->lists_rope_layers)) return;
    return status.Update(Invalid(
        has_interval ? absl::StrCat("no_rope_layer_interval is ", TextOf(*interval), " and ") : "",
        "no_rope_layers is absent; it must be an array with a 1 for this layer"));
  }
  const auto has_rope = [](const Json& layer) { return layer == Json(1); };
  if (list->is_array() && !list->empty() && std::all_of(list->begin(), list->end(), has_rope)) {
    return;
  }
  const std::optional<size_t> number = LayerNumber(choice.prefix);
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
std::string LayerTypeOf(ObjectReader& reader, absl::string_view prefix, absl::Status& status) {
  const Json* const list = reader.Find({"layer_types"});
  const Json* const count = reader.Find({"num_hidden_layers"});
  if (list == nullptr) return "";
  if (!list->is_array() || list->empty()) {
    status.Update(Invalid("layer_types is ", list->is_array() ? "empty" : TextOf(*list),
                          "; it must be an array with the type of every layer"));
    return "";
  }
  if (count != nullptr && *count != Json(list->size())) {
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
  if (type == "attention") return "full_attention";  // Granite 4's, beside "mamba"
  status.Update(Invalid("layer_types[", *number, "] is ", TextOf(type),
                        "; it must be \"full_attention\" or \"", kSlides, "\""));
  return "";
}

// Which layers of the model have its window. `first` is max_window_layers.
Windows WindowsOf(const ModelType* model, std::optional<int64_t> first) {
  if (model != nullptr) return model->windows;
  return first ? Windows::kFromMaxWindowLayers : Windows::kOfEveryLayer;
}

bool IsFromMaxWindowLayers(std::optional<int64_t> first, absl::string_view prefix,
                           absl::Status& status) {
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

// Whether this layer, of a type of layer_types if there are any, has the model's window.
bool HasWindow(Windows windows, absl::string_view type, std::optional<int64_t> first,
               const LayerChoice& choice, absl::Status& status) {
  const bool is_model = choice.model != nullptr;
  switch (windows) {
    case Windows::kNone:
      break;
    case Windows::kOfEveryLayer:
    case Windows::kOfEveryLayerIfUsed:
      return is_model || type.empty() || type == kSlides;  // such models read no layer_types
    case Windows::kFromMaxWindowLayers:
      return type.empty() ? IsFromMaxWindowLayers(first, choice.prefix, status) : type == kSlides;
    case Windows::kListed:
      if (!type.empty()) return type == kSlides;
      status.Update(Invalid("layer_types is missing; sliding_window of this model_type needs it"));
  }
  return false;
}

// The window of this layer of the model.
void ReadWindow(ObjectReader& reader, LayerSettings& settings, absl::Status& status) {
  const LayerChoice& choice = settings.choice;
  const std::string type = LayerTypeOf(reader, choice.prefix, status);
  std::optional<bool> is_on;
  std::optional<int64_t> window, first;
  reader.Read({"use_sliding_window"}, is_on);
  reader.Read({"max_window_layers"}, first);
  reader.Read({"sliding_window"}, window);
  const bool is_written = reader.Member("sliding_window") != nullptr;
  if (choice.model != nullptr && !is_written) window = choice.model->sliding_window;
  const Windows windows = WindowsOf(choice.model, first);
  const bool is_off = choice.model != nullptr && (windows == Windows::kFromMaxWindowLayers ||
                                                  windows == Windows::kOfEveryLayerIfUsed);
  if (!is_on.value_or(!is_off)) {
    if (type != kSlides) return;
    return status.Update(Invalid("use_sliding_window is ", is_on ? "false" : "missing",
                                 "; it must be true, because the layer's type is ", kSlides));
  }
  if (!window) {
    if (type != kSlides) return;
    return status.Update(
        Invalid("sliding_window is missing; a layer of type ", kSlides, " needs it"));
  }
  if (*window < 1) {
    status.Update(Invalid("sliding_window is ", *window, "; it must be null or at least 1"));
  }
  if (windows == Windows::kNone) {
    return status.Update(Invalid("sliding_window is ", *window, "; model_type ", choice.model->name,
                                 " has no window"));
  }
  if (HasWindow(windows, type, first, choice, status)) settings.sliding_window = window;
}

bool HasPart(absl::string_view prefix, absl::string_view part) {
  const std::vector<absl::string_view> parts = absl::StrSplit(prefix, '.');
  return std::find(parts.begin(), parts.end(), part) != parts.end();
}

// Whether a class of the architectures generates text token by token.
bool IsGenerator(const Json* architectures) {
  if (architectures == nullptr || !architectures->is_array()) return false;
  return std::any_of(architectures->begin(), architectures->end(), [](const Json& name) {
    return name.is_string() && (absl::EndsWith(name.get_ref<const std::string&>(), "ForCausalLM") ||
                                absl::EndsWith(name.get_ref<const std::string&>(), "LMHeadModel"));
  });
}

// Whether the layer is causal. `is_own` is rapt.is_causal, which decides.
std::optional<bool> ReadDirection(ObjectReader& reader, const LayerSettings& settings,
                                  std::optional<bool> is_own, absl::Status& status) {
  const ModelType* const model = settings.choice.model;
  std::optional<bool> is_causal, is_decoder;
  reader.Read({"is_causal"}, is_causal);
  reader.Read({"is_decoder"}, is_decoder);
  const bool is_generator = IsGenerator(reader.Find({"architectures"}));
  if (is_own) return is_own;
  if (settings.is_cross_attention) return false;
  if (model == nullptr) {
    if (is_causal) return is_causal;
    return is_decoder.value_or(false) || is_generator ? std::optional(true) : std::nullopt;
  }
  const std::string& prefix = settings.choice.prefix;
  switch (model->direction) {
    case Direction::kCausal:
      return is_causal.value_or(true);
    case Direction::kBidirectional:
      return false;
    case Direction::kIfDecoder:
      return is_decoder.value_or(false);
    case Direction::kByStack:
      break;
  }
  if (HasPart(prefix, "decoder")) return true;
  if (!HasPart(prefix, "encoder")) {
    status.Update(Invalid("rapt.prefix is '", prefix.substr(0, kMaxShownBytes), "'; of model_type ",
                          model->name,
                          " it must have encoder or decoder, or rapt.is_causal must be given"));
  }
  return false;
}

void ReadHuggingFace(ObjectReader& reader, LayerSettings& settings, absl::Status& status) {
  const ModelType* const model = settings.choice.model;
  reader.Read({"hidden_size", "n_embd", "d_model"}, settings.embed_size, kSize);
  reader.Read({"num_attention_heads", "n_head", "num_heads"}, settings.query_heads, kSize);
  reader.Read({"num_key_value_heads"}, settings.kv_heads, kSize);
  reader.Read({"head_dim", "d_kv"}, settings.head_size, kSize);
  reader.Read({"rms_norm_eps"}, settings.norm_epsilon);
  reader.Read({"relative_attention_max_distance"}, settings.max_distance, kSize);
  reader.Read({"pad_token_id"}, settings.pad_token_id);
  if (model == nullptr || model->attention_multiplier) {  // Granite's
    reader.Read({"attention_multiplier"}, settings.scale);
  }
  if (model != nullptr) {
    if (!settings.scale) settings.scale = model->scale ? model->scale : model->attention_multiplier;
    if (!settings.norm_epsilon) settings.norm_epsilon = model->norm_epsilon;
  }
  ReadRope(reader, settings, status);
  RejectOtherAttention(reader);
  CheckNoRopeLayers(reader, settings.choice, status);
  ReadWindow(reader, settings, status);
  if (const auto part = settings.rotary_factor; part && !(*part > 0 && *part <= 1)) {
    status.Update(Invalid("partial_rotary_factor is ", *part, "; it must be in (0, 1]"));
  }
}

constexpr const char* kOwnNames[] = {"prefix",       "naming",      "is_causal",      "scale",
                                     "pad_token_id", "interleaved", "positional_base"};

// The object "rapt"; an empty one if there is none.
const Json& OwnOf(const Json& root, absl::Status& status) {
  static const auto* const empty = new Json(Json::object());
  const auto own = root.find("rapt");
  if (own == root.end()) return *empty;
  if (!own->is_object()) {
    status.Update(Invalid("rapt is ", TextOf(*own), "; it must be an object"));
    return *empty;
  }
  for (const auto& [name, value] : own->items()) {
    const bool is_known =
        std::find(std::begin(kOwnNames), std::end(kOwnNames), name) != std::end(kOwnNames);
    if (is_known) continue;
    status.Update(Invalid("rapt.", name.substr(0, kMaxShownBytes), " is unknown; rapt may have ",
                          absl::StrJoin(kOwnNames, ", ")));
  }
  return *own;
}

// Reads what overrides the model; returns rapt.is_causal.
std::optional<bool> ReadOwn(const Json& own, LayerSettings& settings, absl::Status& status) {
  ObjectReader reader(own, "rapt.", status);
  std::optional<bool> is_causal;
  reader.Read({"is_causal"}, is_causal);
  reader.Read({"scale"}, settings.scale);
  reader.Read({"pad_token_id"}, settings.pad_token_id);
  reader.Read({"interleaved"}, settings.interleaved);
  reader.Read({"positional_base"}, settings.positional_base);
  return is_causal;
}

// --- The model -----------------------------------------------------------------------------------

constexpr char kText[] = "text_config";

// A file, and the object in it that describes the layer's model.
struct File {
  Json root;
  bool has_text = false;  // the object is text_config

  const Json& model() const { return has_text ? root[kText] : root; }
  std::string path() const { return has_text ? absl::StrCat(kText, ".") : ""; }
};

absl::StatusOr<File> Read(absl::string_view json) {
  if (json.size() > kMaxConfigBytes) {
    return Invalid("the file has ", json.size(), " bytes; at most ", kMaxConfigBytes,
                   " are allowed");
  }
  // Python writes numbers that are infinite or NaN.
  RAPT_ASSIGN_OR_RETURN(Json root, ParseStrictJson(json, JsonNumberSyntax::kNonFinite));
  if (!root.is_object()) return Invalid("the file is not a JSON object");
  File file{.root = std::move(root)};
  const auto text = file.root.find(kText);
  file.has_text = text != file.root.end() && text->is_object();
  return file;
}

// Rejects models that a layer is not known to compute; rapt.naming lets them pass.
const ModelType* ReadModelType(const File& file, absl::Status& status) {
  std::string type, outer;
  ObjectReader reader(file.model(), file.path(), status);
  ObjectReader root(file.root, "", status);
  reader.Read({"model_type"}, type);
  root.Read({"model_type"}, outer);
  const auto unknown = [&](absl::string_view path, const std::string& name) {
    status.Update(Invalid(path, "model_type is ", name.substr(0, kMaxShownBytes),
                          ", whose attention a layer is not known to compute; rapt layer --help "
                          "lists the models that are, and rapt.naming takes the file as a naming"));
    return nullptr;
  };
  if (file.has_text && !HasTextModel(outer)) return unknown("", outer.empty() ? "missing" : outer);
  if (root.Find({"auto_map"}) != nullptr) {
    status.Update(
        Invalid("auto_map says that the model has code of its own; rapt.naming takes the "
                "file as a naming"));
  }
  const ModelType* const model = FindModelType(type);
  if (model != nullptr || !status.ok()) return model;
  if (!type.empty()) return unknown(file.path(), type);
  if (file.has_text || reader.Find({"architectures"}) != nullptr) {
    status.Update(Invalid(file.path(), "model_type is missing; it must say what ",
                          file.has_text ? "the text model" : "architectures", " computes"));
  }
  return nullptr;
}

// text_config describes the text model only.
void CheckTextPrefix(absl::string_view prefix, absl::Status& status) {
  if (HasPart(prefix, "language_model") || absl::StartsWith(prefix, "model.layers.")) return;
  status.Update(Invalid("rapt.prefix is '", prefix.substr(0, kMaxShownBytes),
                        "'; with text_config it must have language_model, or begin with "
                        "model.layers."));
}

LayerChoice ReadChoice(const File& file, const std::optional<std::string>& prefix,
                       absl::Status& status) {
  LayerChoice choice;
  ObjectReader own(OwnOf(file.root, status), "rapt.", status);
  own.Read({"prefix"}, choice.prefix);
  own.Read({"naming"}, choice.naming);
  if (prefix) choice.prefix = *prefix;
  if (choice.naming.empty()) {
    choice.model = ReadModelType(file, status);
    return choice;
  }
  absl::Status ignored;
  choice.model = ReadModelType(file, ignored);
  if (!ignored.ok() || (choice.model != nullptr && choice.model->naming != choice.naming)) {
    choice.model = nullptr;
  }
  return choice;
}

}  // namespace

absl::StatusOr<LayerChoice> ParseLayerChoice(absl::string_view json) {
  RAPT_ASSIGN_OR_RETURN(const File file, Read(json));
  absl::Status status;
  LayerChoice choice = ReadChoice(file, std::nullopt, status);
  if (!status.ok()) return status;
  return choice;
}

absl::StatusOr<LayerSettings> ParseLayerSettings(absl::string_view json,
                                                 const std::optional<std::string>& prefix) {
  RAPT_ASSIGN_OR_RETURN(const File file, Read(json));
  absl::Status status;
  LayerSettings settings;
  settings.choice = ReadChoice(file, prefix, status);
  const std::string& own_prefix = settings.choice.prefix;
  settings.is_cross_attention =
      HasPart(own_prefix, "crossattention") || HasPart(own_prefix, "EncDecAttention");
  if (file.has_text) CheckTextPrefix(own_prefix, status);
  ObjectReader reader(file.model(), file.path(), status);
  for (const char* name : {"model_type", "auto_map", "rapt"}) reader.Member(name);
  ReadHuggingFace(reader, settings, status);
  const std::optional<bool> is_causal = ReadOwn(OwnOf(file.root, status), settings, status);
  settings.is_causal = ReadDirection(reader, settings, is_causal, status);
  reader.AppendUnread(settings.unread);
  if (settings.choice.model == nullptr) RejectUnknown(settings.unread, status);
  if (file.has_text) {
    ObjectReader root(file.root, "", status);
    for (const char* name : {"model_type", "auto_map", "rapt", kText}) root.Member(name);
    root.AppendUnread(settings.unread);
  }
  if (!status.ok()) return status;
  return settings;
}

}  // namespace rapt
