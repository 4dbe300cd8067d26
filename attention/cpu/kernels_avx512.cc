// Kernels for AVX-512 F, BW, CD, DQ and VL, x86-64-v4.
#define RAPT_VECTOR_BYTES 64
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 4
#define RAPT_KERNEL_TABLE kAvx512Kernels
#include "attention/cpu/kernels.inc"
