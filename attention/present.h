// The present outputs, past followed by new keys and values, are written by copy tasks, which the
// plan of any backend may include.
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
