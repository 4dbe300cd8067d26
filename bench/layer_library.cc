// Layers and projections for layer_bench.py, which calls this as a shared library: the C interface
// has none. All tensors are row-major. Pointers that a function returns are released by close.
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "attention/layer/layer.h"
#include "attention/layer/packed_layer.h"
#include "attention/layer/projection.h"
#include "attention/layer/projection_kernels.h"
#include "attention/score/score_params.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"

namespace {

using rapt::DType;
using rapt::Role;

// A call of a layer and what it needs.
struct Call {
  std::shared_ptr<const rapt::TensorOperator> op;
  rapt::Plan plan;
  rapt::AlignedBuffer workspace;
  std::unique_ptr<rapt::ThreadPool> pool;
};

// A projection alone, of `rows` rows of FP32, FP16 or BF16.
struct Product {
  rapt::PackedMatrix matrix;
  rapt::AlignedBuffer panels;
  rapt::AlignedBuffer scratch;
  int64_t scratch_bytes = 0;  // of each worker
  rapt::Projection projection;
  rapt::ProjectionOutput output;
  std::unique_ptr<rapt::ThreadPool> pool;
};

rapt::LinearWeights Linear(DType dtype, const void* matrix, const void* bias, int64_t out,
                           int64_t in) {
  const auto tensor = [&](const void* data, rapt::Shape shape) {
    return rapt::WeightTensor{.name = "weight",
                              .dtype = dtype,
                              .shape = std::move(shape),
                              .data = static_cast<const std::byte*>(data)};
  };
  rapt::LinearWeights weights{.matrix = tensor(matrix, {out, in})};
  if (bias != nullptr) weights.bias = tensor(bias, {out});
  return weights;
}

}  // namespace

extern "C" {

// Self-attention of [batch, length, embed] by four matrices [embed, embed] with biases, in the
// order q, k, v, o. Returns null if the call is invalid.
void* rapt_layer_bench_open(int dtype, int64_t embed, int64_t heads, const void* const* matrices,
                            const void* const* biases, int64_t batch, int64_t length, int threads) {
  const auto type = static_cast<DType>(dtype);
  const auto linear = [&](int n) { return Linear(type, matrices[n], biases[n], embed, embed); };
  const rapt::LayerWeights weights{.q = linear(0), .k = linear(1), .v = linear(2), .o = linear(3)};
  auto call = std::make_unique<Call>();
  call->pool = std::make_unique<rapt::ThreadPool>(threads);
  auto layer = rapt::MakeLayer({.embed_size = embed, .query_heads = heads}, weights, *call->pool);
  if (!layer.ok()) return nullptr;
  rapt::LayerCall tensors;
  tensors.inputs[Role::kQ] = rapt::TensorSpec{type, {batch, length, embed}};
  auto op = rapt::MakeLayerCall(*std::move(layer), tensors);
  if (!op.ok()) return nullptr;
  call->op = *std::move(op);
  call->plan = rapt::MakePlan(*call->op, {.threads = threads}).value();
  call->workspace = rapt::AlignedBuffer(static_cast<size_t>(call->plan.workspace_bytes()));
  return call.release();
}

void rapt_layer_bench_run(void* opened, const void* x, void* y) {
  auto& call = *static_cast<Call*>(opened);
  rapt::Arguments a;
  a.inputs[Role::kQ].data = static_cast<const std::byte*>(x);
  a.outputs[Role::kY].data = static_cast<std::byte*>(y);
  const absl::Status status = rapt::Run(*call.op, call.plan, a, call.workspace.span(), *call.pool);
  if (!status.ok()) std::abort();
}

int64_t rapt_layer_bench_workspace(void* opened) {
  return static_cast<Call*>(opened)->plan.workspace_bytes();
}

void rapt_layer_bench_close(void* opened) { delete static_cast<Call*>(opened); }

// x Wᵀ + b of [rows, in] by a matrix [out, in] and a bias [out] of FP32, or null.
void* rapt_projection_bench_open(int dtype, int64_t rows, int64_t in, int64_t out,
                                 const void* matrix, const void* bias, int threads) {
  const auto type = static_cast<DType>(dtype);
  auto product = std::make_unique<Product>();
  rapt::PackedMatrix& packed = product->matrix;
  packed = {.dtype = type, .depth = in, .columns = out};
  product->panels = rapt::MemoryForWeights(packed.panel_count() * packed.panel_bytes());
  packed.panels = product->panels.data();
  product->pool = std::make_unique<rapt::ThreadPool>(threads);
  const rapt::LinearWeights weights = Linear(type, matrix, nullptr, out, in);
  product->pool->ParallelFor(packed.panel_count(),
                             [&](int64_t panel, int) { rapt::PackPanel(weights, panel, packed); });
  const std::string isa = rapt::ChooseIsa(*rapt::BuiltInBackends()[0], "auto");  // the CPU's
  const rapt::ProjectionKernel& kernel = rapt::ProjectionKernelsOf(isa).fp32;
  product->scratch_bytes = kernel.scratch_bytes;
  product->scratch = rapt::AlignedBuffer(static_cast<size_t>(threads * kernel.scratch_bytes));
  const rapt::PackedVector numbers{.shape = {out},
                                   .data = static_cast<std::byte*>(const_cast<void*>(bias))};
  product->projection = rapt::Projection(kernel, packed, numbers, type, rows, threads);
  product->output = {.data = nullptr,
                     .head_size = out,
                     .head_stride = 0,
                     .length = rows,
                     .row_stride = out * rapt::SizeOf(type),
                     .batch_stride = 0};
  return product.release();
}

void rapt_projection_bench_run(void* opened, const void* x, void* y) {
  auto& product = *static_cast<Product*>(opened);
  product.output.data = static_cast<std::byte*>(y);
  product.pool->ParallelFor(product.projection.tasks(), [&](int64_t task, int worker) {
    product.projection.Run(static_cast<const std::byte*>(x), product.output, task,
                           product.scratch.data() + worker * product.scratch_bytes, {});
  });
}

void rapt_projection_bench_close(void* opened) { delete static_cast<Product*>(opened); }

}  // extern "C"
