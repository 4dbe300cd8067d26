// Estimates the memory of a layer and of its calls.
#ifndef RAPT_ATTENTION_LAYER_LAYER_ESTIMATE_H_
#define RAPT_ATTENTION_LAYER_LAYER_ESTIMATE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "attention/layer/layer.h"
#include "attention/plan.h"
#include "attention/tensor_view.h"

namespace rapt {

// In bytes.
struct LayerEstimate {
  int64_t weights = 0;    // packed: Layer::bytes()
  int64_t inputs = 0;     // of query, and of key and value if they are of other sizes
  int64_t outputs = 0;    // of Y
  int64_t workspace = 0;  // of the plan, with what lies between projections and attention
  // What a server reserves for a call: outputs and workspace, in pooled buffers.
  int64_t charged = 0;
  std::string plan;
};

// Of a call with `length` queries and keys. Returns the statuses of MakeLayerCall() and MakePlan(),
// with messages about dtype, or about batch and lengths.
absl::StatusOr<LayerEstimate> EstimateLayer(std::shared_ptr<const Layer> layer, DType dtype,
                                            int64_t batch, int64_t length,
                                            const PlanOptions& options);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_ESTIMATE_H_
