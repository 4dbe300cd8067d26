#include "attention/plan.h"

#include "absl/strings/str_cat.h"
#include "attention/backend.h"

namespace rapt {

std::string Plan::Describe() const {
  std::string text(routing.backend->name());
  if (!isa.empty()) absl::StrAppend(&text, "/", isa);
  if (stages.empty()) return absl::StrCat(text, " empty");
  const std::string detail = backend_plan == nullptr ? "" : backend_plan->Describe();
  return detail.empty() ? text : absl::StrCat(text, " ", detail);
}

}  // namespace rapt
