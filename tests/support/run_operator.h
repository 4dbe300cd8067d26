// Runs operators other than attention.
#ifndef RAPT_TESTS_SUPPORT_RUN_OPERATOR_H_
#define RAPT_TESTS_SUPPORT_RUN_OPERATOR_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "attention/tensor_operator.h"
#include "base/aligned_buffer.h"
#include "tests/support/tensor.h"

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

// Succeeds if max |got - want| <= (t + 8 u most_score) max |want|, where t is of the type and u its
// rounding, for FP32 and FP64.
inline ::testing::AssertionResult IsClose(DType dtype, const Tensor& got,
                                          const std::vector<double>& want, double most_score = 0) {
  double limit = dtype == DType::kFloat64   ? 1e-12 + 8 * most_score * 0x1p-53
                 : dtype == DType::kFloat32 ? 1e-5 + 8 * most_score * 0x1p-24
                 : dtype == DType::kFloat16 ? 4e-3
                                            : 3e-2;
  double largest = 0;
  for (const double value : want) largest = std::max(largest, std::fabs(value));
  limit *= largest;
  const std::vector<double> values = got.ToVector();
  if (values.size() != want.size()) return ::testing::AssertionFailure() << "another size";
  for (size_t n = 0; n < want.size(); ++n) {
    if (std::fabs(values[n] - want[n]) <= limit) continue;
    return ::testing::AssertionFailure()
           << "element " << n << " is " << values[n] << ", want " << want[n] << " within " << limit;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RUN_OPERATOR_H_
