// The backward pass on the CPU.
//
// A task takes the blocks of query rows of one key/value head one after the other, and sums their
// dK and dV in its own part of the shared workspace. How rows are divided depends on the problem
// alone, and the parts are added in a fixed order, so that the number of threads does not change
// the result.
#ifndef RAPT_ATTENTION_CPU_BACKWARD_H_
#define RAPT_ATTENTION_CPU_BACKWARD_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "attention/checkpoint.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt::cpu {

// As the functions of Backend, for problems with Problem::backward.
absl::Status SupportsBackward(const Problem& problem);
void PlanBackward(Plan& plan);
void RunBackwardTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
                     int64_t task, int worker, const Checkpoint& checkpoint);

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_BACKWARD_H_
