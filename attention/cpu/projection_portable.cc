// Projections with the instructions of the baseline of the build, x86-64-v2.
#define RAPT_VECTOR_BYTES 16
#define RAPT_MICRO_ROWS 4
#define RAPT_MICRO_VECTORS 2
#define RAPT_PROJECTION_TABLE kPortableProjectionKernels
#include "attention/cpu/projection.inc"
