// Attention as a layer of a model: query, key and value are projected by weight matrices, split
// into heads, attended to, and the heads' outputs are projected again.
//
//     X = X + sinusoidal encoding                  if positional_base
//     Q, K, V = heads of query Wqᵀ + bq, ...       rounded to the inputs' type
//     Q, K = RMS norm of each head                 if q_norm, k_norm
//     K, V = K and bias_k, V and bias_v            one more key, which every query sees
//     O, P = attention                             problem.h: rotary, relative bias, sinks
//     Y = O Woᵀ + bo                               rounded
//
// A projection without a matrix leaves its input as it is. So the forms of tutorials are layers,
// too: Luong's dot has no matrix and scale 1; "general" has Wq = Wᵀ alone; Bahdanau's has Wq = W2
// for the decoder's state, Wk = W1, no Wv, additive scores and additive_weight v; "concat" likewise
// with W cut in two. There is no residual and no LayerNorm.
//
// CPU only: no device has a form of a layer. A layer has no gradient of its input: dX = dQ Wq +
// dK Wk + dV Wv needs the matrices packed by columns as well, which would double the memory of
// weights, and a backward pass through rotary embedding and norms. attention.h has the gradients
// of Q, K and V.
#ifndef RAPT_ATTENTION_LAYER_LAYER_H_
#define RAPT_ATTENTION_LAYER_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/operator.h"
#include "attention/problem.h"
#include "attention/roles.h"
#include "attention/tensor_operator.h"
#include "attention/tensor_view.h"
#include "base/thread_pool.h"

namespace rapt {

// Its tensors besides Role::kQ, kK, kV, kMask, kKeyLengths and kY.
inline constexpr Slot kInputIds = Slot::Input(0);
inline constexpr Slot kLayerWeights = Slot::Output(0);
inline constexpr Slot kAveragedWeights = Slot::Output(1);

struct LayerConfig {
  int64_t embed_size = 0;                                     // E, of query
  std::optional<int64_t> key_embed_size = std::nullopt;       // Ek; absent: E
  std::optional<int64_t> value_embed_size = std::nullopt;     // Ev; absent: Ek
  int64_t query_heads = 1;                                    // Hq
  std::optional<int64_t> kv_heads = std::nullopt;             // Hkv, divides Hq; absent: Hq
  std::optional<int64_t> head_size = std::nullopt;            // D; absent: E / Hq
  std::optional<int64_t> value_head_size = std::nullopt;      // Dv; absent: D
  bool is_causal = false;                                     // of calls that do not say
  std::optional<double> scale = std::nullopt;                 // as that of Problem
  ScoreFunction score_function = ScoreFunction::kDotProduct;  // kAdditive needs additive_weight
  std::optional<double> positional_base = std::nullopt;       // of the sinusoidal encoding, > 0
  double norm_epsilon = 1e-6;                                 // of q_norm and k_norm
  std::optional<double> rope_theta = std::nullopt;            // absent: no rotary embedding
  std::optional<RopeScaling> rope_scaling = std::nullopt;     // of rope_theta
  bool interleaved = false;                                   // of rotary embedding
  int64_t rotary_embedding_dim = 0;                           // 0: D
  std::optional<int64_t> max_distance = std::nullopt;         // of relative_attention_bias
  std::optional<int64_t> pad_token_id = std::nullopt;         // keys with this id are hidden
  // Query i sees keys i - sliding_window + 1 to i; at least 1. Only of a layer that is causal,
  // whose calls must be, too; not with bias_k.
  std::optional<int64_t> sliding_window = std::nullopt;
};

// A tensor of a weights file. Non-owning.
struct WeightTensor {
  std::string name;  // for errors
  DType dtype = DType::kFloat32;
  Shape shape;
  const std::byte* data = nullptr;  // row-major, need not be aligned
  int64_t row_stride = 0;  // of a matrix: elements from one row to the next; 0: rows are adjacent
};

// x Wᵀ + b.
struct LinearWeights {
  std::optional<WeightTensor> matrix = std::nullopt;  // W, [out, in]; absent: x is not projected
  bool transposed = false;                            // W is [in, out], as GPT-2 stores it
  std::optional<WeightTensor> bias = std::nullopt;    // b, [out]; only with a matrix
};

// Each tensor is FP32, FP16, BF16 or FP64. FP64 ones make the layer take FP64 inputs only.
struct LayerWeights {
  LinearWeights q;                                    // [Hq * D, E]
  LinearWeights k;                                    // [Hkv * D, Ek]
  LinearWeights v;                                    // [Hkv * Dv, Ev]
  LinearWeights o;                                    // [any, Hq * Dv]
  std::optional<WeightTensor> bias_k = std::nullopt;  // Hkv * D numbers, with bias_v: one more key
  std::optional<WeightTensor> bias_v = std::nullopt;  // Hkv * Dv numbers
  std::optional<WeightTensor> q_norm = std::nullopt;  // [D]; only with q's matrix
  std::optional<WeightTensor> k_norm = std::nullopt;  // [D]; only with k's matrix
  std::optional<WeightTensor> sinks = std::nullopt;   // [Hq]
  // T5's, [buckets, Hq]; bidirectional in calls that are not causal.
  std::optional<WeightTensor> relative_attention_bias = std::nullopt;
  std::optional<WeightTensor> additive_weight = std::nullopt;  // D numbers
};

// The weights of a layer, packed for the projections. Immutable; may be shared by threads and
// calls.
class Layer {
 public:
  virtual ~Layer() = default;

  // With every optional size set.
  virtual const LayerConfig& config() const = 0;
  // Of Y's last axis.
  virtual int64_t output_size() const = 0;
  // The type that inputs usually have, that of the first matrix; FP32 without one.
  virtual DType dtype() const = 0;
  // Whether the layer has an FP64 tensor, so that its inputs must be FP64.
  virtual bool is_fp64() const = 0;
  // The memory that the packed weights take: what LayerBytes() returned.
  virtual int64_t bytes() const = 0;
};

// Returns the bytes that MakeLayer() will allocate. Reads no data. Returns InvalidArgument, with
// the tensor or the field of the configuration, what it is and what it must be.
absl::StatusOr<int64_t> LayerBytes(const LayerConfig& config, const LayerWeights& weights);

// Packs the weights, which are not needed afterwards. The same errors; throws std::bad_alloc.
absl::StatusOr<std::shared_ptr<const Layer>> MakeLayer(const LayerConfig& config,
                                                       const LayerWeights& weights,
                                                       ThreadPool& pool);

// Keys and values that stay between the calls of a causal layer. A call's own are projected at
// their positions, appended, and then the queries attend to all of them.
class LayerCache {
 public:
  virtual ~LayerCache() = default;

  // Returns how many tokens precede those of the call.
  virtual int64_t position() const = 0;

  // Appends keys [Sq, Hkv, D] and values [Sq, Hkv, Dv]. Called once in a run, by one task, before
  // those of attention(). `workspace` has append_bytes() bytes. An error is the cache's to keep;
  // the tasks of attention() then run all the same.
  virtual void Append(const std::byte* keys, const std::byte* values,
                      absl::Span<std::byte> workspace) = 0;
  virtual int64_t append_bytes() const = 0;

  // Returns the operator of CachedAttentionOf() with the cache's keys and values.
  virtual const TensorOperator& attention() const = 0;
};

struct LayerCall {
  // kQ is query, [B, Sq, E] of any float type; kK is key, [B, Sk, Ek], absent: query; kV is value,
  // [B, Sk, Ev], absent: key. They have one type. kMask is attn_mask: BOOL, true attends, or of a
  // float type that is added to the scores; its shape broadcasts to [B, Hq, Sq, Sk], as in
  // attention. kKeyLengths, INT64 [B], and kInputIds, INT64 [B, Sk], hide keys: from the length on,
  // and those of pad_token_id. They move neither causality nor positions, unlike attention's key
  // lengths: query i and key i are the same token.
  InputMap<std::optional<TensorSpec>> inputs;
  std::optional<bool> is_causal = std::nullopt;  // absent: LayerConfig's. Query i sees keys 0 to i
  std::optional<Dropout> dropout = std::nullopt;
  bool wants_weights = false;           // kLayerWeights, [B, Hq, Sq, T]
  bool wants_averaged_weights = false;  // kAveragedWeights, [B, Sq, T]: the mean over heads
  // Null: none. Otherwise as CachedAttentionOf() allows; outlives all runs.
  LayerCache* cache = nullptr;
};

// Outputs: kY [B, Sq, output_size] and weights, of the inputs' type. T is Sk, one more with bias_k.
// Returns InvalidArgument with the tensor or attribute, its value and the allowed values.
absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeLayerCall(
    std::shared_ptr<const Layer> layer, const LayerCall& call);

// Returns whether keys and values of the layer can stay between calls, so that calls for one token
// after the other give what one call for all of them gives. InvalidArgument names what prevents it.
absl::Status CheckCache(const Layer& layer);

// Returns the attention of a call with a cache: one item, without its position and keys. Errors as
// of MakeLayerCall(), and for what a cache does not allow: a call is causal, of one batch row and
// self-attention, without masks, lengths, ids and dropout, and has no output but Y.
absl::StatusOr<RaggedCall> CachedAttentionOf(std::shared_ptr<const Layer> layer,
                                             const LayerCall& call);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_H_
