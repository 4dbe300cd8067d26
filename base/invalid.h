// Errors of invalid arguments.
#ifndef RAPT_BASE_INVALID_H_
#define RAPT_BASE_INVALID_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace rapt {

// Returns InvalidArgument with the parts joined: the name, what came and what is allowed.
template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace rapt

#endif  // RAPT_BASE_INVALID_H_
