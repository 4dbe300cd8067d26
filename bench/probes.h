/* Measures the peak rates of this machine, the upper bounds for kernels. Each probe runs on
 * `threads` threads at once for some milliseconds and returns the best of a few tries. */
#ifndef RAPT_BENCH_PROBES_H_
#define RAPT_BENCH_PROBES_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Fused multiply-adds of FP32 in the widest registers, in 10^9 operations a second. An add and a
 * multiply count as one each. */
double rapt_probe_fma_gflops(int threads);

/* The same for products of BF16 tiles; 0 on a machine without AMX. */
double rapt_probe_amx_gflops(int threads);

/* Reading memory far beyond the caches, in 10^9 bytes a second. */
double rapt_probe_read_gbps(int threads);

#ifdef __cplusplus
}
#endif

#endif /* RAPT_BENCH_PROBES_H_ */
