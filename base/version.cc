#include "base/version.h"

namespace rapt {

absl::string_view Version() { return RAPT_VERSION; }

}  // namespace rapt
