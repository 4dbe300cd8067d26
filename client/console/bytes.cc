#include "client/console/bytes.h"

#include <cmath>
#include <cstddef>

#include "absl/strings/str_format.h"

namespace rapt {

std::string HumanBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; std::abs(value) >= 1024; ++unit) value /= 1024;
  return absl::StrFormat("%.4g %s", value, kUnits[unit]);
}

}  // namespace rapt
