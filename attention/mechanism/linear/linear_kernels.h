// The kernels of linear attention for each instruction set.
#ifndef RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_KERNELS_H_
#define RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_KERNELS_H_

#include "absl/strings/string_view.h"
#include "attention/mechanism/linear/linear_task.h"
#include "attention/tensor_view.h"

namespace rapt {

// Returns the kernel that sums in FP32 or FP64. REQUIRES: the machine has the instruction set.
const LinearKernel& LinearKernelOf(absl::string_view isa, DType accumulator);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_KERNELS_H_
