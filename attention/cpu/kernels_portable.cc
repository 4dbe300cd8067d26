// Kernels for the baseline of the build, x86-64-v2.
#define RAPT_VECTOR_BYTES 16
#define RAPT_MICRO_ROWS 4
#define RAPT_MICRO_VECTORS 2
#define RAPT_KERNEL_TABLE kPortableKernels
#include "attention/cpu/kernels.inc"
