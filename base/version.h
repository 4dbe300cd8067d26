#ifndef RAPT_BASE_VERSION_H_
#define RAPT_BASE_VERSION_H_

#include "absl/strings/string_view.h"

namespace rapt {

// Returns the version of the build, such as "0.1.0".
absl::string_view Version();

}  // namespace rapt

#endif  // RAPT_BASE_VERSION_H_
