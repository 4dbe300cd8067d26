// A projection of all rows of a tensor, divided into tasks.
#ifndef RAPT_ATTENTION_LAYER_PROJECTION_H_
#define RAPT_ATTENTION_LAYER_PROJECTION_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/layer/packed_layer.h"
#include "attention/layer/packed_matrix.h"
#include "attention/layer/projection_task.h"
#include "attention/tensor_view.h"

namespace rapt {

class Projection {
 public:
  Projection() = default;  // of no rows
  Projection(const ProjectionKernel& kernel, const PackedMatrix& matrix, const PackedVector& bias,
             DType dtype, int64_t rows, int64_t threads);

  int64_t tasks() const;
  double flops() const;

  // `x` has the rows, one after another. `scratch` has the kernel's scratch_bytes.
  void Run(const std::byte* x, const ProjectionOutput& output, int64_t task, std::byte* scratch,
           const Checkpoint& checkpoint) const;

 private:
  ProjectionKernel kernel_ = {};
  PackedMatrix matrix_;
  PackedVector bias_;
  DType dtype_ = DType::kFloat32;
  int64_t rows_ = 0;
  int64_t task_rows_ = 1;
  int64_t task_columns_ = kPanelColumns;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_PROJECTION_H_
