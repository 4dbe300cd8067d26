#include "attention/layer/layer_estimate.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/operator.h"
#include "base/buffer_pool.h"
#include "base/invalid.h"

namespace rapt {
namespace {

int64_t BytesOf(const std::optional<TensorSpec>& tensor) {
  return tensor ? ByteSize("", *tensor).value() : 0;
}

}  // namespace

absl::StatusOr<MemoryEstimate> EstimateLayer(std::shared_ptr<const Layer> layer, DType dtype,
                                             int64_t batch, int64_t length,
                                             const PlanOptions& options) {
  const LayerConfig& c = layer->config();
  if (layer->is_fp64() && dtype != DType::kFloat64) {
    return Invalid("dtype is ", NameOf(dtype),
                   "; it must be FP64, because the layer has weights of FP64");
  }
  LayerCall call;
  const auto give = [&](Role role, int64_t size) {
    call.inputs[role] = TensorSpec{dtype, {batch, length, size}};
  };
  give(Role::kQ, c.embed_size);
  if (c.key_embed_size != c.embed_size) give(Role::kK, *c.key_embed_size);
  if (c.value_embed_size != c.key_embed_size) give(Role::kV, *c.value_embed_size);
  MemoryEstimate estimate{.length = length, .layer = LayerEstimate{.weight_bytes = layer->bytes()}};
  const auto fails = [&](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat("batch is ", batch, " and lengths has ", length,
                                     "; a call must be smaller: ", status.message()));
  };
  const auto op = MakeLayerCall(std::move(layer), call);
  if (!op.ok()) return fails(op.status());
  const absl::StatusOr<Plan> plan = MakePlan(**op, options);
  if (!plan.ok()) return fails(plan.status());
  for (const Role role : {Role::kQ, Role::kK, Role::kV}) {
    estimate.tensor_bytes += BytesOf(call.inputs[role]);
  }
  const int64_t output = BytesOf((*op)->outputs()[Role::kY]);
  estimate.tensor_bytes += output;
  estimate.fused_bytes = plan->workspace_bytes();
  estimate.layer->charged_bytes =
      BufferPool::SizeOfClass(output) + BufferPool::SizeOfClass(estimate.fused_bytes);
  estimate.plan = plan->Describe();
  return estimate;
}

}  // namespace rapt
