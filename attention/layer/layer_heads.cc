#include "attention/layer/layer_heads.h"

#include <algorithm>
#include <utility>

#include "attention/half.h"
#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace {

// Rows of heads that a task normalizes.
constexpr int64_t kNormRows = 256;

size_t Index(Matrix m) { return static_cast<size_t>(m); }

// The rows of a batch row that a matrix multiplies.
int64_t RowsOf(const LayerShape& s, Matrix m) { return m == Matrix::kQuery ? s.queries : s.tokens; }

// Whether the input is given: key defaults to query, value to key.
bool IsGiven(const LayerShape& s, Matrix m) {
  return m == Matrix::kQuery || (m == Matrix::kKey ? s.has_key : s.has_value);
}

// The input that a matrix multiplies.
Matrix SourceOf(const LayerShape& s, Matrix m) {
  if (IsGiven(s, m)) return m;
  return m == Matrix::kValue ? SourceOf(s, Matrix::kKey) : Matrix::kQuery;
}

Role RoleOf(Matrix input) {
  constexpr Role kRoles[] = {Role::kQ, Role::kK, Role::kV};
  return kRoles[Index(input)];
}

TensorSpec SpecOf(const LayerShape& s, Matrix input) {
  const LayerConfig& c = s.config();
  const int64_t sizes[] = {c.embed_size, *c.key_embed_size, *c.value_embed_size};
  return {s.dtype, {s.batch, RowsOf(s, input), sizes[Index(input)]}};
}

bool IsEncoded(const LayerShape& s, Matrix input) {
  return s.config().positional_base.has_value() && IsGiven(s, input);
}

// Attention itself rotates what does not stay in a cache.
bool IsRotated(const LayerShape& s, Matrix m) {
  return s.cache != nullptr && s.config().rope_theta && m != Matrix::kValue;
}

// The rows of heads, which are adjacent, in tasks of kNormRows.
int64_t NormTasks(const LayerShape& s, Matrix m) {
  const Vector norm = m == Matrix::kQuery ? Vector::kQueryNorm : Vector::kKeyNorm;
  if (!s.weights().has(norm)) return 0;
  const Heads h = HeadsOf(s, m);
  return CeilDiv(s.batch * h.heads * h.length, kNormRows);
}

std::shared_ptr<const TensorOperator> EncodingOf(const LayerShape& s, Matrix input) {
  PositionalEncodingCall call;
  call.base = s.config().positional_base;
  call.first_position = s.first_position();
  call.inputs[kTokens] = SpecOf(s, input);
  return MakePositionalEncoding(call).value();
}

std::shared_ptr<const TensorOperator> RotationOf(const LayerShape& s, Matrix m) {
  const Heads h = HeadsOf(s, m);
  RotaryEmbeddingCall call;
  call.inputs[kTokens] = TensorSpec{s.dtype, {s.batch, h.length, h.heads * h.size}};
  call.first_position = s.first_position();
  call.interleaved = s.config().interleaved;
  call.num_heads = h.heads;
  call.rotary_embedding_dim = s.config().rotary_embedding_dim;
  call.rope_theta = s.config().rope_theta;
  call.rope_scaling = s.config().rope_scaling;
  return MakeRotaryEmbedding(call).value();
}

}  // namespace

Heads HeadsOf(const LayerShape& s, Matrix m) {
  const LayerConfig& c = s.config();
  if (m == Matrix::kQuery) return {c.query_heads, s.queries, *c.head_size};
  if (m == Matrix::kKey) return {*c.kv_heads, s.keys(), *c.head_size};
  if (m == Matrix::kValue) return {*c.kv_heads, s.keys(), *c.value_head_size};
  return {c.query_heads, s.queries, *c.value_head_size};
}

std::array<int64_t, 4> SideBySide(const Heads& h) {
  return {h.length * h.heads * h.size, h.size, h.heads * h.size, 1};
}

Plan PartPlan(const Plan& whole) {
  Plan plan;
  plan.routing.backend = whole.routing.backend;
  plan.isa = whole.isa;
  plan.threads = whole.threads;
  return plan;
}

LayerHeads::LayerHeads(const LayerShape& shape, Arena& arena) : s_(shape) {
  const int64_t size = SizeOf(s_.dtype);
  for (const Matrix m : kProjected) {
    if (!IsEncoded(s_, m)) continue;
    const Shape input = SpecOf(s_, m).shape;
    encoded_[Index(m)] = arena.Take<std::byte>({input[0], input[1], input[2], size});
  }
  for (const Matrix m : kProjected) {
    if (!s_.weights().has(m) && !IsRotated(s_, m)) continue;
    const Heads h = HeadsOf(s_, m);
    heads_[Index(m)] = arena.Take<std::byte>({s_.batch, h.heads, h.length, h.size, size});
  }
}

LayerHeads::Tasks LayerHeads::MakeTasks(const ProjectionKernel& kernel, Plan& plan,
                                        int64_t& workspace_end) const {
  Tasks tasks;
  tasks.kernel = kernel;
  const auto add = [&](Step step, int64_t count) {
    tasks.counts[static_cast<size_t>(step)] += count;
  };
  const auto add_part = [&](Step step, Matrix m, std::shared_ptr<const TensorOperator> op,
                            Parts& parts) {
    Part part{m, std::move(op), PartPlan(plan), workspace_end};
    part.op->PlanTasks(part.plan);
    workspace_end += part.plan.workspace_bytes();
    add(step, part.plan.stages[0]);
    parts.push_back(std::move(part));
  };
  for (const Matrix m : kProjected) {
    if (IsEncoded(s_, m)) add_part(Step::kEncode, m, EncodingOf(s_, m), tasks.encodings);
    if (s_.weights().has(m)) {
      Projection& projection = tasks.projections[Index(m)];
      projection = Projection(kernel, s_.weights()[m], s_.weights().vectors[Index(m)], s_.dtype,
                              s_.batch * RowsOf(s_, m), plan.threads);
      plan.flops += projection.flops();
      add(Step::kProject, projection.tasks());
    }
    if (m != Matrix::kValue) add(Step::kNormalize, NormTasks(s_, m));
    if (IsRotated(s_, m)) add_part(Step::kRotate, m, RotationOf(s_, m), tasks.rotations);
  }
  if (s_.has_extra_key()) add(Step::kProject, s_.batch);
  return tasks;
}

void LayerHeads::RunTask(const Tasks& tasks, Step step, int64_t task, const Arguments& arguments,
                         std::byte* workspace, std::byte* scratch, int worker,
                         const Checkpoint& checkpoint) const {
  switch (step) {
    case Step::kEncode:
      return RunPart(tasks.encodings, step, task, arguments, workspace, worker, checkpoint);
    case Step::kProject:
      return Project(tasks, task, arguments, workspace, scratch, checkpoint);
    case Step::kNormalize:
      return Normalize(tasks, task, workspace, checkpoint);
    case Step::kRotate:
      return RunPart(tasks.rotations, step, task, arguments, workspace, worker, checkpoint);
  }
}

TensorView LayerHeads::View(Matrix m, const Arguments& arguments, std::byte* workspace) const {
  const Heads h = HeadsOf(s_, m);
  const std::array<int64_t, 4> dims = {s_.batch, h.heads, h.length, h.size};
  const auto& array = heads_[Index(m)];
  const bool lie_apart = array && s_.cache == nullptr;
  return {array ? array->In(workspace) : InputOf(m, arguments, workspace), s_.dtype, dims,
          lie_apart ? RowMajorStrides(dims) : SideBySide(h)};
}

const std::byte* LayerHeads::InputOf(Matrix m, const Arguments& arguments,
                                     std::byte* workspace) const {
  const Matrix source = SourceOf(s_, m);
  const auto& encoded = encoded_[Index(source)];
  return encoded ? encoded->In(workspace) : arguments.inputs[RoleOf(source)].data;
}

const std::byte* LayerHeads::ProjectedOf(Matrix m, const Arguments& arguments,
                                         std::byte* workspace) const {
  return s_.weights().has(m) ? heads_[Index(m)]->In(workspace) : InputOf(m, arguments, workspace);
}

void LayerHeads::RunPart(const Parts& parts, Step step, int64_t task, const Arguments& arguments,
                         std::byte* workspace, int worker, const Checkpoint& checkpoint) const {
  for (const Part& part : parts) {
    if (task >= part.plan.stages[0]) {
      task -= part.plan.stages[0];
      continue;
    }
    const Matrix m = part.input;
    Arguments own;
    own.inputs[kTokens].data = step == Step::kEncode ? arguments.inputs[RoleOf(m)].data
                                                     : ProjectedOf(m, arguments, workspace);
    own.outputs[Role::kY].data =
        (step == Step::kEncode ? encoded_ : heads_)[Index(m)]->In(workspace);
    return part.op->RunTask(part.plan, own, workspace + part.workspace, 0, task, worker,
                            checkpoint);
  }
}

void LayerHeads::Project(const Tasks& tasks, int64_t task, const Arguments& arguments,
                         std::byte* workspace, std::byte* scratch,
                         const Checkpoint& checkpoint) const {
  for (const Matrix m : kProjected) {
    const Projection& projection = tasks.projections[Index(m)];
    if (task < projection.tasks()) {
      return projection.Run(InputOf(m, arguments, workspace), OutputOf(m, workspace), task, scratch,
                            checkpoint);
    }
    task -= projection.tasks();
  }
  AppendExtra(Matrix::kKey, Vector::kExtraKey, task, workspace);
  AppendExtra(Matrix::kValue, Vector::kExtraValue, task, workspace);
}

ProjectionOutput LayerHeads::OutputOf(Matrix m, std::byte* workspace) const {
  const Heads h = HeadsOf(s_, m);
  const int64_t row = h.size * SizeOf(s_.dtype);
  const bool lie_apart = s_.cache == nullptr;
  return {.data = heads_[Index(m)]->In(workspace),
          .head_size = h.size,
          .head_stride = lie_apart ? h.length * row : row,
          .length = RowsOf(s_, m),
          .row_stride = lie_apart ? row : h.heads * row,
          .batch_stride = h.heads * h.length * row};
}

// Writes bias_k or bias_v as the last row of each head of a batch row.
void LayerHeads::AppendExtra(Matrix m, Vector extra, int64_t b, std::byte* workspace) const {
  const Heads h = HeadsOf(s_, m);
  const PackedVector& numbers = s_.weights()[extra];
  for (int64_t head = 0; head < h.heads; ++head) {
    const int64_t first = ((b * h.heads + head) * h.length + s_.tokens) * h.size;
    for (int64_t d = 0; d < h.size; ++d) {
      StoreElement(heads_[Index(m)]->In(workspace), s_.dtype, first + d,
                   LoadElement(numbers.data, numbers.dtype, head * h.size + d));
    }
  }
}

void LayerHeads::Normalize(const Tasks& tasks, int64_t task, std::byte* workspace,
                           const Checkpoint& checkpoint) const {
  const int64_t query_tasks = NormTasks(s_, Matrix::kQuery);
  const bool is_query = task < query_tasks;
  if (!is_query) task -= query_tasks;
  const Matrix m = is_query ? Matrix::kQuery : Matrix::kKey;
  const PackedVector& norm = s_.weights()[is_query ? Vector::kQueryNorm : Vector::kKeyNorm];
  const Heads h = HeadsOf(s_, m);
  const int64_t first = task * kNormRows;
  tasks.kernel.normalize(
      {.rows = heads_[Index(m)]->In(workspace) + first * h.size * SizeOf(s_.dtype),
       .element = ElementOf(s_.dtype),
       .count = std::min(kNormRows, s_.batch * h.heads * h.length - first),
       .size = h.size,
       .weights = norm.data,
       .weight_element = ElementOf(norm.dtype),
       .epsilon = s_.config().norm_epsilon,
       .checkpoint = checkpoint});
}

}  // namespace rapt
