// Reports of a server about a call, about memory and about itself. Plain values. Their texts are
// for display and may change.
#ifndef RAPT_CLIENT_RAPT_REPORTS_H_
#define RAPT_CLIENT_RAPT_REPORTS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rapt/tensor.h"

namespace rapt::client {

// The range of one step of the computation. Bounds cover finite values and are absent if there are
// none.
struct Range {
  std::optional<double> min;
  std::optional<double> max;
  int64_t nan_count = 0;
  int64_t positive_inf_count = 0;
  int64_t negative_inf_count = 0;
};

struct TensorReport {
  std::string name;  // "q"
  DType dtype = DType::kFloat32;
  Shape shape;
  int64_t elements = 0;
  Range range;
  std::optional<double> mean;  // over the finite elements
};

struct QueryRow {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t query = 0;
};

struct BackendChoice {
  std::string backend;
  bool chosen = false;
  std::string plan;             // if it could run
  int64_t workspace_bytes = 0;  // if it could run
  std::string reason;           // why it can't run, or why another backend was chosen
};

// The gradient of Q, K or V, with that of past keys and values.
struct GradientReport {
  std::string name;  // "dq"
  Range range;
  double norm = 0;                     // of the finite values
  std::vector<double> position_norms;  // at each query of dq, or at each key of dk and dv
};

// The result of each step of the definition for a call.
struct Diagnosis {
  std::string problem;  // "B=2 Hq=8 Hkv=2 Sq=128 Sk=128 P=0 D=64 Dv=64 FP32 causal"
  std::vector<TensorReport> inputs;
  Range raw_scores;                  // Q K^T, with relative_keys
  Range scaled_scores;               // after scale and softcap
  Range biased_scores;               // after the mask; negative_inf_count counts hidden pairs
  int64_t pairs = 0;                 // B * Hq * Sq * T
  int64_t masked_by_mask = 0;        // by the mask or biases, and by nothing below
  int64_t masked_by_position = 0;    // by causality, window or lengths
  int64_t masked_by_block_mask = 0;  // and not by position
  int64_t masked_by_selection = 0;   // and by neither of these
  Range weights;
  Range row_sums;                          // of the weights before dropout, rows that see a key
  int64_t empty_rows = 0;                  // query rows that see no key; their output is zero
  std::vector<QueryRow> first_empty_rows;  // a few of them
  Range output;
  std::vector<GradientReport> gradients;  // of dq, dk and dv; only of a BackwardCall
  std::vector<BackendChoice> backends;
  std::vector<std::string> warnings;  // likely causes, one sentence each
  // Whether FAVOR+ and LSH could estimate a plain call for these inputs, one sentence each; and the
  // figures on which they rest, as in the proto.
  std::vector<std::string> estimates;
  std::optional<double> favor_squared_norm;
  std::optional<double> lsh_reachable_weight;
};

// Inputs of AttendCall in place of a mask or bias of all pairs, by the size that the other members
// of MemoryQuestion leave open. S is the length; H is 1, or with per_head the number of heads. 0 or
// false: not given.
struct CompactInputs {
  int64_t block_q = 0;  // block_mask [1, H, S / block_q, S / block_k], rounded up; both or neither
  int64_t block_k = 0;
  int64_t selected_indices = 0;  // N of [batch, H, S, N]
  // Biases by distance, at most one.
  bool alibi = false;
  int64_t bias_table = 0;     // N of [N, query_heads], in dtype
  int64_t relative_bias = 0;  // 2c + 1 of [H, 2c + 1], in dtype
  bool per_head = false;      // H is query_heads; kv_heads for selected_indices

  bool operator==(const CompactInputs&) const = default;
};

// Attributes of attention in linear time that decide its memory.
struct LinearTimeOptions {
  int64_t lsh_hashes = 4;         // num_hashes of lsh_attention
  int64_t lsh_chunk_length = 64;  // its chunk_length
  int64_t favor_features = 0;     // num_features of FAVOR; 0: floor(head_size ln head_size)

  bool operator==(const LinearTimeOptions&) const = default;
};

// Self-attention of several lengths.
struct MemoryQuestion {
  int64_t batch = 1;
  int64_t query_heads = 1;
  int64_t kv_heads = 0;  // 0: query_heads
  std::vector<int64_t> lengths = {};
  int64_t head_size = 64;
  int64_t value_head_size = 0;  // 0: head_size
  DType dtype = DType::kFloat32;
  CompactInputs inputs = {};
  LinearTimeOptions linear_time = {};
};

// Calls of a layer of the server, with queries and keys of several lengths.
struct LayerMemoryQuestion {
  std::string model;
  int64_t batch = 1;
  std::vector<int64_t> lengths = {};
  std::optional<DType> dtype = std::nullopt;  // of the inputs; absent: that of the weights
};

struct InputEstimate {
  std::string name;  // "block_mask", "selected_indices", "alibi", "bias_table" or "relative_bias"
  int64_t bytes = 0;
  // What it takes less than the mask or attention_bias that means the same; negative if more.
  int64_t saved_bytes = 0;
};

// An operator in place of exact attention.
struct OperatorEstimate {
  int64_t workspace_bytes = 0;  // the exact workspace of the server's plan
  int64_t state_bytes = 0;      // what later tokens need instead of keys and values
  std::string plan;
  std::string refusal;  // why the operator does not take these sizes; then the rest is empty
};

struct LayerEstimate {
  int64_t weight_bytes = 0;   // of the memory budget, as long as the layer is loaded
  int64_t charged_bytes = 0;  // of the memory budget by a call: Y and workspace, in pooled buffers
};

// Of a layer only the length, tensor_bytes, fused_bytes, the plan and `layer` are set.
struct MemoryEstimate {
  int64_t length = 0;
  int64_t tensor_bytes = 0;  // Q, K, V and Y, needed in any case; of a layer its inputs and Y
  // In addition to tensor_bytes:
  int64_t standard_bytes = 0;  // the whole score matrix, [B, Hq, S, S]
  int64_t chunked_bytes = 0;   // scores of one block of keys at a time, for all queries
  int64_t fused_bytes = 0;     // the exact workspace of the server's plan
  std::string plan;
  std::vector<InputEstimate> inputs = {};  // those of the question
  OperatorEstimate lsh = {};               // lsh_attention of S rounded up to whole chunks
  OperatorEstimate linear = {};            // linear_attention with FAVOR
  std::optional<LayerEstimate> layer = std::nullopt;
};

struct MemoryEstimates {
  std::vector<MemoryEstimate> estimates;  // one for each length
  int64_t chunk = 0;                      // keys in a block of chunked_bytes
};

struct InstructionSetInfo {
  std::string name;
  bool available = false;
  bool in_use = false;
};

struct BackendInfo {
  std::string name;
  bool available = false;
  std::string reason;                                // why not
  std::vector<InstructionSetInfo> instruction_sets;  // best first
};

// Admission limits. A call beyond a limit is rejected with ResourceExhausted.
struct AdmissionLimits {
  int64_t max_open_calls = 0;        // calls with tensors, from arrival until the response is sent
  int64_t max_calls_per_caller = 0;  // per token, certificate or address
  int64_t max_compute_bytes = 0;     // outputs and workspace per request
  int64_t max_queued_requests = 0;   // requests waiting for memory; 0: none may wait
  std::chrono::milliseconds max_queue_delay{0};  // how long a request may wait
  int64_t min_receive_bytes_per_second = 0;
  std::chrono::milliseconds default_deadline{0};  // of calls without a deadline
  std::chrono::milliseconds max_deadline{0};      // longer deadlines are shortened to it
};

// Limits of caches.
struct CacheLimits {
  int64_t max_bytes = 0;             // of all caches
  int64_t max_bytes_per_caller = 0;  // 0: max_bytes
  int64_t max_caches_per_caller = 0;
  std::chrono::milliseconds default_lease{0};  // of a cache created without a lease
  std::chrono::milliseconds max_lease{0};      // longer leases are shortened to it
};

struct ServerInfo {
  std::string version;
  std::vector<BackendInfo> backends;  // in the order in which auto tries them
  std::string backend;                // --backend
  std::string isa;                    // --isa
  int compute_threads = 0;
  int64_t memory_budget_bytes = 0;
  int64_t memory_reserved_bytes = 0;
  int64_t max_message_bytes = 0;
  AdmissionLimits admission;
  std::optional<CacheLimits> caches;  // nullopt: the server keeps none, or is older than this field
};

enum class HealthStatus : uint8_t { kUnknown, kServing, kNotServing };

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_REPORTS_H_
