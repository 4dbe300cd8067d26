#include "base/range.h"

#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/invalid.h"

namespace rapt {
namespace {

// "1024]", "2^40]", "2^62)"
std::string UpperEnd(int64_t most) {
  constexpr int64_t kShort = int64_t{1} << 31;
  const auto number = static_cast<uint64_t>(most);
  if (most < kShort) return absl::StrCat(most, "]");
  if (std::has_single_bit(number)) return absl::StrCat("2^", std::bit_width(number) - 1, "]");
  if (std::has_single_bit(number + 1)) return absl::StrCat("2^", std::bit_width(number), ")");
  return absl::StrCat(most, "]");
}

}  // namespace

absl::Status CheckRange(absl::string_view name, absl::int128 value, IntegerRange range) {
  if (value >= range.least && value <= range.most) return absl::OkStatus();
  const bool is_small = value < range.least;
  const std::string number = is_small ? absl::StrCat(static_cast<int64_t>(value))
                                      : absl::StrCat(static_cast<uint64_t>(value));
  const std::string allowed = is_small && range.most == std::numeric_limits<int64_t>::max()
                                  ? absl::StrCat("at least ", range.least)
                                  : absl::StrCat("in [", range.least, ", ", UpperEnd(range.most));
  return Invalid(name, " is ", number, "; it must be ", allowed);
}

}  // namespace rapt
