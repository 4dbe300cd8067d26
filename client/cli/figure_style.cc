#include "client/cli/figure_style.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "client/cli/picture.h"

namespace rapt {
namespace {

constexpr double kMaxLabelWidth = 140;  // longer labels are truncated

}  // namespace

std::string Shorten(const std::string& label) {
  if (TextWidth(label, kLabelSize) <= kMaxLabelWidth) return label;
  std::string start = label;
  do {
    // Removes a whole UTF-8 character: its continuation bytes are 10xxxxxx.
    while ((static_cast<unsigned char>(start.back()) & 0xc0) == 0x80) start.pop_back();
    start.pop_back();
  } while (TextWidth(start + "…", kLabelSize) > kMaxLabelWidth);
  return start + "…";
}

double WidestLabel(const std::vector<std::string>& labels) {
  double widest = 0;
  for (const std::string& label : labels) widest = std::max(widest, TextWidth(label, kLabelSize));
  return widest;
}

std::vector<double> Ticks(double low, double high) {
  const double rough = (high / 2 - low / 2) / 2.5;  // exact before the last division, no overflow
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = power;
  for (const double multiple : {1.0, 2.0, 5.0, 10.0}) {
    step = multiple * power;
    if (step >= rough * 0.999) break;
  }
  std::vector<double> ticks;
  const auto last = std::floor(high / step + 1e-6);
  for (auto n = static_cast<int64_t>(std::ceil(low / step)); n <= static_cast<int64_t>(last); ++n) {
    ticks.push_back(static_cast<double>(n) * step);
  }
  return ticks;
}

int64_t RoundStep(double step) {
  int64_t power = 1;
  for (;; power *= 10) {
    for (const int64_t multiple : {1, 2, 5}) {
      if (multiple * power >= step) return multiple * power;
    }
  }
}

std::string FormatTick(double tick) { return absl::StrFormat("%.3g", tick); }

}  // namespace rapt
