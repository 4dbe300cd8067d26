// Calls of LinearAttend: linear attention, the ONNX operator LinearAttention-27.
#ifndef RAPT_CLIENT_RAPT_LINEAR_H_
#define RAPT_CLIENT_RAPT_LINEAR_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "rapt/choices.h"
#include "rapt/tensor.h"

namespace rapt::client {

using rapt::FeatureMap;
using rapt::UpdateRule;

// T tokens; d_k and d_v: head sizes of keys and values; features: d_k, or those of kFavor.
struct LinearCall {
  TensorView query = {};                           // [B, T, Hq * d_k]
  TensorView key = {};                             // [B, T, Hkv * d_k], of query's type
  TensorView value = {};                           // [B, T, Hkv * d_v], of query's type
  std::optional<TensorView> past_state = {};       // [B, Hkv, features, d_v]
  std::optional<TensorView> decay = {};            // [B, T, Hkv] or [B, T, Hkv * d_k], at most 0
  std::optional<TensorView> beta = {};             // [B, T, Hkv] or [B, T, 1]
  std::optional<TensorView> projection = {};       // [num_features, d_k], of kFavor
  std::optional<TensorView> past_normalizer = {};  // [B, Hkv, features], with a normalized output
  std::vector<int64_t> key_lengths = {};  // [B]: later tokens do not count; empty: all tokens do

  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  UpdateRule update_rule = UpdateRule::kGatedDelta;
  double scale = 0;        // 0: 1 / sqrt(d_k)
  int64_t chunk_size = 0;  // a hint; 0: 64
  bool causal = true;      // false: every query sees all tokens; kLinear only
  FeatureMap feature_map = FeatureMap::kNone;
  bool normalize = false;  // divide by the sum of the products with keys; kLinear only
  std::optional<int64_t> num_features = {};  // of kFavor; default floor(d_k ln d_k)
  std::optional<uint64_t> seed = {};         // of kFavor without projection
  std::optional<DType> state_type = {};  // of present_state; default: past_state's, else query's
  int64_t error_rows = 0;  // of kFavor: rows whose error as an estimate of softmax is measured

  bool want_present_state = false;
  bool want_present_normalizer = false;
  uint64_t priority = 0;  // as in AttendCall
};

struct LinearResult {
  Tensor output;                             // [B, T, Hq * d_v]
  std::optional<Tensor> present_state;       // the past_state of the tokens that follow
  std::optional<Tensor> present_normalizer;  // their past_normalizer
  std::optional<double> relative_error;      // with error_rows

  std::string backend;
  std::string plan;
  std::chrono::microseconds queue_time{0};
  std::chrono::microseconds compute_time{0};
};

// LinearAttend of any length on one call: the server keeps the state from message to message.
// Results equal those of calls that each have the present_state of the one before as past_state,
// bit for bit. Not thread-safe. REQUIRES: destroyed before its client; destruction cancels it
// unless it has finished.
class LinearStream {
 public:
  virtual ~LinearStream() = default;

  // Sends tokens and blocks until their outputs have arrived. The first call's attributes,
  // projection, past_state and past_normalizer hold for the whole stream; of later calls only
  // query, key, value, decay, beta, key_lengths and the wanted outputs are sent. An error ends the
  // stream, whose state is lost. FailedPrecondition after that.
  virtual absl::StatusOr<LinearResult> Attend(const LinearCall& tokens) = 0;

  // Ends the stream and returns its status. REQUIRES: call it once.
  virtual absl::Status Finish() = 0;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_LINEAR_H_
