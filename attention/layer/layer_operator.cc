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
#include "attention/layer/layer_mask.h"
#include "attention/layer/projection.h"
#include "attention/layer/projection_kernels.h"
#include "attention/positions/positional_encoding.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace {

// Rows of heads that a task normalizes.
constexpr int64_t kNormRows = 256;
// Weights of a task that averages, approximately, and at once.
constexpr int64_t kAverageTask = 64 * 1024;
constexpr int64_t kAverageBlock = 256;

// The inputs that are projected, in the order of Matrix.
constexpr std::array kProjected = {Matrix::kQuery, Matrix::kKey, Matrix::kValue};
using Array = ArrayAt<std::byte>;

// A tensor of heads between a projection and attention, [B, heads, length, size].
struct Heads {
  int64_t heads = 0;
  int64_t length = 0;  // with the key of bias_k
  int64_t size = 0;
};

Heads HeadsOf(const LayerShape& s, Matrix m) {
  const LayerConfig& c = s.config();
  if (m == Matrix::kQuery) return {c.query_heads, s.queries, *c.head_size};
  if (m == Matrix::kKey) return {*c.kv_heads, s.keys(), *c.head_size};
  if (m == Matrix::kValue) return {*c.kv_heads, s.keys(), *c.value_head_size};
  return {c.query_heads, s.queries, *c.value_head_size};
}

// The rows of a batch row that a matrix multiplies.
int64_t RowsOf(const LayerShape& s, Matrix m) {
  return m == Matrix::kQuery || m == Matrix::kOutput ? s.queries : s.tokens;
}

// The input that is projected: key defaults to query, value to key.
Role SourceOf(const LayerShape& s, Matrix m) {
  if (m == Matrix::kValue && s.has_value) return Role::kV;
  return m != Matrix::kQuery && s.has_key ? Role::kK : Role::kQ;
}

// The inputs that a positional encoding is added to.
absl::InlinedVector<Role, 3> EncodedInputs(const LayerShape& s) {
  absl::InlinedVector<Role, 3> roles;
  if (!s.config().positional_base) return roles;
  roles.push_back(Role::kQ);
  if (s.has_key) roles.push_back(Role::kK);
  if (s.has_value) roles.push_back(Role::kV);
  return roles;
}

TensorSpec SpecOf(const LayerShape& s, Role input) {
  const LayerConfig& c = s.config();
  if (input == Role::kQ) return {s.dtype, {s.batch, s.queries, c.embed_size}};
  const int64_t size = input == Role::kK ? *c.key_embed_size : *c.value_embed_size;
  return {s.dtype, {s.batch, s.tokens, size}};
}

// The arrays that all tasks share. Some are absent.
struct Arrays {
  explicit Arrays(const LayerShape& s) {
    const int64_t size = SizeOf(s.dtype);
    for (const Role input : EncodedInputs(s)) {
      const Shape shape = SpecOf(s, input).shape;
      encoded[input] = arena.Take<std::byte>({shape[0], shape[1], shape[2], size});
    }
    for (const Matrix m : kProjected) {
      if (!s.weights().has(m)) continue;
      const Heads h = HeadsOf(s, m);
      heads[static_cast<size_t>(m)] =
          arena.Take<std::byte>({s.batch, h.heads, h.length, h.size, size});
    }
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
  InputMap<Array> encoded;
  std::array<Array, kProjected.size()> heads;
  Array output;  // of attention, [B, Sq, Hq, Dv]
  Array mask, bias, weights;

 private:
  Array TakeMask(const MaskShape& shape) {
    return arena.Take<std::byte>(
        {shape.dims[0], shape.dims[1], shape.dims[2], shape.dims[3], SizeOf(shape.dtype)});
  }
};

// Attention's stages have the step kAttend.
enum class Step : uint8_t { kEncode, kProject, kNormalize, kAttend, kOutput };

class LayerPlan final : public BackendPlan {
 public:
  std::string Describe() const override {
    return attention.backend_plan == nullptr ? "" : attention.backend_plan->Describe();
  }

  // An encoding of an input, with its place among the shared bytes.
  struct Encoding {
    Role input;
    std::shared_ptr<const TensorOperator> op;
    Plan plan;
    int64_t workspace = 0;
  };

  ProjectionKernel kernel = {};
  absl::InlinedVector<Step, 6> steps;  // of each stage
  absl::InlinedVector<Encoding, 3> encodings;
  std::array<Projection, kMatrices> projections;
  Plan attention;
  int attention_stage = 0;  // the first
  // Of attention and the kernels, which do not run at the same time.
  int64_t parts_begin = 0;
};

Plan PartPlan(const Plan& whole) {
  Plan plan;
  plan.routing.backend = whole.routing.backend;
  plan.isa = whole.isa;
  plan.threads = whole.threads;
  return plan;
}

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
    switch (plan_.steps[stage]) {
      case Step::kEncode:
        return Encode(task);
      case Step::kProject:
        return ProjectInputs(task);
      case Step::kNormalize:
        return Normalize(task);
      case Step::kAttend:
        return Attend(stage, task);
      case Step::kOutput:
        return ProjectOutput(task);
    }
  }

  // The number of rows of heads, which are adjacent, in tasks of kNormRows.
  static int64_t NormTasks(const LayerShape& s, Matrix m) {
    const Vector norm = m == Matrix::kQuery ? Vector::kQueryNorm : Vector::kKeyNorm;
    if (!s.weights().has(norm)) return 0;
    const Heads h = HeadsOf(s, m);
    return CeilDiv(s.batch * h.heads * h.length, kNormRows);
  }

  static int64_t AverageTasks(const LayerShape& s) {
    return s.wants_averaged_weights ? CeilDiv(s.batch * s.queries, AverageRows(s)) : 0;
  }

 private:
  static int64_t AverageRows(const LayerShape& s) {
    return std::max<int64_t>(kAverageTask / std::max<int64_t>(s.heads() * s.keys(), 1), 1);
  }

  const std::byte* InputOf(Matrix m) const {
    const Role role = SourceOf(s_, m);
    return s_.config().positional_base ? arrays_.encoded[role].In(workspace_)
                                       : a_.inputs[role].data;
  }
  std::byte* HeadsAt(Matrix m) const {
    return arrays_.heads[static_cast<size_t>(m)].In(workspace_);
  }
  std::byte* WeightsAt() const {
    return s_.wants_weights ? a_.outputs[kLayerWeights].data : arrays_.weights.In(workspace_);
  }
  std::byte* AttendedAt() const {
    return s_.weights().has(Matrix::kOutput) ? arrays_.output.In(workspace_)
                                             : a_.outputs[Role::kY].data;
  }
  std::byte* Scratch() const {
    return workspace_ + plan_.parts_begin + worker_ * plan_.kernel.scratch_bytes;
  }

  void Encode(int64_t task) const {
    for (const LayerPlan::Encoding& encoding : plan_.encodings) {
      if (task >= encoding.plan.stages[0]) {
        task -= encoding.plan.stages[0];
        continue;
      }
      Arguments a;
      a.inputs[kTokens].data = a_.inputs[encoding.input].data;
      a.outputs[Role::kY].data = arrays_.encoded[encoding.input].In(workspace_);
      return encoding.op->RunTask(encoding.plan, a, workspace_ + encoding.workspace, 0, task,
                                  worker_, checkpoint_);
    }
  }

  void ProjectInputs(int64_t task) const {
    for (const Matrix m : kProjected) {
      const Projection& projection = plan_.projections[static_cast<size_t>(m)];
      if (task < projection.tasks()) {
        return projection.Run(plan_.kernel, InputOf(m), HeadsOutput(m), task, Scratch(),
                              checkpoint_);
      }
      task -= projection.tasks();
    }
    if (task < mask_.tasks()) {
      return mask_.Write(a_, task, arrays_.mask.In(workspace_), arrays_.bias.In(workspace_));
    }
    const int64_t b = task - mask_.tasks();
    AppendExtra(Matrix::kKey, Vector::kExtraKey, b);
    AppendExtra(Matrix::kValue, Vector::kExtraValue, b);
  }

  ProjectionOutput HeadsOutput(Matrix m) const {
    const Heads h = HeadsOf(s_, m);
    const int64_t row = h.size * SizeOf(s_.dtype);
    return {.data = HeadsAt(m),
            .head_size = h.size,
            .head_stride = h.length * row,
            .length = RowsOf(s_, m),
            .row_stride = row,
            .batch_stride = h.heads * h.length * row};
  }

  // Writes bias_k or bias_v as the last row of each head of a batch row.
  void AppendExtra(Matrix m, Vector extra, int64_t b) const {
    const Heads h = HeadsOf(s_, m);
    const PackedVector& numbers = s_.weights()[extra];
    for (int64_t head = 0; head < h.heads; ++head) {
      const int64_t first = ((b * h.heads + head) * h.length + s_.tokens) * h.size;
      for (int64_t d = 0; d < h.size; ++d) {
        StoreElement(HeadsAt(m), s_.dtype, first + d,
                     LoadElement(numbers.data, numbers.dtype, head * h.size + d));
      }
    }
  }

  void Normalize(int64_t task) const {
    const int64_t query_tasks = NormTasks(s_, Matrix::kQuery);
    const bool is_query = task < query_tasks;
    if (!is_query) task -= query_tasks;
    const Matrix m = is_query ? Matrix::kQuery : Matrix::kKey;
    const PackedVector& norm = s_.weights()[is_query ? Vector::kQueryNorm : Vector::kKeyNorm];
    const Heads h = HeadsOf(s_, m);
    const int64_t first = task * kNormRows;
    plan_.kernel.normalize({.rows = HeadsAt(m) + first * h.size * SizeOf(s_.dtype),
                            .element = ElementOf(s_.dtype),
                            .count = std::min(kNormRows, s_.batch * h.heads * h.length - first),
                            .size = h.size,
                            .weights = norm.data,
                            .weight_element = ElementOf(norm.dtype),
                            .epsilon = s_.config().norm_epsilon,
                            .checkpoint = checkpoint_});
  }

  // The heads as attention reads them: in their order, or side by side in an input.
  TensorView HeadsView(Matrix m) const {
    const Heads h = HeadsOf(s_, m);
    const std::array<int64_t, 4> dims = {s_.batch, h.heads, h.length, h.size};
    if (s_.weights().has(m)) return {HeadsAt(m), s_.dtype, dims, RowMajorStrides(dims)};
    return {InputOf(m), s_.dtype, dims, SideBySide(h)};
  }
  static std::array<int64_t, 4> SideBySide(const Heads& h) {
    return {h.length * h.heads * h.size, h.size, h.heads * h.size, 1};
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
    plan_.attention.routing.backend->RunTask(plan_.attention, a, workspace_ + plan_.parts_begin,
                                             stage - plan_.attention_stage, task, worker_,
                                             checkpoint_);
  }

  void ProjectOutput(int64_t task) const {
    const Projection& projection = plan_.projections[static_cast<size_t>(Matrix::kOutput)];
    if (task >= projection.tasks()) return Average(task - projection.tasks());
    const int64_t columns = s_.layer->output_size();
    projection.Run(plan_.kernel, AttendedAt(),
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

  void PlanTasks(Plan& plan) const override {
    if (s_.empty()) return;
    const auto layer = std::make_shared<LayerPlan>();
    const ProjectionKernels& kernels = ProjectionKernelsOf(plan.isa);
    const bool is_fp64 = s_.dtype == DType::kFloat64 || plan.isa.empty();
    layer->kernel = is_fp64 ? kernels.fp64 : kernels.fp32;
    layer->parts_begin = arrays_.arena.bytes();
    PlanEncodings(plan, *layer);
    PlanProjections(plan, *layer);
    layer->attention = PartPlan(plan);
    layer->attention.problem = AttentionOf(s_);
    plan.routing.backend->PlanTasks(layer->attention);
    AddStages(plan, *layer);
    const int64_t scratch = plan.threads * layer->kernel.scratch_bytes;
    plan.shared_workspace_bytes =
        layer->parts_begin + std::max(scratch, layer->attention.workspace_bytes());
    plan.flops += layer->attention.flops;
    plan.backend_plan = layer;
  }

  void RunTask(const Plan& plan, const Arguments& a, std::byte* workspace, int stage, int64_t task,
               int worker, const Checkpoint& checkpoint) const override {
    const auto& layer = static_cast<const LayerPlan&>(*plan.backend_plan);
    Run(s_, mask_, arrays_, layer, a, workspace, worker, checkpoint).Task(stage, task);
  }

 private:
  void PlanEncodings(const Plan& plan, LayerPlan& layer) const {
    for (const Role input : EncodedInputs(s_)) {
      PositionalEncodingCall call;
      call.base = s_.config().positional_base;
      call.inputs[kTokens] = SpecOf(s_, input);
      LayerPlan::Encoding encoding{input, MakePositionalEncoding(call).value(), PartPlan(plan)};
      encoding.op->PlanTasks(encoding.plan);
      encoding.workspace = layer.parts_begin;
      layer.parts_begin += encoding.plan.workspace_bytes();
      layer.encodings.push_back(std::move(encoding));
    }
  }

  void PlanProjections(Plan& plan, LayerPlan& layer) const {
    for (size_t m = 0; m < kMatrices; ++m) {
      const auto matrix = static_cast<Matrix>(m);
      if (!s_.weights().has(matrix)) continue;
      layer.projections[m] = Projection(s_.weights().matrices[m], s_.weights().vectors[m], s_.dtype,
                                        s_.batch * RowsOf(s_, matrix), plan.threads);
      plan.flops += layer.projections[m].flops();
    }
  }

  void AddStages(Plan& plan, LayerPlan& layer) const {
    const auto add = [&](Step step, int64_t tasks) {
      if (tasks == 0) return;
      plan.stages.push_back(tasks);
      layer.steps.push_back(step);
    };
    int64_t encodings = 0;
    for (const LayerPlan::Encoding& encoding : layer.encodings) {
      encodings += encoding.plan.stages[0];
    }
    add(Step::kEncode, encodings);
    int64_t projections = mask_.tasks() + (s_.has_extra_key() ? s_.batch : 0);
    for (const Matrix m : kProjected) {
      projections += layer.projections[static_cast<size_t>(m)].tasks();
    }
    add(Step::kProject, projections);
    add(Step::kNormalize, Run::NormTasks(s_, Matrix::kQuery) + Run::NormTasks(s_, Matrix::kKey));
    layer.attention_stage = static_cast<int>(plan.stages.size());
    for (const int64_t tasks : layer.attention.stages) {
      plan.stages.push_back(tasks);
      layer.steps.push_back(Step::kAttend);
    }
    add(Step::kOutput,
        layer.projections[static_cast<size_t>(Matrix::kOutput)].tasks() + Run::AverageTasks(s_));
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
            .mask = mask.mask(),
            .bias = mask.bias(),
            .dropout = s.dropout,
            .interleaved = c.interleaved,
            .rotary_embedding_dim = c.rotary_embedding_dim,
            .rope_theta = c.rope_theta,
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
