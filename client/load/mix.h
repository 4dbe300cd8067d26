// The mix of calls in a load.
#ifndef RAPT_CLIENT_LOAD_MIX_H_
#define RAPT_CLIENT_LOAD_MIX_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "rapt/tensor.h"

namespace rapt::load {

enum class MaskKind : uint8_t {
  kNone,
  kBool,     // [Sq, Sk], two thirds of the keys visible, the first always
  kFloat,    // [Sq, Sk] of Q's type, added to the scores
  kPadding,  // bool [B, 1, 1, Sk], hides the last keys of some rows
};

struct CallShape {
  int64_t batch = 1;
  int64_t query_heads = 1;
  int64_t kv_heads = 1;
  int64_t queries = 1;
  int64_t keys = 1;
  int64_t head_size = 1;
  client::DType dtype = client::DType::kFloat32;
  bool causal = false;
  bool ragged = false;  // random key lengths from 1 to `keys` for each batch row
  MaskKind mask = MaskKind::kNone;
  double weight = 1;  // relative to the other shapes

  bool operator==(const CallShape&) const = default;
};

// Returns "8x32/8x1:4096x128 BF16 causal", in the syntax of ParseMix().
std::string Describe(const CallShape& shape);

// Defaults for properties that a shape does not state.
struct ShapeDefaults {
  client::DType dtype = client::DType::kFloat32;
  bool causal = false;
  bool ragged = false;
  MaskKind mask = MaskKind::kNone;
};

// Parses shapes separated by commas or newlines; '#' begins a comment. Each is
//
//     BxHxSxD                one length; Hq/Hkv for H if they differ, Sq:Sk for S
//     followed by any of     fp32 fp16 bf16 fp64, causal, ragged, mask=bool|float|padding, weight=N
//
// or the name of a mix: "tutorial", "prefill-decode", "tiny", "short". A length may be a
// distribution: 128..2048 is uniform, ~512 is lognormal with median 512. It is replaced by
// `variants` lengths, its evenly spaced quantiles. InvalidArgument quotes the shape.
absl::StatusOr<std::vector<CallShape>> ParseMix(std::string_view text, int64_t variants,
                                                const ShapeDefaults& defaults);

// Parses "none", "bool", "float" or "padding". InvalidArgument otherwise.
absl::StatusOr<MaskKind> ParseMask(std::string_view text);
// Parses "fp32", "fp16", "bf16" or "fp64". InvalidArgument otherwise.
absl::StatusOr<client::DType> ParseDType(std::string_view text);

// Chooses the shape of the n-th call at random, by weight. Deterministic for a seed and n.
// Thread-safe.
class ShapeChoice {
 public:
  ShapeChoice(const std::vector<CallShape>& shapes, uint64_t seed);
  size_t operator()(uint64_t n) const;

 private:
  std::vector<double> up_to_;  // cumulative weights, the last one 1
  uint64_t seed_;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_MIX_H_
