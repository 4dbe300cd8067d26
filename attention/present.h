// present = past followed by the new keys and values: copy tasks that every backend's plan may
// have.
#ifndef RAPT_ATTENTION_PRESENT_H_
#define RAPT_ATTENTION_PRESENT_H_

#include <cstdint>

#include "attention/problem.h"

namespace rapt {

// Returns the number of independent copy tasks; 0 if the problem does not want present outputs.
int64_t PresentTasks(const Problem& problem);

void RunPresentTask(const Problem& problem, const Arguments& arguments, int64_t task);

}  // namespace rapt

#endif  // RAPT_ATTENTION_PRESENT_H_
