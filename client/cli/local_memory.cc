#include "client/cli/local_memory.h"

#include <memory>
#include <string>

#include "attention/layer/files/layer_files.h"
#include "attention/layer/layer_estimate.h"
#include "attention/memory_estimate.h"
#include "base/host_limits.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"

namespace rapt {
namespace {

Problem ProblemOf(const client::MemoryQuestion& question, int64_t length) {
  Problem problem;
  problem.dtype = question.dtype;
  problem.batch = question.batch;
  problem.query_heads = question.query_heads;
  problem.kv_heads = question.kv_heads;
  problem.query_length = problem.key_length = length;
  problem.head_size = question.head_size;
  problem.value_head_size = question.value_head_size;
  const client::CompactInputs& inputs = question.inputs;
  AddInputs({.block_q = inputs.block_q,
             .block_k = inputs.block_k,
             .selected_indices = inputs.selected_indices,
             .alibi = inputs.alibi,
             .bias_table = inputs.bias_table,
             .relative_bias = inputs.relative_bias,
             .per_head = inputs.per_head},
            problem);
  return problem;
}

std::vector<client::InputEstimate> ToClient(const std::vector<InputEstimate>& inputs) {
  std::vector<client::InputEstimate> converted;
  converted.reserve(inputs.size());
  for (const auto& [name, bytes, saved_bytes] : inputs) {
    converted.push_back({std::string(name), bytes, saved_bytes});
  }
  return converted;
}

client::OperatorEstimate ToClient(const OperatorEstimate& estimate) {
  return {estimate.workspace_bytes, estimate.state_bytes, estimate.plan, estimate.refusal};
}

LinearTimeOptions OptionsOf(const client::LinearTimeOptions& options) {
  LinearTimeOptions converted{.lsh_hashes = options.lsh_hashes,
                              .lsh_chunk_length = options.lsh_chunk_length};
  if (options.favor_features != 0) converted.favor_features = options.favor_features;
  return converted;
}

}  // namespace

std::vector<int64_t> DoubledLengths() {
  std::vector<int64_t> lengths;
  for (int64_t length = 128; length <= 32768; length *= 2) lengths.push_back(length);
  return lengths;
}

absl::StatusOr<client::MemoryEstimates> EstimateMemoryHere(const client::MemoryQuestion& question) {
  const PlanOptions options{.threads = ReadHostLimits().cores};
  const LinearTimeOptions linear_time = OptionsOf(question.linear_time);
  client::MemoryEstimates estimates{.estimates = {}, .chunk = kEstimateChunk};
  for (const int64_t length : question.lengths) {
    RAPT_ASSIGN_OR_RETURN(const MemoryEstimate estimate,
                          EstimateMemory(ProblemOf(question, length), options, linear_time));
    estimates.estimates.push_back({length, estimate.tensor_bytes, estimate.standard_bytes,
                                   estimate.chunked_bytes, estimate.fused_bytes, estimate.plan,
                                   ToClient(estimate.inputs), ToClient(estimate.lsh),
                                   ToClient(estimate.linear)});
  }
  return estimates;
}

absl::StatusOr<client::MemoryEstimates> EstimateMemoryHere(
    const client::LayerMemoryQuestion& question) {
  RAPT_ASSIGN_OR_RETURN(const LayerFiles files, ReadLayerFiles(question.model));
  const PlanOptions options{.threads = ReadHostLimits().cores};
  ThreadPool pool(options.threads);
  RAPT_ASSIGN_OR_RETURN(const std::shared_ptr<const Layer> layer, MakeLayer(files, pool));
  const DType dtype = question.dtype.value_or(layer->dtype());
  client::MemoryEstimates estimates;
  for (const int64_t length : question.lengths) {
    RAPT_ASSIGN_OR_RETURN(const LayerEstimate estimate,
                          EstimateLayer(layer, dtype, question.batch, length, options));
    estimates.estimates.push_back(
        {.length = length,
         .tensor_bytes = estimate.inputs + estimate.outputs,
         .fused_bytes = estimate.workspace,
         .plan = estimate.plan,
         .layer = client::LayerEstimate{estimate.weights, estimate.charged}});
  }
  return estimates;
}

}  // namespace rapt
