// What config.json says of a layer, under Hugging Face's names and those of the object "rapt".
#ifndef RAPT_ATTENTION_LAYER_FILES_LAYER_SETTINGS_H_
#define RAPT_ATTENTION_LAYER_FILES_LAYER_SETTINGS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"

namespace rapt {

inline constexpr size_t kMaxConfigBytes = 1 << 20;

// Absent: the file does not say.
struct LayerSettings {
  std::string prefix;  // of the names of the tensors
  std::string naming;  // empty: by the tensors
  std::string model_type;
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
};

// Reads the text of config.json. Returns InvalidArgument with the name, the value and what is
// allowed: for a value of the wrong kind, an unknown name in "rapt", a name that is
// given twice, different values of one setting, and for settings of Hugging
// Face's models that change attention in a way that a layer does not compute. Ignores other names.
// The numbers of rope_scaling are MakeLayer()'s to check.
absl::StatusOr<LayerSettings> ParseLayerSettings(absl::string_view json);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_LAYER_SETTINGS_H_
