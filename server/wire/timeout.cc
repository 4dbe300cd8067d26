#include "server/wire/timeout.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"

namespace rapt {
namespace {

constexpr size_t kMaxTimeoutDigits = 8;

std::optional<std::chrono::nanoseconds> UnitOf(char unit) {
  static constexpr std::pair<char, std::chrono::nanoseconds> kUnits[] = {
      {'H', std::chrono::hours(1)},        {'M', std::chrono::minutes(1)},
      {'S', std::chrono::seconds(1)},      {'m', std::chrono::milliseconds(1)},
      {'u', std::chrono::microseconds(1)}, {'n', std::chrono::nanoseconds(1)}};
  for (const auto& [name, length] : kUnits) {
    if (name == unit) return length;
  }
  return std::nullopt;
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
