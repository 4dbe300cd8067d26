// The enumerations of calls, in the order of rapt.v1's, and the names of their values.
#ifndef RAPT_CALL_RAPT_CHOICES_H_
#define RAPT_CALL_RAPT_CHOICES_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace rapt {

// The axes of Q, K, V and Y. Masks, past, present, scores and lse do not depend on it.
enum class Layout : uint8_t {
  kByRank,  // rank 4 is kBhsd, rank 3 is kBse
  kBhsd,    // [B, H, S, D]
  kBshd,    // [B, S, H, D]
  kBse,     // [B, S, H * D] with the numbers of heads; without them: one head
};

// Where the queries are: query i is at position i + offset among the T keys. Causality
// (j <= i + offset), the window, biases and vectors by distance, and rotary embedding without ids
// use this position. One causal query sees the first of five keys with kTopLeft, and all five with
// kBottomRight.
enum class Alignment : uint8_t {
  // offset = P. Key lengths hide keys and move no query: an entry that is padded at its end gets
  // the result of the entry alone.
  kTopLeft,
  // offset = T - Sq: the last query is at the last key. With key lengths, at the last key of its
  // entry: offset = P + max(L, min(Sq, Sk)) - Sq, where L is the entry's length. An entry with
  // fewer keys than queries has padded queries, too, and its first query is at its first key.
  kBottomRight,
  // The rule of the ONNX operator, as in the model `attention` of the Open Inference Protocol:
  // offset = P with a past; else L - Sq with lengths; else 0.
  kOnnx,
};

// How a query and a key are compared.
enum class ScoreFunction : uint8_t {
  kDotProduct,  // q . k
  kAdditive,    // the sum over d of w[d] tanh(q[d] + k[d]), as in Bahdanau et al. 2014
};

// Turns the scores S of a row into weights that sum to 1. All but kSoftmax give exactly 0 to keys
// with low scores, whose V then does not matter: P = max((alpha - 1) S - tau, 0)^(1 / (alpha - 1)),
// with tau such that the sum of P is 1 (Peters et al. 2019). They have no lse and no head_sink, and
// keys cannot stream.
enum class Normalizer : uint8_t {
  kSoftmax,    // alpha = 1
  kSparsemax,  // alpha = 2
  kEntmax15,   // alpha = 1.5
  kEntmax,     // alpha is given, for all heads or for each
};

// An intermediate result, [B, Hq, Sq, T] in Q's type. The values are those of ONNX's
// qk_matmul_output_mode.
enum class ScoreOutput : uint8_t {
  kScores,
  kSoftcapped,
  kBiased,  // contains -inf for masked keys
  kWeights,
};

// The rule of linear attention. For each token, with the state S of a head:
// S = e^decay S + k u^T, output = scale S^T q.
enum class UpdateRule : uint8_t {
  kGatedDelta,  // with decay and beta; u = beta (v - (e^decay S)^T k)
  kLinear,      // u = v
  kGated,       // with decay; u = v
  kDelta,       // with beta
};

// What stands for queries and keys in linear attention.
enum class FeatureMap : uint8_t {
  kNone,
  kElu1,   // x + 1 if x > 0, else e^x
  kRelu,   // max(x, 0)
  kFavor,  // e^(w . a - |a|^2 / 2) / sqrt(m) for each of the m rows w of the projection, a = x
           // sqrt(scale): positive random features, Choromanski et al. 2021; kLinear only
};

enum class LshForm : uint8_t {
  kReformer,  // of Hugging Face: queries are keys, chunks see their neighbours
  kSimple,    // of tutorials: hashes keys, chunks see themselves alone, rounds count equally
};

// What arrives in chunks.
enum class Streaming : uint8_t {
  kKeys,     // K and V; a chunk has the columns of mask and attention_bias of its keys
  kQueries,  // Q; a chunk has the rows of mask and attention_bias of its queries
};

// The names of an enumeration's values, in their order: those of parameters, flags and texts; in
// capitals, without prefix, of rapt.v1.
template <typename Enum>
inline constexpr std::array<absl::string_view, 0> kNamesOf = {};
template <>
inline constexpr std::array<absl::string_view, 4> kNamesOf<Layout> = {"unspecified", "bhsd", "bshd",
                                                                      "bse"};
template <>
inline constexpr std::array<absl::string_view, 3> kNamesOf<Alignment> = {"top_left", "bottom_right",
                                                                         "onnx"};
template <>
inline constexpr std::array<absl::string_view, 2> kNamesOf<ScoreFunction> = {"dot_product",
                                                                             "additive"};
template <>
inline constexpr std::array<absl::string_view, 4> kNamesOf<Normalizer> = {"softmax", "sparsemax",
                                                                          "entmax15", "entmax"};
template <>
inline constexpr std::array<absl::string_view, 4> kNamesOf<ScoreOutput> = {"scores", "softcapped",
                                                                           "biased", "weights"};
template <>
inline constexpr std::array<absl::string_view, 4> kNamesOf<UpdateRule> = {"gated_delta", "linear",
                                                                          "gated", "delta"};
template <>
inline constexpr std::array<absl::string_view, 4> kNamesOf<FeatureMap> = {"none", "elu1", "relu",
                                                                          "favor"};
template <>
inline constexpr std::array<absl::string_view, 2> kNamesOf<LshForm> = {"reformer", "simple"};

template <typename Enum>
requires(!kNamesOf<Enum>.empty()) constexpr absl::string_view NameOf(Enum value) {
  return kNamesOf<Enum>[static_cast<size_t>(value)];
}

}  // namespace rapt

#endif  // RAPT_CALL_RAPT_CHOICES_H_
