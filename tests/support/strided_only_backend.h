#ifndef RAPT_TESTS_SUPPORT_STRIDED_ONLY_BACKEND_H_
#define RAPT_TESTS_SUPPORT_STRIDED_ONLY_BACKEND_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"

namespace rapt::test {

// Reads neither sliced nor paged tensors. Accepts all problems and computes nothing.
class StridedOnlyBackend final : public Backend {
 public:
  absl::string_view name() const override { return "strided_only"; }
  absl::Status Supports(const Problem&) const override { return absl::OkStatus(); }
  void PlanTasks(Plan&) const override {}
  void RunTask(const Plan&, const Arguments&, std::byte*, int, int64_t, int,
               const Checkpoint&) const override {}
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_STRIDED_ONLY_BACKEND_H_
