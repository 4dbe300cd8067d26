#include "client/cli/local_memory.h"

#include <memory>

#include "attention/layer/files/layer_files.h"
#include "attention/layer/layer_estimate.h"
#include "attention/memory_estimate.h"
#include "base/host_limits.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"

namespace rapt {

std::vector<int64_t> DoubledLengths() {
  std::vector<int64_t> lengths;
  for (int64_t length = 128; length <= 32768; length *= 2) lengths.push_back(length);
  return lengths;
}

absl::StatusOr<client::MemoryEstimates> EstimateMemoryHere(const client::MemoryQuestion& question) {
  const PlanOptions options{.threads = ReadHostLimits().cores};
  client::MemoryEstimates estimates{.estimates = {}, .chunk = kEstimateChunk};
  for (const int64_t length : question.lengths) {
    RAPT_ASSIGN_OR_RETURN(
        estimates.estimates.emplace_back(),
        EstimateMemory(SelfAttention(question, length), options, question.linear_time));
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
    RAPT_ASSIGN_OR_RETURN(estimates.estimates.emplace_back(),
                          EstimateLayer(layer, dtype, question.batch, length, options));
  }
  return estimates;
}

}  // namespace rapt
