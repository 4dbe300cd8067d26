// Query, key and value of a layer on their way to attention: encoded, projected, split into heads,
// normalized and, for a cache, rotated.
#ifndef RAPT_ATTENTION_LAYER_LAYER_HEADS_H_
#define RAPT_ATTENTION_LAYER_LAYER_HEADS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "attention/arena.h"
#include "attention/checkpoint.h"
#include "attention/layer/layer_shape.h"
#include "attention/layer/projection.h"
#include "attention/layer/projection_task.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/tensor_operator.h"
#include "attention/tensor_view.h"

namespace rapt {

// The inputs that are projected, in the order of Matrix.
inline constexpr std::array kProjected = {Matrix::kQuery, Matrix::kKey, Matrix::kValue};

// A tensor of heads between a projection and attention.
struct Heads {
  int64_t heads = 0;
  int64_t length = 0;  // with the key of bias_k
  int64_t size = 0;
};
// Of kOutput: what attention writes.
Heads HeadsOf(const LayerShape& shape, Matrix m);

// The strides of [B, length, heads, size] as [B, heads, length, size].
std::array<int64_t, 4> SideBySide(const Heads& heads);

// Returns the plan of a part of an operator, for PlanTasks().
Plan PartPlan(const Plan& whole);

class LayerHeads {
 public:
  // In this order.
  enum class Step : uint8_t { kEncode, kProject, kNormalize, kRotate };
  static constexpr size_t kSteps = 4;

  // An operator that reads and writes an array of its own.
  struct Part {
    Matrix input;
    std::shared_ptr<const TensorOperator> op;
    Plan plan;
    int64_t workspace;
  };
  using Parts = absl::InlinedVector<Part, 3>;

  struct Tasks {
    ProjectionKernel kernel = {};
    std::array<Projection, kProjected.size()> projections;
    Parts encodings, rotations;
    std::array<int64_t, kSteps> counts = {};  // of each step

    int64_t of(Step step) const { return counts[static_cast<size_t>(step)]; }
  };

  // Takes its arrays from the arena. REQUIRES: `shape` outlives it.
  LayerHeads(const LayerShape& shape, Arena& arena);

  // Divides the steps into tasks, adds their flops to the plan, and takes their workspace from its
  // end on. REQUIRES: the shape fits memory.
  Tasks MakeTasks(const ProjectionKernel& kernel, Plan& plan, int64_t& workspace_end) const;

  // `scratch` has the kernel's scratch_bytes.
  void RunTask(const Tasks& tasks, Step step, int64_t task, const Arguments& arguments,
               std::byte* workspace, std::byte* scratch, int worker,
               const Checkpoint& checkpoint) const;

  // Returns what attention reads, after the steps. For a cache the heads lie side by side.
  TensorView View(Matrix m, const Arguments& arguments, std::byte* workspace) const;

 private:
  const std::byte* InputOf(Matrix m, const Arguments& arguments, std::byte* workspace) const;
  const std::byte* ProjectedOf(Matrix m, const Arguments& arguments, std::byte* workspace) const;
  ProjectionOutput OutputOf(Matrix m, std::byte* workspace) const;
  void Project(const Tasks& tasks, int64_t task, const Arguments& arguments, std::byte* workspace,
               std::byte* scratch, const Checkpoint& checkpoint) const;
  void AppendExtra(Matrix m, Vector extra, int64_t b, std::byte* workspace) const;
  void Normalize(const Tasks& tasks, int64_t task, std::byte* workspace,
                 const Checkpoint& checkpoint) const;
  void RunPart(const Parts& parts, Step step, int64_t task, const Arguments& arguments,
               std::byte* workspace, int worker, const Checkpoint& checkpoint) const;

  const LayerShape& s_;
  // Of the inputs that an encoding is added to, and of the heads that are not an input.
  std::array<std::optional<ArrayAt<std::byte>>, kProjected.size()> encoded_, heads_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_HEADS_H_
