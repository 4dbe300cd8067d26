#include "attention/memory_estimate.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "attention/attention.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Checked, because huge head sizes with many threads overflow int64.
absl::StatusOr<int64_t> WorkspaceBytes(const Plan& plan) {
  std::optional<int64_t> bytes = CheckedMul(plan.threads, plan.worker_workspace_bytes);
  if (bytes) bytes = CheckedAdd(*bytes, plan.shared_workspace_bytes);
  if (bytes) return *bytes;
  return Invalid("the workspace of ", plan.threads, " threads with ", plan.worker_workspace_bytes,
                 " bytes each overflows 64 bits");
}

// No overflow for a valid problem, because no mask or bias is larger than the score matrix in FP64.
std::vector<InputEstimate> EstimateInputs(const Problem& p) {
  std::vector<InputEstimate> inputs;
  const int64_t pairs = p.query_length * p.total_keys();
  const auto add = [&](Role role, int64_t batch, int64_t heads) {
    const RoleInfo& info = InfoOf(role);
    const int64_t element = SizeOf(info.dtype(p));
    int64_t bytes = element;
    for (const int64_t axis : info.dims(p)) bytes *= axis;
    const int64_t replaced = role == Role::kSelectedIndices ? 1 : element;  // by a BOOL mask
    inputs.push_back(
        {std::string(kOnnxNames[role]), bytes, batch * heads * pairs * replaced - bytes});
  };
  if (p.block_mask) add(Role::kBlockMask, (*p.block_mask)[0], (*p.block_mask)[1]);
  if (p.selected) {
    add(Role::kSelectedIndices, p.batch, p.selected->heads == 1 ? 1 : p.query_heads);
  }
  const int64_t batch = PositionVaries(p) ? p.batch : 1;
  if (p.alibi) {
    inputs.push_back({std::string(kOnnxNames[Attribute::kAlibi]), 0,
                      batch * p.query_heads * pairs * SizeOf(p.dtype)});
  }
  if (p.alibi_slopes) {
    add(Role::kAlibiSlopes, std::max(batch, p.alibi_slopes->batch), p.query_heads);
  }
  if (p.bias_table) add(Role::kBiasTable, batch, p.query_heads);
  if (p.relative_bias) add(Role::kRelativeBias, batch, p.relative_bias->heads);
  return inputs;
}

absl::Status CheckOption(absl::string_view name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return Invalid(name, " is ", value, "; it must be from 1 to ", most);
}

absl::Status Check(const LinearTimeOptions& options) {
  RAPT_RETURN_IF_ERROR(CheckOption("lsh_hashes", options.lsh_hashes, kMostHashes));
  RAPT_RETURN_IF_ERROR(CheckOption("lsh_chunk_length", options.lsh_chunk_length, kMaxAxis));
  if (options.favor_features == 0) return absl::OkStatus();
  return CheckOption("favor_features", options.favor_features, kMaxAxis);
}

OperatorEstimate EstimateOperator(const absl::StatusOr<std::shared_ptr<const TensorOperator>>& op,
                                  const PlanOptions& options) {
  OperatorEstimate estimate;
  const auto refuse = [&](const absl::Status& status) {
    estimate.refusal = std::string(status.message());
    return estimate;
  };
  if (!op.ok()) return refuse(op.status());
  const absl::StatusOr<Plan> plan = MakePlan(**op, options);
  if (!plan.ok()) return refuse(plan.status());
  const absl::StatusOr<int64_t> bytes = WorkspaceBytes(*plan);
  if (!bytes.ok()) return refuse(bytes.status());
  estimate.workspace_bytes = *bytes;
  estimate.plan = plan->Describe();
  return estimate;
}

OperatorEstimate EstimateLsh(const Problem& p, const PlanOptions& options,
                             const LinearTimeOptions& linear_time) {
  const int64_t chunk = linear_time.lsh_chunk_length;
  const int64_t tokens = p.total_keys() > chunk ? RoundUp(p.total_keys(), chunk) : p.total_keys();
  LshAttentionCall call;
  call.num_hashes = linear_time.lsh_hashes;
  call.chunk_length = chunk;
  call.seed = 0;
  call.inputs[Role::kQ] = {p.dtype, {p.batch, p.query_heads, tokens, p.head_size}};
  call.inputs[Role::kV] = {p.dtype, {p.batch, p.query_heads, tokens, p.value_head_size}};
  return EstimateOperator(MakeLshAttention(call), options);
}

OperatorEstimate EstimateFavor(const Problem& p, const PlanOptions& options,
                               const LinearTimeOptions& linear_time) {
  LinearAttentionCall call;
  call.q_num_heads = p.query_heads;
  call.kv_num_heads = p.kv_heads;
  call.update_rule = UpdateRule::kLinear;
  call.feature_map = FeatureMap::kFavor;
  if (linear_time.favor_features != 0) call.num_features = linear_time.favor_features;
  const auto tokens = [&](int64_t heads, int64_t size) {
    return TensorSpec{p.dtype, {p.batch, p.total_keys(), heads * size}};
  };
  call.inputs[Role::kQ] = tokens(p.query_heads, p.head_size);
  call.inputs[Role::kK] = tokens(p.kv_heads, p.head_size);
  call.inputs[Role::kV] = tokens(p.kv_heads, p.value_head_size);
  call.wants_present_state = call.wants_present_normalizer = true;
  const auto op = MakeLinearAttention(call);
  OperatorEstimate estimate = EstimateOperator(op, options);
  if (!estimate.refusal.empty()) return estimate;
  for (const Slot state : {linear::kPresentState, linear::kPresentNormalizer}) {
    // The operator has checked that its outputs have a size.
    estimate.state_bytes += *ByteSize(linear::NameOf(state), *(*op)->outputs()[state]);
  }
  return estimate;
}

}  // namespace

void AddInputs(const CompactInputs& inputs, Problem& p) {
  const int64_t query_heads = inputs.per_head ? p.query_heads : 1;
  if (inputs.block_q != 0) p.block_q = inputs.block_q;
  if (inputs.block_k != 0) p.block_k = inputs.block_k;
  if (p.block_q || p.block_k) {
    // Validate() refuses blocks of less than 1.
    p.block_mask = {1, query_heads, CeilDiv(p.query_length, std::max<int64_t>(inputs.block_q, 1)),
                    CeilDiv(p.total_keys(), std::max<int64_t>(inputs.block_k, 1))};
  }
  if (inputs.selected_indices != 0) {
    p.selected = SelectedIndices{inputs.per_head ? p.kv_heads : 1, inputs.selected_indices};
  }
  if (inputs.alibi) p.alibi = true;
  if (inputs.bias_table != 0) {
    p.bias_table = BiasTable{p.dtype, inputs.bias_table};
    p.max_distance = kMaxAxis;  // any that fits all tables; it does not change the memory
  }
  if (inputs.relative_bias != 0) {
    p.relative_bias = RelativeBias{p.dtype, query_heads, inputs.relative_bias};
  }
}

Problem SelfAttention(const MemoryQuestion& question, int64_t length) {
  const auto or_default = [](int64_t size, int64_t value) { return size == 0 ? value : size; };
  Problem problem;
  problem.dtype = question.dtype;
  problem.batch = question.batch;
  problem.query_heads = question.query_heads;
  problem.kv_heads = or_default(question.kv_heads, question.query_heads);
  problem.query_length = problem.key_length = length;
  problem.head_size = question.head_size;
  problem.value_head_size = or_default(question.value_head_size, question.head_size);
  AddInputs(question.inputs, problem);
  return problem;
}

absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& p, const PlanOptions& options,
                                              const LinearTimeOptions& linear_time) {
  RAPT_RETURN_IF_ERROR(Check(linear_time));
  RAPT_ASSIGN_OR_RETURN(const Plan plan, MakePlan(p, options));
  RAPT_ASSIGN_OR_RETURN(const int64_t workspace_bytes, WorkspaceBytes(plan));
  // The sizes of a valid problem do not overflow at eight bytes per element, nor do sums of four.
  const int64_t element = SizeOf(p.dtype);
  const int64_t real = SizeOf(p.accumulator());
  const int64_t query_rows = p.batch * p.query_heads * p.query_length;
  const int64_t key_rows = p.batch * p.kv_heads * p.total_keys();
  MemoryEstimate estimate{.length = p.query_length};
  estimate.tensor_bytes = element * (query_rows + key_rows) * (p.head_size + p.value_head_size);
  estimate.standard_bytes = query_rows * p.total_keys() * real;
  estimate.chunked_bytes =
      query_rows * (std::min(p.total_keys(), kEstimateChunk) + 2 + p.value_head_size) * real;
  estimate.fused_bytes = workspace_bytes;
  estimate.plan = plan.Describe();
  estimate.inputs = EstimateInputs(p);
  estimate.lsh = EstimateLsh(p, options, linear_time);
  estimate.linear = EstimateFavor(p, options, linear_time);
  return estimate;
}

}  // namespace rapt
