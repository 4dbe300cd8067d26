// The interface between a layer and the kernels of its projections. Plain structs without
// functions, because kernels of every instruction set include this header (docs/decisions/0001).
#ifndef RAPT_ATTENTION_LAYER_PROJECTION_TASK_H_
#define RAPT_ATTENTION_LAYER_PROJECTION_TASK_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/score/score.h"

namespace rapt {

// A packed matrix consists of panels of kPanelColumns columns of Wᵀ, the last one filled up with
// zeros. A panel has a row of kPanelColumns numbers for each of the `depth` inputs. Rows of BF16
// lie in pairs, the two numbers of a column side by side, for dot products; zeros fill the depth up
// to a multiple of kPairDepth.
inline constexpr int64_t kPanelColumns = 64;
inline constexpr int64_t kPairDepth = 32;

// A task of at most this many rows is bound by reading the panels.
inline constexpr int64_t kFewProjectedRows = 8;
// The most rows and panels of a task, whose sums then take 96 KiB of L2 in FP32.
inline constexpr int64_t kMostProjectedRows = 96;
inline constexpr int64_t kMostPanels = 4;

// Where row r and column n of a product are stored: in the order of heads.
struct ProjectionOutput {
  std::byte* data;
  int64_t head_size;     // columns side by side
  int64_t head_stride;   // bytes from one head to the next
  int64_t length;        // rows of a batch row
  int64_t row_stride;    // bytes
  int64_t batch_stride;  // bytes
};

// Rows [first_row, first_row + rows) of x Wᵀ + b, in columns [first_column, first_column +
// columns).
struct ProjectionTask {
  const std::byte* x;  // row 0; rows are adjacent
  Element element;     // of x and the output
  int64_t depth;       // numbers in a row of x, at least 1
  int64_t first_row;
  int64_t rows;  // at most kMostProjectedRows

  const std::byte* panels;  // of column 0
  Element weight;
  int64_t panel_bytes;
  int64_t first_column;   // a multiple of kPanelColumns
  int64_t columns;        // in at most kMostPanels panels
  const std::byte* bias;  // a number for each column from 0 on, or null
  Element bias_element;   // FP32 or FP64

  ProjectionOutput output;
  Checkpoint checkpoint;
  std::byte* scratch;  // scratch_bytes, aligned to 64
};

// Rows of a tensor that are divided by their root mean square and multiplied by weights, in place.
struct NormTask {
  std::byte* rows;  // adjacent
  Element element;
  int64_t count;
  int64_t size;
  const std::byte* weights;  // `size` numbers
  Element weight_element;    // FP32 or FP64
  double epsilon;            // added to the mean square
  Checkpoint checkpoint;
};

// What an instruction set computes, with sums in FP32 or FP64.
struct ProjectionKernel {
  int64_t scratch_bytes;  // of any task
  // Returns whether tasks read x where it lies. Otherwise each copies its rows, once for all of its
  // panels.
  bool (*in_place)(Element x, Element weight);
  // Return false if the checkpoint abandoned the task.
  bool (*project)(const ProjectionTask& task);
  bool (*normalize)(const NormTask& task);
};

struct ProjectionKernels {
  ProjectionKernel fp32;
  ProjectionKernel fp64;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_PROJECTION_TASK_H_
