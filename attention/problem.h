// What to compute: shapes, types, mask, scale, window. No data.
//
//     S = scale * Q K^T                    kScores
//     S = softcap * tanh(S / softcap)      kSoftcapped   (only when softcap > 0)
//     S = S + mask + bias + relative[j-p];
//         causal, window and length limits
//         give -inf                        kBiased
//     P = softmax(S over keys and sink)    kWeights
//     O = P V
//
// Names and semantics are those of the ONNX operator Attention (opsets 23 to 25).
#ifndef RAPT_ATTENTION_PROBLEM_H_
#define RAPT_ATTENTION_PROBLEM_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/field_names.h"
#include "attention/roles.h"
#include "attention/tensor_view.h"

namespace rapt {

class Backend;

// The intermediate returned in addition to O, [B, Hq, Sq, T] in Q's type. The values are those of
// ONNX qk_matmul_output_mode.
enum class ScoreOutput : uint8_t { kScores = 0, kSoftcapped = 1, kBiased = 2, kWeights = 3 };

// Position of the causal diagonal and the window when there are more keys than queries or fewer.
enum class Alignment : uint8_t {
  kTopLeft,      // ONNX: offset = P with a past, nonpad - Sq with key lengths, else 0
  kBottomRight,  // offset = T - Sq: the last query sees the last key
};

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

  std::optional<double> scale = std::nullopt;  // 1 / sqrt(D) when absent
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

  std::optional<ScoreOutput> score_output = std::nullopt;
  bool wants_lse = false;
  bool wants_present = false;

  // Set for a part of a larger problem. Such a part has no past and no present outputs.
  std::optional<Section> section = std::nullopt;
  // The result is merged into Arguments::state with those of other sections of the same queries
  // instead of being written to Y and lse. Weights are then unavailable, because they need all
  // keys.
  bool folds = false;

  int64_t total_keys() const { return past_length + key_length; }  // T
  bool has_relative() const { return alibi || alibi_slopes || bias_table || relative_bias; }
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

// The same for the key lengths only.
absl::Status ValidateKeyLengths(const Problem& problem, absl::Span<const int64_t> key_lengths,
                                const FieldNames& names = kOnnxNames);

// The keys that causality, window and lengths leave visible to query i of batch row b: one interval
// [begin, end) within [0, T). The mask is applied on top of it. In a section, i and the keys count
// from the section's first query and key.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};
KeyRange VisibleKeys(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b,
                     int64_t i);

// The position of query i of batch row b among the keys, with the offset of causality; may be
// outside [0, T). In a section, i and the key count from the section's first query and key.
int64_t DiagonalKey(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b,
                    int64_t i);

// Returns whether the position of a query depends on the batch row.
bool PositionVaries(const Problem& problem);

}  // namespace rapt

#endif  // RAPT_ATTENTION_PROBLEM_H_
