// Runs operators other than attention.
#ifndef RAPT_TESTS_SUPPORT_RUN_OPERATOR_H_
#define RAPT_TESTS_SUPPORT_RUN_OPERATOR_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/attention.h"
#include "attention/tensor_operator.h"
#include "base/aligned_buffer.h"

namespace rapt::test {

// Runs all tasks on worker 0, the last one of each stage first, in a workspace whose bytes read as
// NaN. REQUIRES: options are valid and the data has been checked.
inline void RunOperator(const TensorOperator& op, const Arguments& arguments,
                        const PlanOptions& options = {}) {
  const Plan plan = MakePlan(op, options).value();
  AlignedBuffer workspace(plan.workspace_bytes());
  std::fill(workspace.span().begin(), workspace.span().end(), std::byte{0xFF});
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    for (int64_t task = plan.stages[stage]; task-- > 0;) {
      op.RunTask(plan, arguments, workspace.data(), static_cast<int>(stage), task, /*worker=*/0,
                 /*checkpoint=*/{});
    }
  }
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RUN_OPERATOR_H_
