// The inputs and outputs of one attention call, and of its backward pass.
//
//     Q, K = rotary(Q), rotary(K), when requested
//     S = scale * Q (K + relative_keys of the distance)^T,                    kScores
//         or scale * sum over d of w[d] tanh(q[d] + k[d])
//     S = softcap * tanh(S / softcap), when softcap > 0                       kSoftcapped
//     S = S + mask + attention_bias + bias of the distance;                   kBiased
//         then -inf by causality, window, lengths, block_mask, selected_indices
//     P = normalizer(S over keys); dropout, if requested                      kWeights
//     Y = P (V + relative_values of the distance)
//
// Letters in shapes: B batch; Hq query heads; Hkv key/value heads, Hq a multiple of Hkv; Sq
// queries; Sk keys; P past keys; T = P + Sk; D head size of Q and K; Dv head size of V and Y. The
// meaning is that of the ONNX operator Attention, opsets 23 to 25.
#ifndef RAPT_CLIENT_RAPT_ATTEND_H_
#define RAPT_CLIENT_RAPT_ATTEND_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "rapt/choices.h"
#include "rapt/tensor.h"

namespace rapt::client {

using rapt::Alignment;
using rapt::Layout;
using rapt::Normalizer;
using rapt::ScoreFunction;
using rapt::ScoreOutput;

// Keys around the diagonal that stay visible, with or without causality:
// i + offset - left <= j <= i + offset + right. An absent side is unbounded; 0 is the diagonal.
struct Window {
  std::optional<int64_t> left = {};
  std::optional<int64_t> right = {};
};

// Dropout on the weights, for research. The same seed drops the same weights, on every server.
struct Dropout {
  double probability = 0;  // at least 0, less than 1
  uint64_t seed = 0;
};

// Set only the fields that matter: AttendCall{.q = q, .k = k, .v = v, .causal = true}.
struct AttendCall {
  TensorView q = {};  // a float type
  TensorView k = {};  // Q's type
  TensorView v = {};  // Q's type; absent if v_head_size is set

  // Broadcast to [B, Hq, Sq, T] as numpy does: rank 1 to 4, rank 3 is [Hq, Sq, T] (kBse without
  // head counts: [B, Sq, T]). kBool, or integers 0 and 1: true = attend. A float type: added to the
  // scores. A last axis of 1 broadcasts; otherwise keys beyond it are masked.
  std::optional<TensorView> mask = {};

  // Keys and values before K and V, [B, Hkv, P, D] and [B, Hkv, P, Dv]. Both or neither.
  std::optional<TensorView> past_key = {};
  std::optional<TensorView> past_value = {};

  // The number of valid keys of each batch row, 0 to Sk. Empty: all keys are valid.
  absl::Span<const int64_t> key_lengths = {};

  // A float type, broadcast like mask and added to the scores like a float mask; -inf hides a key.
  // May be combined with a mask.
  std::optional<TensorView> attention_bias = {};

  // [Hq], kFloat32 or Q's type: one more key per head with this score, which is neither scaled,
  // capped nor hidden and has no value.
  std::optional<TensorView> head_sink = {};

  // Biases by the distance j - p from a query at position p = i + offset among the T keys; kFloat32
  // or Q's type, added to the scores. At most one of alibi and these three.
  // [Hq] or [B, Hq]: -slope * |j - p|.
  std::optional<TensorView> alibi_slopes = {};
  // [N, Hq]: a bias for each bucket of distances, as in T5, whose models have scale 1.
  std::optional<TensorView> bias_table = {};
  // [1 or Hq, 2c + 1]: entry c + (j - p), where j - p is clipped to [-c, c].
  std::optional<TensorView> relative_bias = {};

  // Vectors added to key and value j by the distance j - p, clipped likewise: [1 or Hq, 2c + 1, D]
  // and [1 or Hq, 2c + 1, Dv], kFloat32 or Q's type. relative_query, shaped as q, multiplies
  // relative_keys instead of q; it is not supported in streams.
  std::optional<TensorView> relative_keys = {};
  std::optional<TensorView> relative_values = {};
  std::optional<TensorView> relative_query = {};

  // Rotary embedding of Q and K before the scores, as the ONNX operator RotaryEmbedding-23 on the
  // first r numbers of each head, rounded to their type; past_key is rotated already, present_key
  // has the rotated K. Both caches or rope_theta; kFloat32 or Q's type. [M, r/2] has a row for each
  // position, [B, S, r/2] one for each token; then S = Sq, and = Sk unless rotary_keys is false.
  // The tensors are not supported in streams.
  std::optional<TensorView> cos_cache = {};
  std::optional<TensorView> sin_cache = {};
  // kInt64, [B, Sq] and [B, Sk]. Absent: p of a query, P plus the index of a key.
  std::optional<TensorView> position_ids = {};
  std::optional<TensorView> key_position_ids = {};

  // [1 or Hq, D], kFloat32 or Q's type: the weights of additive scores, set only with them.
  std::optional<TensorView> additive_weight = {};

  // [Hq], kFloat32 or Q's type: the alpha of each head, with Normalizer::kEntmax and without alpha.
  std::optional<TensorView> head_alpha = {};
  // Query i sees key j if causality, lengths, mask, block_mask and selected_indices show it, and
  // one of: the window shows it, j < prefix_keys, global_mask[j], or global_mask[p] of the query's
  // position p, false for p outside [0, T). Of these, only prefix_keys is supported in streams.
  // rapt/patterns.h makes common block masks and masks.
  // kBool [1 or B, 1 or Hq, Sq / block_q, T / block_k], rounded up: entry [i / block_q, j /
  // block_k] shows key j to query i.
  std::optional<TensorView> block_mask = {};
  // kInt32 [B, 1 or Hkv, Sq, N]: the only keys that a query may see, each once; -1 is unused.
  std::optional<TensorView> selected_indices = {};
  // kBool [B, T].
  std::optional<TensorView> global_mask = {};

  Layout layout = Layout::kByRank;
  int64_t query_heads = 0;  // for kBse; in other layouts 0, or as in the shape
  int64_t kv_heads = 0;
  std::optional<double> scale = {};  // any finite number; absent: 1 / sqrt(D), or 1 if additive
  double softcap = 0;                // 0: none; else positive
  bool causal = false;
  Alignment alignment = Alignment::kTopLeft;
  Window window = {};
  bool softmax_in_fp64 = false;  // always true for kFloat64 inputs
  std::optional<Dropout> dropout = {};
  bool alibi = false;                        // alibi_slopes with the default slopes
  bool is_bidirectional = false;             // half of the buckets of bias_table are for later keys
  std::optional<int64_t> max_distance = {};  // of bias_table; absent: 128

  // V is the first v_head_size numbers of each row of k, and likewise of past_key; v, past_value
  // and present_value do not exist. Not supported in streams.
  std::optional<int64_t> v_head_size = {};

  bool interleaved = false;               // rotates pairs (2t, 2t + 1), otherwise (t, t + r/2)
  int64_t rotary_embedding_dim = 0;       // r, even; 0: D
  std::optional<double> rope_theta = {};  // positive: angle t is position * rope_theta^(-2t/r)
  std::optional<bool> rotary_keys = {};   // false: only Q is rotated

  // kAdditive needs additive_weight and is not supported in streams.
  ScoreFunction score_function = ScoreFunction::kDotProduct;

  Normalizer normalizer = Normalizer::kSoftmax;
  std::optional<double> alpha = {};     // of kEntmax: 1 (softmax) to 2 (sparsemax)
  std::optional<int64_t> block_q = {};  // the queries and keys of an entry of block_mask
  std::optional<int64_t> block_k = {};
  int64_t prefix_keys = 0;

  // Outputs in addition to Y.
  std::optional<ScoreOutput> score_output = {};
  bool wants_lse = false;
  bool wants_present = false;

  // 1 is the most urgent; 0: the server's default, 8. Affects the order of calls in the server,
  // never their results.
  uint64_t priority = 0;
};

// How a call's tensors were transferred.
enum class Path : uint8_t {
  kMessage,
  kSharedMemory,  // all inputs and Y; other outputs were in the message
  kStream,        // in chunks; see rapt/stream.h
};

struct AttendResult {
  Tensor y;                           // Q's type, layout and rank, with Dv for D
  std::optional<Tensor> scores;       // [B, Hq, Sq, T], as requested by score_output
  std::optional<Tensor> lse;          // [B, Hq, Sq], natural logarithm; float, double for kFloat64
  std::optional<Tensor> present_key;  // [B, Hkv, T, D]
  std::optional<Tensor> present_value;  // [B, Hkv, T, Dv]

  Path path = Path::kMessage;

  std::string backend;  // the backend, "cpu"; "cudnn+cpu" if the CPU computed a part as fallback
  // Its plan, "cpu/avx512 q384 k64 s1". Equal backends and plans give equal bits, except on a GPU:
  // in a run joined with other requests, and with a fallback, results are equal within rounding
  // only.
  std::string plan;

  // Time spent on the server.
  std::chrono::microseconds queue_time{0};
  std::chrono::microseconds compute_time{0};
};

// The backward pass: the gradients of a loss by the inputs of a call, for its gradient by Y.
struct BackwardCall {
  AttendCall call = {};  // of the forward pass; requests no outputs in addition to Y
  TensorView dy = {};    // shaped as Y, Q's type

  // Y and lse of the forward pass, both or neither. Without them the server computes them again,
  // which is gradient checkpointing: 7 instead of 5 matrix products, and nothing to keep. That is
  // also more accurate for kFloat16 and kBFloat16, since Y was rounded. Only of kSoftmax.
  std::optional<TensorView> y = {};
  std::optional<TensorView> lse = {};
  // The gradient of lse, [B, Hq, Sq], of its type; absent: 0. Only of kSoftmax.
  std::optional<TensorView> dlse = {};

  // The gradients to return, as members of BackwardResult: {"dq", "d_head_sink"}. Empty: dq, dk and
  // dv, the last not with v_head_size. Their inputs must be set; a mask must have a float type.
  std::vector<std::string> gradients = {};
};

// Each gradient has the type, shape and layout of its input; axes that the input broadcasts are
// summed. Hidden pairs, and queries that see no key, contribute exactly 0, whatever the tensors
// contain there; but dlse of such a query adds to d_head_sink.
struct BackwardResult {
  std::optional<Tensor> dq;
  std::optional<Tensor> dk;  // with v_head_size the sum of its gradients as keys and as values
  std::optional<Tensor> dv;
  std::optional<Tensor> d_mask;
  std::optional<Tensor> d_past_key;
  std::optional<Tensor> d_past_value;
  std::optional<Tensor> d_attention_bias;
  std::optional<Tensor> d_head_sink;
  std::optional<Tensor> d_alibi_slopes;
  std::optional<Tensor> d_bias_table;
  std::optional<Tensor> d_relative_bias;
  std::optional<Tensor> d_relative_keys;
  std::optional<Tensor> d_relative_values;
  std::optional<Tensor> d_relative_query;
  std::optional<Tensor> d_additive_weight;

  // As in AttendResult. Equal backends and plans give equal bits.
  std::string backend;
  std::string plan;
  std::chrono::microseconds queue_time{0};
  std::chrono::microseconds compute_time{0};
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_ATTEND_H_
