// lsh_attention on the kernels of a backend: products with rotations, and chunks of tokens in the
// order of their buckets, are small problems of attention.
#ifndef RAPT_ATTENTION_MECHANISM_LSH_ROUNDS_H_
#define RAPT_ATTENTION_MECHANISM_LSH_ROUNDS_H_

#include <cstddef>
#include <cstdint>

#include "attention/mechanism/lsh/lsh_shape.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/work_meter.h"

namespace rapt {

// Returns whether the workspace has a size that fits into 64 bits.
bool FitsRounds(const LshShape& shape);

// Stages: rotations, tokens, the order of tokens by bucket, as far as the call has them, and one
// for each round. REQUIRES: the shape is not empty and fits.
void PlanRounds(const LshShape& shape, Plan& plan);
void RunRounds(const LshShape& shape, const Plan& plan, const Arguments& arguments,
               std::byte* workspace, int stage, int64_t task, int worker, WorkMeter& meter);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_ROUNDS_H_
