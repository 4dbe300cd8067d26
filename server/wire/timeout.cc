#include "server/wire/timeout.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/ascii.h"

namespace rapt {
namespace {

constexpr size_t kMaxTimeoutDigits = 8;

std::optional<std::chrono::nanoseconds> UnitOf(char unit) {
  switch (unit) {
    case 'H':
      return std::chrono::hours(1);
    case 'M':
      return std::chrono::minutes(1);
    case 'S':
      return std::chrono::seconds(1);
    case 'm':
      return std::chrono::milliseconds(1);
    case 'u':
      return std::chrono::microseconds(1);
    case 'n':
      return std::chrono::nanoseconds(1);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<std::chrono::nanoseconds> ParseTimeout(absl::string_view digits) {
  if (digits.size() < 2 || digits.size() > kMaxTimeoutDigits + 1) return std::nullopt;
  const auto unit = UnitOf(digits.back());
  digits.remove_suffix(1);
  int64_t count = 0;
  for (const char digit : digits) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(digit))) return std::nullopt;
    count = count * 10 + (digit - '0');
  }
  if (!unit) return std::nullopt;
  if (count > std::chrono::nanoseconds::max() / *unit) return std::chrono::nanoseconds::max();
  return count * *unit;
}

}  // namespace rapt
