// The backward pass of the reference backend, in float64. Written for clarity: the gradients of
// masks and tables compute the rows that they sum again.
#ifndef RAPT_ATTENTION_REFERENCE_BACKWARD_H_
#define RAPT_ATTENTION_REFERENCE_BACKWARD_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt {

// As the functions of Backend, for problems with Problem::backward.
void PlanReferenceBackward(Plan& plan);
void RunReferenceBackward(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                          int stage, int64_t task, int worker, const Checkpoint& checkpoint);

}  // namespace rapt

#endif  // RAPT_ATTENTION_REFERENCE_BACKWARD_H_
