// Estimates the memory of a layer and of its calls.
#ifndef RAPT_ATTENTION_LAYER_LAYER_ESTIMATE_H_
#define RAPT_ATTENTION_LAYER_LAYER_ESTIMATE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "attention/layer/layer.h"
#include "attention/plan.h"
#include "attention/tensor_view.h"
#include "rapt/memory.h"

namespace rapt {

// Of a call with `length` queries and keys. Key and value are inputs only if their size differs
// from the query's. Returns the statuses of MakeLayerCall() and MakePlan(), with messages about
// dtype, or about batch and lengths.
absl::StatusOr<MemoryEstimate> EstimateLayer(std::shared_ptr<const Layer> layer, DType dtype,
                                             int64_t batch, int64_t length,
                                             const PlanOptions& options);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_ESTIMATE_H_
