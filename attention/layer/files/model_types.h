// The models of Hugging Face's Transformers whose attention a layer computes: what their classes
// say that config.json may leave out. A test compares each with its class (torch_layer_cases.py).
#ifndef RAPT_ATTENTION_LAYER_FILES_MODEL_TYPES_H_
#define RAPT_ATTENTION_LAYER_FILES_MODEL_TYPES_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace rapt {

// Whether a token sees later ones.
enum class Direction : uint8_t {
  kCausal,         // unless is_causal is false
  kBidirectional,  // always
  kIfDecoder,      // causal if is_decoder is true, apart from cross-attention
  kByStack,        // causal in the decoder's self-attention; the prefix names the stack
};

// Which layers of a model have its sliding_window.
enum class Windows : uint8_t {
  kNone,                 // the class has none
  kListed,               // those of layer_types
  kOfEveryLayer,         // all
  kOfEveryLayerIfUsed,   // all, if use_sliding_window is true
  kFromMaxWindowLayers,  // those from a number on, or of layer_types, if use_sliding_window is true
};

// Where the table of relative_attention_bias is.
enum class TablePlace : uint8_t {
  kNone,        // the model has none
  kFirstBlock,  // among the tensors of block 0 of the stack; every block of it uses the table
  kOwn,         // each block has one
  kEncoder,     // beside the blocks of the encoder, for all of them
};

struct ModelType {
  absl::string_view name;  // model_type
  absl::string_view naming;
  Direction direction = Direction::kCausal;
  std::optional<double> rope_theta = std::nullopt;     // absent: no rotary embedding
  bool needs_rope_theta = false;                       // the default of version 4 is another
  bool scales_rope = false;                            // unless the file says otherwise
  bool interleaved = false;                            // of rotary embedding
  std::optional<double> rotary_factor = std::nullopt;  // absent: whole heads, always
  bool rope_by_type = false;        // rotary embedding if position_embedding_type is rope
  bool lists_rope_layers = false;   // no_rope_layers has to be written
  bool has_text_positions = false;  // mrope, whose positions are equal without pictures
  Windows windows = Windows::kNone;
  std::optional<int64_t> sliding_window = std::nullopt;
  std::optional<double> attention_multiplier = std::nullopt;  // absent: the class does not read it
  std::optional<double> scale = std::nullopt;                 // absent: 1/√D
  TablePlace bias_table = TablePlace::kNone;
  double norm_epsilon = 1e-6;
};

// By naming, then by name.
absl::Span<const ModelType> ModelTypes();

// Returns null if there is none of this name.
const ModelType* FindModelType(absl::string_view name);

// Whether the model has a text model in text_config, whose attention does not depend on the other
// parts.
bool HasTextModel(absl::string_view model_type);

// "bert: bert, roberta; gpt2: gpt2; in text_config of: llava"
std::string ModelTypesText();

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_MODEL_TYPES_H_
