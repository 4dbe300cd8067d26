// What an interface calls the fields of a call, so that errors and reports speak its callers'
// words.
#ifndef RAPT_ATTENTION_FIELD_NAMES_H_
#define RAPT_ATTENTION_FIELD_NAMES_H_

#include "absl/strings/string_view.h"

namespace rapt {

// The defaults are those of the ONNX operator.
struct FieldNames {
  absl::string_view q = "Q";
  absl::string_view k = "K";
  absl::string_view v = "V";
  absl::string_view y = "Y";
  absl::string_view mask = "attn_mask";
  absl::string_view past_key = "past_key";
  absl::string_view past_value = "past_value";
  absl::string_view key_lengths = "nonpad_kv_seqlen";
  absl::string_view query_heads = "q_num_heads";
  absl::string_view kv_heads = "kv_num_heads";
  absl::string_view scale = "scale";
  absl::string_view softcap = "softcap";
  absl::string_view left_window = "left_window_size";
  absl::string_view right_window = "right_window_size";
  absl::string_view dropout_probability = "dropout probability";
};

inline constexpr FieldNames kOnnxNames;

}  // namespace rapt

#endif  // RAPT_ATTENTION_FIELD_NAMES_H_
