// The definition of lsh_attention, in float64 and without regard to speed.
#ifndef RAPT_ATTENTION_MECHANISM_LSH_DEFINITION_H_
#define RAPT_ATTENTION_MECHANISM_LSH_DEFINITION_H_

#include <cstddef>
#include <cstdint>

#include "attention/mechanism/lsh/lsh_shape.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/work_meter.h"

namespace rapt {

// Returns whether the memory of a worker has a size that fits into 64 bits.
bool FitsDefinition(const LshShape& shape);

// One task for each head. REQUIRES: the shape is not empty and fits.
void PlanDefinition(const LshShape& shape, Plan& plan);
void RunDefinition(const LshShape& shape, const Arguments& arguments, std::byte* workspace,
                   int64_t task, WorkMeter& meter);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_DEFINITION_H_
