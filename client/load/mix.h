// Which calls a load is made of.
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
  kFloat,    // [Sq, Sk], FP32 as Q is FP32, else Q's type; added to the scores
  kPadding,  // a bool [B, 1, 1, Sk] that hides the end of some rows' keys
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
  bool ragged = false;  // key lengths between 1 and `keys`, other ones for every batch row
  MaskKind mask = MaskKind::kNone;
  double weight = 1;  // its share among the mix's

  bool operator==(const CallShape&) const = default;
};

// "8x32/8x1:4096x128 BF16 causal": as ParseMix reads it.
std::string Describe(const CallShape& shape);

// What a shape that does not say has.
struct ShapeDefaults {
  client::DType dtype = client::DType::kFloat32;
  bool causal = false;
  bool ragged = false;
  MaskKind mask = MaskKind::kNone;
};

// Shapes, apart by commas or line ends; '#' begins a comment. Each is
//
//     BxHxSxD                one length; Hq/Hkv for H where they differ, Sq:Sk for S
//     followed by any of     fp32 fp16 bf16 fp64, causal, ragged, mask=bool|float|padding, weight=N
//
// or the name of a mix: "tutorial", "prefill-decode", "tiny", "short". A length may be a
// distribution: 128..2048 is uniform, ~512 lognormal around 512; `variants` lengths stand for it,
// its evenly spaced quantiles. InvalidArgument quotes the shape.
absl::StatusOr<std::vector<CallShape>> ParseMix(std::string_view text, int64_t variants,
                                                const ShapeDefaults& defaults);

// "bool", "float", "padding"; InvalidArgument otherwise.
absl::StatusOr<MaskKind> ParseMask(std::string_view text);
// "fp32", "fp16", "bf16", "fp64"; InvalidArgument otherwise.
absl::StatusOr<client::DType> ParseDType(std::string_view text);

// Which shape the n-th call of a load has: by weight, at random, and the same for the same seed
// whoever asks in whatever order. Thread-safe.
class ShapeChoice {
 public:
  ShapeChoice(const std::vector<CallShape>& shapes, uint64_t seed);
  size_t operator()(uint64_t n) const;

 private:
  std::vector<double> up_to_;  // sums of weights, the last one 1
  uint64_t seed_;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_MIX_H_
