#include "attention/layer/projection.h"

#include <algorithm>

#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace {

// So that threads do not idle while the last tasks finish.
constexpr int64_t kTasksPerThread = 4;
// A multiple of every kernel's rows of registers.
constexpr int64_t kRowStep = 12;

}  // namespace

Projection::Projection(const ProjectionKernel& kernel, const PackedMatrix& matrix,
                       const PackedVector& bias, DType dtype, int64_t rows, int64_t threads)
    : kernel_(kernel), matrix_(matrix), bias_(bias), dtype_(dtype), rows_(rows) {
  if (rows == 0) return;
  const int64_t row_blocks = CeilDiv(rows, kMostProjectedRows);
  task_rows_ = std::min(RoundUp(CeilDiv(rows, row_blocks), kRowStep), rows);
  if (kernel.in_place(ElementOf(dtype), ElementOf(matrix.dtype))) return;
  const int64_t wanted = CeilDiv(threads * kTasksPerThread, row_blocks);
  task_columns_ =
      std::clamp<int64_t>(matrix.panel_count() / wanted, 1, kMostPanels) * kPanelColumns;
}

int64_t Projection::tasks() const {
  return CeilDiv(rows_, task_rows_) * CeilDiv(matrix_.columns, task_columns_);
}

double Projection::flops() const {
  return 2 * static_cast<double>(rows_) * static_cast<double>(matrix_.depth) *
         static_cast<double>(matrix_.columns);
}

// Neighboring tasks share columns, whose panels are then read once by all threads.
void Projection::Run(const std::byte* x, const ProjectionOutput& output, int64_t task,
                     std::byte* scratch, const Checkpoint& checkpoint) const {
  const int64_t row_tasks = CeilDiv(rows_, task_rows_);
  const int64_t first_row = task % row_tasks * task_rows_;
  const int64_t first_column = task / row_tasks * task_columns_;
  kernel_.project({.x = x,
                   .element = ElementOf(dtype_),
                   .depth = matrix_.depth,
                   .first_row = first_row,
                   .rows = std::min(task_rows_, rows_ - first_row),
                   .panels = matrix_.panels,
                   .weight = ElementOf(matrix_.dtype),
                   .panel_bytes = matrix_.panel_bytes(),
                   .first_column = first_column,
                   .columns = std::min(task_columns_, matrix_.columns - first_column),
                   .bias = bias_.data,
                   .bias_element = ElementOf(bias_.dtype),
                   .output = output,
                   .checkpoint = checkpoint,
                   .scratch = scratch});
}

}  // namespace rapt
