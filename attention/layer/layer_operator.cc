#include "attention/layer/layer_operator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "attention/arena.h"
#include "attention/backend.h"
#include "attention/half.h"
#include "attention/layer/layer_heads.h"
#include "attention/layer/layer_mask.h"
#include "attention/layer/projection.h"
#include "attention/layer/projection_kernels.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace {

// Weights of a task that averages, approximately, and at once.
constexpr int64_t kAverageTask = 64 * 1024;
constexpr int64_t kAverageBlock = 256;

using Array = ArrayAt<std::byte>;

// The memory that all tasks share. Some arrays are absent.
struct Arrays {
  explicit Arrays(const LayerShape& s) : heads(s, arena) {
    const int64_t size = SizeOf(s.dtype);
    if (s.weights().has(Matrix::kOutput)) {
      const Heads h = HeadsOf(s, Matrix::kOutput);
      output = arena.Take<std::byte>({s.batch, h.heads, h.length, h.size, size});
    }
    const LayerMask masks(s);
    if (masks.writes_mask()) mask = TakeMask(*masks.mask());
    if (masks.writes_bias()) bias = TakeMask(*masks.bias());
    if (s.wants_averaged_weights && !s.wants_weights) {
      weights = arena.Take<std::byte>({s.batch, s.heads(), s.queries, s.keys(), size});
    }
  }

  Arena arena;
  LayerHeads heads;
  Array output;  // of attention, [B, Sq, Hq, Dv]
  Array mask, bias, weights;

 private:
  Array TakeMask(const MaskShape& shape) {
    return arena.Take<std::byte>(
        {shape.dims[0], shape.dims[1], shape.dims[2], shape.dims[3], SizeOf(shape.dtype)});
  }
};

// What a stage computes. Attention has several stages.
struct Stage {
  enum class Part : uint8_t { kHeads, kAppend, kAttend, kOutput };
  Part part;
  LayerHeads::Step step = {};  // of kHeads
};

class LayerPlan final : public BackendPlan {
 public:
  std::string Describe() const override {
    return attention.backend_plan == nullptr ? "" : attention.backend_plan->Describe();
  }

  absl::InlinedVector<Stage, 8> stages;
  LayerHeads::Tasks heads;
  Plan attention;
  Projection output;
  int attention_stage = 0;  // the first
  // Of attention, the cache and the kernels, which do not run at the same time.
  int64_t parts_begin = 0;
};

// Runs one task.
class Run {
 public:
  Run(const LayerShape& s, const LayerMask& mask, const Arrays& arrays, const LayerPlan& plan,
      const Arguments& a, std::byte* workspace, int worker, const Checkpoint& checkpoint)
      : s_(s),
        mask_(mask),
        arrays_(arrays),
        plan_(plan),
        a_(a),
        workspace_(workspace),
        worker_(worker),
        checkpoint_(checkpoint) {}

  void Task(int stage, int64_t task) const {
    switch (plan_.stages[stage].part) {
      case Stage::Part::kHeads:
        return HeadsTask(plan_.stages[stage].step, task);
      case Stage::Part::kAppend:
        return AppendToCache();
      case Stage::Part::kAttend:
        return s_.cache == nullptr ? Attend(stage, task) : AttendToCache(stage, task);
      case Stage::Part::kOutput:
        return ProjectOutput(task);
    }
  }

  static int64_t AverageTasks(const LayerShape& s) {
    return s.wants_averaged_weights ? CeilDiv(s.batch * s.queries, AverageRows(s)) : 0;
  }

 private:
  static int64_t AverageRows(const LayerShape& s) {
    return std::max<int64_t>(kAverageTask / std::max<int64_t>(s.heads() * s.keys(), 1), 1);
  }

  std::byte* WeightsAt() const {
    return s_.wants_weights ? a_.outputs[kLayerWeights].data : arrays_.weights.In(workspace_);
  }
  std::byte* AttendedAt() const {
    return s_.weights().has(Matrix::kOutput) ? arrays_.output.In(workspace_)
                                             : a_.outputs[Role::kY].data;
  }
  std::byte* Parts() const { return workspace_ + plan_.parts_begin; }
  std::byte* Scratch() const { return Parts() + worker_ * plan_.heads.kernel.scratch_bytes; }

  // Masks are written beside the projections.
  void HeadsTask(LayerHeads::Step step, int64_t task) const {
    const int64_t of_heads = plan_.heads.of(step);
    if (task < of_heads) {
      return arrays_.heads.RunTask(plan_.heads, step, task, a_, workspace_, Scratch(), worker_,
                                   checkpoint_);
    }
    mask_.Write(a_, task - of_heads, arrays_.mask.In(workspace_), arrays_.bias.In(workspace_));
  }

  TensorView HeadsView(Matrix m) const { return arrays_.heads.View(m, a_, workspace_); }

  void AppendToCache() const {
    s_.cache->Append(HeadsView(Matrix::kKey).data, HeadsView(Matrix::kValue).data,
                     {Parts(), static_cast<size_t>(s_.cache->append_bytes())});
  }

  void AttendToCache(int stage, int64_t task) const {
    Arguments a;
    a.inputs[Role::kQ].data = HeadsView(Matrix::kQuery).data;
    a.inputs[Role::kHeadSink].data = s_.weights()[Vector::kSinks].data;
    a.inputs[Role::kBiasTable].data = s_.weights()[Vector::kRelativeBias].data;
    a.outputs[Role::kY].data = AttendedAt();
    s_.cache->attention().RunTask(plan_.attention, a, Parts(), stage - plan_.attention_stage, task,
                                  worker_, checkpoint_);
  }

  TensorView VectorView(Vector v, std::array<int64_t, 4> dims) const {
    const PackedVector& vector = s_.weights()[v];
    return {vector.data, vector.dtype, dims, RowMajorStrides(dims)};
  }

  void Attend(int stage, int64_t task) const {
    const Problem& p = plan_.attention.problem;
    Arguments a;
    a.inputs[Role::kQ] = HeadsView(Matrix::kQuery);
    a.inputs[Role::kK] = HeadsView(Matrix::kKey);
    a.inputs[Role::kV] = HeadsView(Matrix::kValue);
    const std::byte* const given = a_.inputs[Role::kMask].data;
    if (p.mask) {
      a.inputs[Role::kMask] =
          MaskView(*p.mask, mask_.writes_mask() ? arrays_.mask.In(workspace_) : given);
    }
    if (p.bias) {
      a.inputs[Role::kBias] =
          MaskView(*p.bias, mask_.writes_bias() ? arrays_.bias.In(workspace_) : given);
    }
    if (p.head_sink) {
      a.inputs[Role::kHeadSink] = VectorView(Vector::kSinks, {p.query_heads, 1, 1, 1});
    }
    if (p.bias_table) {
      a.inputs[Role::kBiasTable] =
          VectorView(Vector::kRelativeBias, {p.bias_table->buckets, p.query_heads, 1, 1});
    }
    if (p.additive_weight) {
      a.inputs[Role::kAdditiveWeight] = VectorView(Vector::kAdditiveWeight, {1, p.head_size, 1, 1});
    }
    const Heads h = HeadsOf(s_, Matrix::kOutput);
    a.outputs[Role::kY] = {
        AttendedAt(), s_.dtype, {s_.batch, h.heads, h.length, h.size}, SideBySide(h)};
    if (p.score_output) {
      const std::array<int64_t, 4> dims = {s_.batch, h.heads, s_.queries, s_.keys()};
      a.outputs[Role::kScores] = {WeightsAt(), s_.dtype, dims, RowMajorStrides(dims)};
    }
    plan_.attention.routing.backend->RunTask(
        plan_.attention, a, Parts(), stage - plan_.attention_stage, task, worker_, checkpoint_);
  }

  void ProjectOutput(int64_t task) const {
    if (task >= plan_.output.tasks()) return Average(task - plan_.output.tasks());
    const int64_t columns = s_.layer->output_size();
    plan_.output.Run(AttendedAt(),
                     {.data = a_.outputs[Role::kY].data,
                      .head_size = columns,
                      .head_stride = 0,
                      .length = s_.batch * s_.queries,
                      .row_stride = columns * SizeOf(s_.dtype),
                      .batch_stride = 0},
                     task, Scratch(), checkpoint_);
  }

  // Writes the means over heads of the weights of some queries.
  void Average(int64_t task) const {
    const int64_t rows = AverageRows(s_);
    const int64_t end = std::min((task + 1) * rows, s_.batch * s_.queries);
    for (int64_t row = task * rows; row < end; ++row) {
      for (int64_t j = 0; j < s_.keys(); j += kAverageBlock) {
        AverageKeys(row, j, std::min(kAverageBlock, s_.keys() - j));
      }
    }
  }

  void AverageKeys(int64_t row, int64_t j, int64_t count) const {
    const int64_t b = row / s_.queries;
    const int64_t i = row % s_.queries;
    std::array<double, kAverageBlock> sums = {};
    for (int64_t h = 0; h < s_.heads(); ++h) {
      const int64_t first = ((b * s_.heads() + h) * s_.queries + i) * s_.keys() + j;
      AddElements(WeightsAt(), first, count, sums.data());
    }
    std::byte* const out = a_.outputs[kAveragedWeights].data;
    for (int64_t n = 0; n < count; ++n) {
      StoreElement(out, s_.dtype, row * s_.keys() + j + n,
                   sums[n] / static_cast<double>(s_.heads()));
    }
  }

  void AddElements(const std::byte* from, int64_t first, int64_t count, double* sums) const {
    if (s_.dtype == DType::kFloat32) {
      for (int64_t n = 0; n < count; ++n) sums[n] += LoadAs<float>(from, first + n);
      return;
    }
    for (int64_t n = 0; n < count; ++n) sums[n] += LoadElement(from, s_.dtype, first + n);
  }

  const LayerShape& s_;
  const LayerMask& mask_;
  const Arrays& arrays_;
  const LayerPlan& plan_;
  const Arguments& a_;
  std::byte* const workspace_;
  const int worker_;
  const Checkpoint& checkpoint_;
};

class LayerOperator final : public TensorOperator {
 public:
  explicit LayerOperator(const LayerShape& shape) : s_(shape), mask_(s_), arrays_(s_) {
    outputs_[Role::kY] = {s_.dtype, {s_.batch, s_.queries, s_.layer->output_size()}};
    if (s_.wants_weights) {
      outputs_[kLayerWeights] = {s_.dtype, {s_.batch, s_.heads(), s_.queries, s_.keys()}};
    }
    if (s_.wants_averaged_weights) {
      outputs_[kAveragedWeights] = {s_.dtype, {s_.batch, s_.queries, s_.keys()}};
    }
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  bool checks_data() const override { return s_.has_lengths; }
  absl::Status CheckData(const Arguments& a) const override {
    if (!s_.has_lengths) return absl::OkStatus();
    return CheckLengths("nonpad_kv_seqlen", a.key_lengths, s_.batch, "key length", s_.tokens);
  }

  SlotSet copied_inputs() const override { return {Role::kMask, kInputIds}; }

  void PlanTasks(Plan& plan) const override {
    if (s_.empty()) return;
    const auto layer = std::make_shared<LayerPlan>();
    const ProjectionKernels& kernels = ProjectionKernelsOf(plan.isa);
    const bool is_fp64 = s_.dtype == DType::kFloat64 || plan.isa.empty();
    layer->parts_begin = arrays_.arena.bytes();
    layer->heads =
        arrays_.heads.MakeTasks(is_fp64 ? kernels.fp64 : kernels.fp32, plan, layer->parts_begin);
    layer->attention = PartPlan(plan);
    if (s_.cache == nullptr) {
      layer->attention.problem = AttentionOf(s_);
      plan.routing.backend->PlanTasks(layer->attention);
    } else {
      s_.cache->attention().PlanTasks(layer->attention);
    }
    if (s_.weights().has(Matrix::kOutput)) {
      layer->output = Projection(layer->heads.kernel, s_.weights()[Matrix::kOutput],
                                 s_.weights()[Vector::kOutputBias], s_.dtype, s_.batch * s_.queries,
                                 plan.threads);
    }
    AddStages(plan, *layer);
    const int64_t appended = s_.cache == nullptr ? 0 : s_.cache->append_bytes();
    plan.shared_workspace_bytes =
        layer->parts_begin + std::max({plan.threads * layer->heads.kernel.scratch_bytes, appended,
                                       layer->attention.workspace_bytes()});
    plan.flops += layer->attention.flops + layer->output.flops();
    plan.backend_plan = layer;
  }

  void RunTask(const Plan& plan, const Arguments& a, std::byte* workspace, int stage, int64_t task,
               int worker, const Checkpoint& checkpoint) const override {
    const auto& layer = static_cast<const LayerPlan&>(*plan.backend_plan);
    Run(s_, mask_, arrays_, layer, a, workspace, worker, checkpoint).Task(stage, task);
  }

 private:
  void AddStages(Plan& plan, LayerPlan& layer) const {
    const auto add = [&](Stage stage, int64_t tasks) {
      if (tasks == 0) return;
      plan.stages.push_back(tasks);
      layer.stages.push_back(stage);
    };
    for (size_t n = 0; n < LayerHeads::kSteps; ++n) {
      const auto step = static_cast<LayerHeads::Step>(n);
      const int64_t masks = step == LayerHeads::Step::kProject ? mask_.tasks() : 0;
      add({Stage::Part::kHeads, step}, layer.heads.of(step) + masks);
    }
    add({Stage::Part::kAppend}, s_.cache == nullptr ? 0 : 1);
    layer.attention_stage = static_cast<int>(plan.stages.size());
    for (const int64_t tasks : layer.attention.stages) {
      plan.stages.push_back(tasks);
      layer.stages.push_back({Stage::Part::kAttend});
    }
    add({Stage::Part::kOutput}, layer.output.tasks() + Run::AverageTasks(s_));
  }

  const LayerShape s_;
  const LayerMask mask_;
  const Arrays arrays_;
  OutputMap<std::optional<TensorSpec>> outputs_;
};

}  // namespace

Problem AttentionOf(const LayerShape& s) {
  const LayerConfig& c = s.config();
  const PackedWeights& w = s.weights();
  const LayerMask mask(s);
  Problem p{.dtype = s.dtype,
            .batch = s.batch,
            .query_heads = c.query_heads,
            .kv_heads = *c.kv_heads,
            .query_length = s.queries,
            .key_length = s.keys(),
            .head_size = *c.head_size,
            .value_head_size = *c.value_head_size,
            .scale = c.scale,
            .causal = mask.causal(),
            .left_window = c.sliding_window.value_or(0) - 1,
            .mask = mask.mask(),
            .bias = mask.bias(),
            .dropout = s.dropout,
            .interleaved = c.interleaved,
            .rotary_embedding_dim = c.rotary_embedding_dim,
            .rope_theta = c.rope_theta,
            .rope_scaling = c.rope_scaling,
            .score_function = c.score_function};
  if (w.has(Vector::kSinks)) p.head_sink = w[Vector::kSinks].dtype;
  if (w.has(Vector::kRelativeBias)) {
    const PackedVector& table = w[Vector::kRelativeBias];
    p.bias_table = BiasTable{table.dtype, table.shape[0]};
    p.is_bidirectional = !s.is_causal;
    p.max_distance = c.max_distance;
  }
  if (w.has(Vector::kAdditiveWeight)) {
    p.additive_weight = AdditiveWeight{w[Vector::kAdditiveWeight].dtype, 1};
  }
  if (s.wants_weights || s.wants_averaged_weights) p.score_output = ScoreOutput::kWeights;
  return p;
}

bool FitsMemory(const LayerShape& shape) { return Arrays(shape).arena.fits(); }

std::shared_ptr<const TensorOperator> MakeLayerOperator(const LayerShape& shape) {
  return std::make_shared<const LayerOperator>(shape);
}

}  // namespace rapt
