// The ONNX operator LinearAttention-27, with feature maps (Katharopoulos et al. 2020) and random
// features of softmax attention (FAVOR+, Choromanski et al. 2021). Time is linear in the tokens;
// instead of keys, a state of d_k x d_v numbers per head is kept from token to token.
#ifndef RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_ATTENTION_H_
#define RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/mechanism/linear/linear_task.h"
#include "attention/operator_schema.h"
#include "attention/roles.h"
#include "attention/tensor_operator.h"
#include "rapt/choices.h"

namespace rapt {

// Its tensors besides Role::kQ, kK, kV, kKeyLengths and kY. T is the number of tokens; features are
// d_k, or favor's num_features m.
namespace linear {
inline constexpr Slot kPastState = Slot::Input(0);       // [B, Hkv, features, d_v]
inline constexpr Slot kPastNormalizer = Slot::Input(1);  // [B, Hkv, features]
inline constexpr Slot kDecay = Slot::Input(2);           // [B, T, Hkv] or [B, T, Hkv * d_k]
inline constexpr Slot kBeta = Slot::Input(3);            // [B, T, Hkv] or [B, T, 1]
inline constexpr Slot kProjection = Slot::Input(4);      // [m, d_k]
inline constexpr Slot kPresentState = Slot::Output(0);   // as kPastState
inline constexpr Slot kPresentNormalizer = Slot::Output(1);
inline constexpr Slot kRelativeError = Slot::Output(2);  // [1], FP32

// Returns ONNX's name, or ours where ONNX has none; empty for other slots.
absl::string_view NameOf(Slot slot);
}  // namespace linear

extern const OperatorSchema kLinearAttention;

struct LinearAttentionCall {
  // Q is [B, T, Hq * d_k], K [B, T, Hkv * d_k], V [B, T, Hkv * d_v], of one type; the others have
  // any float type. Tokens from nonpad_kv_seqlen [B] on leave the state alone, and their outputs
  // are 0.
  InputMap<std::optional<TensorSpec>> inputs;
  // Besides Y.
  bool wants_present_state = false;
  bool wants_present_normalizer = false;

  int64_t q_num_heads = 0;
  int64_t kv_num_heads = 0;
  UpdateRule update_rule = UpdateRule::kGatedDelta;
  double scale = 0;         // 0: 1 / sqrt(d_k)
  int64_t chunk_size = 64;  // a hint
  bool is_causal = true;    // false: all queries see all keys and the past state; rule linear only
  FeatureMap feature_map = FeatureMap::kNone;
  bool normalize = false;  // divide by the sum of products with keys; rule linear only; favor does
  std::optional<int64_t> num_features = std::nullopt;  // of favor; default floor(d_k ln d_k)
  std::optional<uint64_t> seed = std::nullopt;         // of a drawn projection; default 0
  std::optional<DType> state_type = std::nullopt;      // default: past_state's, else Q's
  // Rows for which the error of favor as an estimate of softmax attention is measured, without a
  // past. 0: none.
  int64_t error_rows = 0;
};

// Returns InvalidArgument with the tensor or attribute, its value and the allowed values.
absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeLinearAttention(
    const LinearAttentionCall& call);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_ATTENTION_H_
