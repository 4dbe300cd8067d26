// Reports of a server about a call, about memory and about itself. Plain values. Their texts are
// for display and may change.
#ifndef RAPT_CLIENT_RAPT_REPORTS_H_
#define RAPT_CLIENT_RAPT_REPORTS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rapt/memory.h"
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

using rapt::CompactInputs;
using rapt::InputEstimate;
using rapt::LayerEstimate;
using rapt::LinearTimeOptions;
using rapt::MemoryEstimate;
using rapt::MemoryQuestion;
using rapt::OperatorEstimate;

// Calls of a layer of the server, with queries and keys of several lengths.
struct LayerMemoryQuestion {
  std::string model;
  int64_t batch = 1;
  std::vector<int64_t> lengths = {};
  std::optional<DType> dtype = std::nullopt;  // of the inputs; absent: that of the weights
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
