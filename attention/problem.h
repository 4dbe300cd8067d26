// What to compute: shapes, types, mask, scale, window. No data.
//
//     Q, K = rotary(Q), rotary(K)          if requested
//     S = scale * Q (K + Rk[j-p])^T,       kScores
//         or additive:
//         scale * sum w tanh(q + k)
//     S = softcap * tanh(S / softcap)      kSoftcapped   (only when softcap > 0)
//     S = S + mask + bias + relative[j-p];
//         causal, window and length limits
//         give -inf, and so do block mask
//         and selection                    kBiased
//     P = normalizer(S over keys, sink)    kWeights      (softmax, sparsemax or entmax)
//     O = P (V + Rv[j-p])
//
// or, with Problem::backward, the gradients of its inputs.
//
// Names and semantics are those of the ONNX operator Attention (opsets 23 to 25).
#ifndef RAPT_ATTENTION_PROBLEM_H_
#define RAPT_ATTENTION_PROBLEM_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/field_names.h"
#include "attention/roles.h"
#include "attention/tensor_view.h"
#include "rapt/choices.h"

namespace rapt {

class Backend;

// A mask or bias broadcast to [B, Hq, Sq, T]: each of the first three axes is 1 or full. The last
// one is 1 (broadcast), or at most T; keys beyond it are masked.
struct MaskShape {
  DType dtype = DType::kBool;  // kBool: true = attend. A float type: added to the scores.
  std::array<int64_t, 4> dims = {1, 1, 1, 1};
};

// alibi_slopes: -slope * |j - p| is added to the score of key j for a query at position p.
struct AlibiSlopes {
  DType dtype = DType::kFloat32;  // FP32 or Q's
  int64_t batch = 1;              // B, or 1 for [Hq]
};

inline constexpr int64_t kDefaultMaxDistance = 128;

// bias_table of T5, [N, Hq]: a bias for each bucket of distances. With m exact buckets, d is |j -
// p| if bidirectional, else max(p - j, 0): bucket d if d < m, else m + floor(ln(d / m) /
// ln(max_distance / m) * (N - m)), at most N - 1. Bidirectional halves N; later keys use the second
// half. m is half of this N.
struct BiasTable {
  DType dtype = DType::kFloat32;  // FP32 or Q's
  int64_t buckets = 2;            // N, at least 2; 4 if bidirectional
};

// relative_bias, [1 or Hq, 2c + 1]: entry c + (j - p), where j - p is clipped to [-c, c].
struct RelativeBias {
  DType dtype = DType::kFloat32;  // FP32 or Q's
  int64_t heads = 1;
  int64_t length = 1;  // 2c + 1
};

// relative_keys and relative_values, [1 or Hq, 2c + 1, D or Dv] (Shaw et al. 2018): row c + (j -
// p), where j - p is clipped to [-c, c], is added to key or value j of a query at position p.
struct RelativeVectors {
  DType dtype = DType::kFloat32;  // FP32 or Q's
  int64_t heads = 1;
  int64_t length = 1;  // 2c + 1
};

// cos_cache and sin_cache, which have the same shape.
struct RotaryCache {
  DType dtype = DType::kFloat32;  // FP32 or Q's
  // Absent: [rows, pairs], a row for each position. B: [B, rows, pairs], a row for each token.
  std::optional<int64_t> batch = std::nullopt;
  int64_t rows = 0;
  int64_t pairs = 0;  // r / 2

  constexpr bool by_position() const { return !batch.has_value(); }
};

// How rope_theta's angles are stretched for sequences longer than those of training. The frequency
// of a pair is divided by `factor`, or kept if the pair turns often within `original_length`
// tokens:
//
//     kLinear   all are divided (Chen et al. 2023)
//     kLlama3   pairs that turn fewer than `slow` times are divided,
//               those that turn more than `fast` times are kept;
//               in between the result is linear in the turns
//     kYarn     the same, linear in the pair's index (Peng et al. 2023)
struct RopeScaling {
  enum class Type : uint8_t { kLinear, kLlama3, kYarn };

  Type type = Type::kLinear;
  double factor = 1;           // at least 1
  double original_length = 1;  // the longest sequence of training; at least 1
  double slow = 1;             // positive; at most `fast`, for kLlama3 below it
  double fast = 1;
  bool truncate = true;         // kYarn: the slope begins and ends at whole indices
  double attention_factor = 1;  // positive: cosines and sines are multiplied by it
};

// "linear", "llama3", "yarn"
absl::string_view NameOf(RopeScaling::Type type);

// additive_weight, [1 or Hq, D]: w.
struct AdditiveWeight {
  DType dtype = DType::kFloat32;  // FP32 or Q's
  int64_t heads = 1;
};

// selected_indices, INT32 [B, 1 or Hkv, Sq, N]: the only keys that a query may see, in any order;
// -1 is unused.
struct SelectedIndices {
  int64_t heads = 1;
  int64_t count = 0;  // N
};

// Dropout on the weights: keep when draw >= p * 2^32, scale by 1 / (1 - p). The draw is
// Philox4x32-10 with key = seed and counter = (j / 4, i, h, b), lane j % 4.
struct Dropout {
  double probability = 0;  // [0, 1)
  uint64_t seed = 0;
};

// The largest size of any axis. It exceeds any memory, but sums of a few axes and windows, and the
// bytes of a worker's block of 512 rows, fit int64.
inline constexpr int64_t kMaxAxis = int64_t{1} << 40;

// Marks a problem as part of a larger one: a range of its queries against a range of its keys.
// Causality, window, key lengths and dropout use positions in the full problem.
struct Section {
  int64_t first_query = 0;
  int64_t first_key = 0;  // counted from the first past key
  // Of the full problem.
  int64_t query_length = 0;
  int64_t key_length = 0;
  int64_t past_length = 0;
};

// The backward pass: gradients of the inputs for a gradient dY of O. With Z the dropout's 0 or
// 1 / (1 - p), and delta = sum dY O - dlse of a row (Dao 2023):
//
//     P = e^(S - lse)                        without dropout
//     G = Z dY (V + Rv)^T
//     dX = P (G - delta)                     of mask, bias and biases by distance
//     dS = dX (1 - (capped S / softcap)^2)
//     dQ = scale dS (K + Rk),  dK = scale dS^T Q,  dV = (P Z)^T dY
//
// Hidden keys, and rows without a visible key, have gradients of exactly 0, whatever they contain.
// A gradient has its input's axes and type; axes that the input broadcasts are summed.
struct Backward {
  RoleSet gradients;              // those of kGradients that are wanted, at least one
  bool has_forward = false;       // Y and lse are given; otherwise they are computed again
  bool has_lse_gradient = false;  // dlse is given
};

struct Problem {
  DType dtype = DType::kFloat32;  // of Q, K, V and O; any float type

  int64_t batch = 0;            // B
  int64_t query_heads = 0;      // Hq, a multiple of Hkv; head h reads key/value head h / (Hq / Hkv)
  int64_t kv_heads = 0;         // Hkv
  int64_t query_length = 0;     // Sq
  int64_t key_length = 0;       // Sk
  int64_t past_length = 0;      // P, keys that precede the Sk new ones
  int64_t head_size = 0;        // D, of Q and K
  int64_t value_head_size = 0;  // Dv, of V and O
  // V is the first Dv numbers of each row of K, as in absorbed MLA: there are no kV, kPastValue and
  // kPresentValue.
  bool values_in_keys = false;

  std::optional<double> scale = std::nullopt;  // absent: 1 / sqrt(D), or 1 for additive scores
  double softcap = 0;                          // 0: none
  bool causal = false;
  Alignment alignment = Alignment::kTopLeft;
  int64_t left_window = -1;  // keys before the diagonal that stay visible; -1: all
  int64_t right_window = -1;
  std::optional<MaskShape> mask = std::nullopt;
  std::optional<MaskShape> bias = std::nullopt;  // attention_bias, of a float type
  bool has_key_lengths = false;                  // nonpad_kv_seqlen is given
  bool softmax_in_fp64 = false;                  // implied by fp64 inputs
  std::optional<Dropout> dropout = std::nullopt;
  // The type of head_sink, FP32 or Q's. Each head has one more key with this score, which is not
  // scaled, capped or hidden, and has no value.
  std::optional<DType> head_sink = std::nullopt;

  // Biases by the distance j - p from a query at position p among the T keys (DiagonalKey()); at
  // most one of alibi, alibi_slopes, bias_table and relative_bias. -inf hides a key.
  bool alibi = false;  // alibi_slopes 2^(-8 (h + 1) / Hq) if Hq is a power of two
  std::optional<AlibiSlopes> alibi_slopes = std::nullopt;
  std::optional<BiasTable> bias_table = std::nullopt;
  bool is_bidirectional = false;                       // of bias_table
  std::optional<int64_t> max_distance = std::nullopt;  // of bias_table; absent: 128
  std::optional<RelativeBias> relative_bias = std::nullopt;

  std::optional<RelativeVectors> relative_keys = std::nullopt;    // Rk
  std::optional<RelativeVectors> relative_values = std::nullopt;  // Rv
  // relative_query is given, which is multiplied by Rk instead of Q: scale * (Q K + relative_query
  // Rk[j-p]), as in Transformer-XL.
  bool has_relative_query = false;

  // Rotary position embedding of Q and the new K, if there is a cache or rope_theta: as the ONNX
  // operator RotaryEmbedding-23 on the first r numbers of each head, rounded to Q's type. The past
  // is rotated already. A query is at position p of DiagonalKey(), a key at its index among the T
  // keys, unless there are ids. rope_theta: the angle of pair t is position * rope_theta^(-2t/r).
  std::optional<RotaryCache> rotary_cache = std::nullopt;
  bool has_position_ids = false;      // of the queries
  bool has_key_position_ids = false;  // of the new keys
  bool interleaved = false;           // pairs (2t, 2t + 1), otherwise (t, t + r / 2)
  int64_t rotary_embedding_dim = 0;   // r, even; 0: D
  std::optional<double> rope_theta = std::nullopt;
  std::optional<RopeScaling> rope_scaling = std::nullopt;  // of rope_theta
  std::optional<bool> rotary_keys = std::nullopt;          // false: only Q is rotated

  ScoreFunction score_function = ScoreFunction::kDotProduct;
  std::optional<AdditiveWeight> additive_weight = std::nullopt;  // of additive scores only
  // Query i sees key j if causality, lengths, mask, block mask and selection show it, and one of:
  // the window shows it, j < prefix_keys, global_mask[j], or global_mask[p] of the query's position
  // p, false for p outside [0, T).
  //
  // The dims of block_mask, BOOL [1 or B, 1 or Hq, Sq / block_q, T / block_k], rounded up: entry [i
  // / block_q, j / block_k] shows key j to query i.
  std::optional<std::array<int64_t, 4>> block_mask = std::nullopt;
  std::optional<int64_t> block_q = std::nullopt;  // needed with a block mask
  std::optional<int64_t> block_k = std::nullopt;
  std::optional<SelectedIndices> selected = std::nullopt;
  int64_t prefix_keys = 0;
  bool has_global_mask = false;  // BOOL [B, T]

  // Any but softmax excludes head_sink, lse and folding. With kEntmax, either alpha or head_alpha.
  Normalizer normalizer = Normalizer::kSoftmax;
  std::optional<double> alpha = std::nullopt;
  std::optional<DType> head_alpha = std::nullopt;  // the type of kHeadAlpha, FP32 or Q's

  std::optional<ScoreOutput> score_output = std::nullopt;
  bool wants_lse = false;
  bool wants_present = false;

  // Set: gradients are computed instead of Y. Excludes the other outputs and sections.
  std::optional<Backward> backward = std::nullopt;

  // K and V are views of INT8 whose last axis is a row of q8_0.h. Only of parts of ragged calls;
  // Validate() does not accept such views.
  bool q8_0 = false;

  // Set for a part of a larger problem. Such a part has no past and no present outputs.
  std::optional<Section> section = std::nullopt;
  // The result is merged into Arguments::state with those of other sections of the same queries
  // instead of being written to Y and lse. Weights are then unavailable, because they need all
  // keys.
  bool folds = false;

  int64_t total_keys() const { return past_length + key_length; }  // T
  bool has_relative() const { return alibi || alibi_slopes || bias_table || relative_bias; }
  bool has_relative_vectors() const { return relative_keys || relative_values; }
  bool has_rotary() const { return rotary_cache || rope_theta; }
  bool rotates_keys() const { return has_rotary() && rotary_keys.value_or(true); }
  int64_t rotary_size() const {
    return rotary_embedding_dim > 0 ? rotary_embedding_dim : head_size;
  }
  bool is_additive() const { return score_function == ScoreFunction::kAdditive; }
  bool has_window() const { return left_window >= 0 || right_window >= 0; }
  // Returns whether some keys or queries are exempt from the window.
  bool has_exemptions() const { return has_window() && (prefix_keys > 0 || has_global_mask); }
  // Returns whether a query may see other sets of keys than intervals, before mask and biases.
  bool is_sparse() const { return block_mask || selected || has_exemptions(); }
  int64_t group_size() const { return query_heads / kv_heads; }
  double effective_scale() const;
  // The type that scores, weights and sums are computed in: kFloat32 or kFloat64.
  DType accumulator() const {
    return dtype == DType::kFloat64 || softmax_in_fp64 ? DType::kFloat64 : DType::kFloat32;
  }
  DType lse_dtype() const { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  // Returns whether B, Hq or Sq is 0, so that there is nothing to compute. (If only T is 0, the
  // outputs are zeros.)
  bool empty() const { return batch == 0 || query_heads == 0 || query_length == 0; }
};

// Returns the problem's section, or one that covers the whole problem.
Section SectionOrFull(const Problem& problem);

// Returns InvalidArgument with the field, its value and the allowed values. The bytes of a valid
// problem's tensors, and sums of a few of them, fit int64.
absl::Status Validate(const Problem& problem, const FieldNames& names = kOnnxNames);

// Returns InvalidArgument unless a table's type is FP32 or `own`, the type of the tensor `of`.
absl::Status CheckTableType(absl::string_view name, DType dtype, DType own, absl::string_view of);

// The data of one problem. Views have the problem's shapes and any strides, but the last stride is
// 1 except in inputs that broadcast, which have stride 0 on every axis that does. Views may be
// sliced or paged if RoleInfo::source and Backend::Reads() allow it.
struct Arguments {
  InputMap<TensorView> inputs;  // without kKeyLengths
  absl::Span<const int64_t>
      key_lengths;  // [B], each in [0, Sk of the full problem]; empty if absent

  // Replaces Y and lse if the problem folds; of type Plan::state_dtype. A row whose max is -inf has
  // seen no key, and its output is undefined.
  struct State {
    MutableTensorView output;  // [B, Hq, Sq, Dv], not yet divided by sum
    MutableTensorView max;     // [B, Hq, Sq, 1], subtracted from the scores before exponentiation
    MutableTensorView sum;     // [B, Hq, Sq, 1], of exponentials
  } state;

  OutputMap<MutableTensorView> outputs;

  // If another backend computes a piece as fallback, it is stored here before the piece's task
  // ends. Null: not recorded.
  std::atomic<const Backend*>* piece_fallback = nullptr;
};

// Return the values of the past and the new keys, which may be a part of the keys. REQUIRES: the
// problem has them.
TensorView PastValuesOf(const Problem& problem, const Arguments& arguments);
TensorView ValuesOf(const Problem& problem, const Arguments& arguments);

// Checks the arguments against the problem: key lengths are in range, and every tensor of the
// problem is present with the right type and axes.
absl::Status Validate(const Problem& problem, const Arguments& arguments,
                      const FieldNames& names = kOnnxNames);

// The same for the inputs only.
absl::Status ValidateInputs(const Problem& problem, const Arguments& arguments,
                            const FieldNames& names = kOnnxNames);

// Returns InvalidArgument unless there is a length from 0 to `length` for each batch row.
absl::Status CheckLengths(absl::string_view name, absl::Span<const int64_t> lengths, int64_t batch,
                          absl::string_view length_name, int64_t length);

// The same for the key lengths only.
absl::Status ValidateKeyLengths(const Problem& problem, absl::Span<const int64_t> key_lengths,
                                const FieldNames& names = kOnnxNames);

// The same for the values of alpha only.
absl::Status ValidateAlphas(const Problem& problem, const Arguments& arguments,
                            const FieldNames& names = kOnnxNames);

// The same for the values of position_ids and key_position_ids, which must have been copied out of
// memory that others can write.
absl::Status ValidatePositions(const Problem& problem, const Arguments& arguments,
                               const FieldNames& names = kOnnxNames);

// The keys that causality, window and lengths leave visible to query i of batch row b: one interval
// [begin, end) within [0, T). The mask is applied on top of it. In a section, i and the keys count
// from the section's first query and key. With exemptions from the window, the interval is that of
// causality and lengths if all keys may be exempt, else it extends to the prefix; keys within it
// may be hidden.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};
KeyRange VisibleKeys(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b,
                     int64_t i);

// The part of that interval that the window shows, without exemptions.
KeyRange WindowKeys(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b,
                    int64_t i);

// The position of query i of batch row b among the keys, with the alignment's offset; may be
// outside [0, T). In a section, i and the key count from the section's first query and key.
// `key_lengths` is read only if PositionVaries().
int64_t DiagonalKey(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b,
                    int64_t i);

// The positions of query i and of new key j in the full problem, without ids.
int64_t QueryPosition(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b,
                      int64_t i);
int64_t KeyPosition(const Problem& problem, int64_t j);

// Returns whether the position of a query depends on the batch row.
bool PositionVaries(const Problem& problem);

}  // namespace rapt

#endif  // RAPT_ATTENTION_PROBLEM_H_
