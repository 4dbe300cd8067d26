// The kernels of projections. As kernels.h says, each instruction set is one file with its own
// flags, from the one source projection.inc, and exports only its table.
#ifndef RAPT_ATTENTION_CPU_PROJECTION_KERNELS_H_
#define RAPT_ATTENTION_CPU_PROJECTION_KERNELS_H_

#include "attention/layer/projection_task.h"

namespace rapt::cpu {

extern const ProjectionKernels kPortableProjectionKernels;
extern const ProjectionKernels kAvx2ProjectionKernels;
extern const ProjectionKernels kAvx512ProjectionKernels;
extern const ProjectionKernels kAvx512Bf16ProjectionKernels;
extern const ProjectionKernels kAmxProjectionKernels;

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_PROJECTION_KERNELS_H_
