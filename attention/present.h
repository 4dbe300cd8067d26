// present = past followed by the new keys and values: a copy that every backend's plan may hold.
#ifndef RAPT_ATTENTION_PRESENT_H_
#define RAPT_ATTENTION_PRESENT_H_

#include <cstdint>

#include "attention/problem.h"

namespace rapt {

// Independent tasks that the copy falls into; 0 when nobody wants it.
int64_t PresentTasks(const Problem& problem);

void RunPresentTask(const Problem& problem, const Arguments& arguments, int64_t task);

}  // namespace rapt

#endif  // RAPT_ATTENTION_PRESENT_H_
