// The instruction sets that this machine can execute: the processor supports them and the operating
// system saves their registers.
#ifndef RAPT_ATTENTION_CPU_MACHINE_H_
#define RAPT_ATTENTION_CPU_MACHINE_H_

namespace rapt::cpu {

// The baseline of the whole build.
inline bool HasBaseline() { return true; }

// Return whether all instructions of -march=x86-64-v3 and -march=x86-64-v4 are supported.
bool HasX8664V3();
bool HasX8664V4();

// Returns whether x86-64-v4 and the dot products of AVX512-BF16 are supported, and a dot product of
// two pairs takes the time of an FMA: on AMD's processors, where it was measured. Intel's take four
// times as long.
bool HasFastAvx512Bf16();

// Returns whether x86-64-v4 and the tiles of AMX-BF16 are supported. Requests permission to use
// tiles for the whole process.
bool HasAmxBf16();

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_MACHINE_H_
