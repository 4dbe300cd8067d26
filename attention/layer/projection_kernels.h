// The kernels of projections for each instruction set.
#ifndef RAPT_ATTENTION_LAYER_PROJECTION_KERNELS_H_
#define RAPT_ATTENTION_LAYER_PROJECTION_KERNELS_H_

#include "absl/strings/string_view.h"
#include "attention/layer/projection_task.h"

namespace rapt {

// Returns the kernels of an instruction set; the portable ones for a backend that has none.
// REQUIRES: the machine has the instruction set.
const ProjectionKernels& ProjectionKernelsOf(absl::string_view isa);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_PROJECTION_KERNELS_H_
