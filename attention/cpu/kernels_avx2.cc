// Kernels for AVX2 and FMA, x86-64-v3.
#define RAPT_VECTOR_BYTES 32
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 2
#define RAPT_KERNEL_TABLE kAvx2Kernels
#include "attention/cpu/kernels.inc"
