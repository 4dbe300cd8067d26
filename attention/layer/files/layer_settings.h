// What config.json says of a layer, under Hugging Face's names and those of the object "rapt".
#ifndef RAPT_ATTENTION_LAYER_FILES_LAYER_SETTINGS_H_
#define RAPT_ATTENTION_LAYER_FILES_LAYER_SETTINGS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/layer/files/model_types.h"
#include "attention/problem.h"

namespace rapt {

inline constexpr size_t kMaxConfigBytes = 1 << 20;

// What says which tensors are the layer's.
struct LayerChoice {
  std::string prefix;                // of the names of the tensors
  std::string naming;                // empty: by the tensors
  const ModelType* model = nullptr;  // null: the settings say all
};

// Absent: neither the file nor the model says.
struct LayerSettings {
  LayerChoice choice;
  std::optional<int64_t> embed_size;
  std::optional<int64_t> query_heads;
  std::optional<int64_t> kv_heads;
  std::optional<int64_t> head_size;
  std::optional<bool> is_causal;
  std::optional<double> scale;
  std::optional<double> rope_theta;
  std::optional<double> rotary_factor;  // the part of a head that is rotated
  std::optional<RopeScaling> rope_scaling;
  std::optional<int64_t> sliding_window;  // of this layer of the model
  std::optional<bool> interleaved;
  std::optional<double> norm_epsilon;
  std::optional<int64_t> max_distance;
  std::optional<int64_t> pad_token_id;
  std::optional<double> positional_base;
  bool is_cross_attention = false;  // by the prefix
  std::vector<std::string> unread;  // names of the file that are not read
};

// Reads which tensors are the layer's. Errors as of ParseLayerSettings().
absl::StatusOr<LayerChoice> ParseLayerChoice(absl::string_view json);

// Reads the text of config.json, with another prefix if there is one. With a model_type of
// ModelTypes(), what the file leaves out is as in the model's class, and other names are ignored.
// Returns InvalidArgument with the name, the value and what is allowed: for text that is no JSON, a
// value of the wrong kind or size, an unknown name in "rapt", different values of one setting,
// another model_type unless rapt.naming is given, without one any name that may change attention,
// and settings that change attention in a way that a layer does not compute. The numbers of
// rope_scaling are MakeLayer()'s to check.
absl::StatusOr<LayerSettings> ParseLayerSettings(
    absl::string_view json, const std::optional<std::string>& prefix = std::nullopt);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_LAYER_SETTINGS_H_
