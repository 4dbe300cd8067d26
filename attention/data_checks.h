// Checks of the numbers in inputs that have to be checked beyond their type and shape: the
// positions of the rotary embedding and the selected indices. They read whole tensors, so they are
// tasks.
#ifndef RAPT_ATTENTION_DATA_CHECKS_H_
#define RAPT_ATTENTION_DATA_CHECKS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "attention/field_names.h"
#include "attention/problem.h"

namespace rapt {

// The number of tasks; 0 if there is nothing to check.
int64_t DataChecks(const Problem& problem);

// Runs one of the tasks, which are independent. Returns InvalidArgument with the place, the number
// and the allowed numbers. REQUIRES: Validate(problem, arguments) is OK.
absl::Status CheckData(const Problem& problem, const Arguments& arguments, int64_t task,
                       const FieldNames& names = kOnnxNames);

// Runs all tasks.
absl::Status CheckData(const Problem& problem, const Arguments& arguments,
                       const FieldNames& names = kOnnxNames);

}  // namespace rapt

#endif  // RAPT_ATTENTION_DATA_CHECKS_H_
