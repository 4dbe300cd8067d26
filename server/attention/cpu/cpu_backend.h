#ifndef RAPT_SERVER_ATTENTION_CPU_CPU_BACKEND_H_
#define RAPT_SERVER_ATTENTION_CPU_CPU_BACKEND_H_

#include "server/attention/backend.h"

namespace rapt {

// Fused attention on the CPU: everything that rapt offers, for every type. Never holds Sq x T
// numbers.
const Backend& CpuBackend();

}  // namespace rapt

#endif  // RAPT_SERVER_ATTENTION_CPU_CPU_BACKEND_H_
