#ifndef RAPT_ATTENTION_CPU_CPU_BACKEND_H_
#define RAPT_ATTENTION_CPU_CPU_BACKEND_H_

#include "attention/backend.h"

namespace rapt {

// Fused attention on the CPU. Supports every problem and type. Never stores the Sq x T score
// matrix.
const Backend& CpuBackend();

}  // namespace rapt

#endif  // RAPT_ATTENTION_CPU_CPU_BACKEND_H_
