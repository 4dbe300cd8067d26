#include "client/cli/figure_style.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>

#include "absl/strings/str_format.h"

namespace rapt {
namespace {

constexpr double kMaxLabelWidth = 140;  // longer labels are truncated

// Every tenth of matplotlib's colour table. Linear interpolation between them is visually exact.
constexpr Colour kViridis[] = {
    {0x44, 0x01, 0x54}, {0x48, 0x24, 0x75}, {0x41, 0x44, 0x87}, {0x35, 0x5f, 0x8d},
    {0x2a, 0x78, 0x8e}, {0x21, 0x91, 0x8c}, {0x22, 0xa8, 0x84}, {0x44, 0xbf, 0x70},
    {0x7a, 0xd1, 0x51}, {0xbd, 0xdf, 0x26}, {0xfd, 0xe7, 0x25},
};

// The linear intensity of an sRGB channel.
double Linear(uint8_t channel) {
  const double c = channel / 255.0;
  return c <= 0.04045 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4);
}

uint8_t Interpolate(uint8_t low, uint8_t high, double share) {
  return static_cast<uint8_t>(std::lround(low + (high - low) * share));
}

}  // namespace

void Plotter::DrawTitle(const std::string& note) {
  Add(Text{kMargin, kMargin + kTitleSize / 2, picture_.title, kTitleSize, kInk, Anchor::kStart, 0,
           true});
  if (!note.empty()) Add(Text{kMargin, kMargin + kTitleSize + 12, note, kNoteSize, kFaintInk});
}

Picture Plotter::Finish(double width, double height) && {
  picture_.width = std::max(width, kMargin * 2 + TextWidth(picture_.title, kTitleSize, true));
  picture_.height = height;
  return std::move(picture_);
}

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

Colour Viridis(double share) {
  constexpr size_t kLast = std::size(kViridis) - 1;
  const double at = std::clamp(share, 0.0, 1.0) * kLast;
  const size_t below = std::min(static_cast<size_t>(at), kLast - 1);
  const Colour& low = kViridis[below];
  const Colour& high = kViridis[below + 1];
  const double rest = at - static_cast<double>(below);
  return {Interpolate(low.red, high.red, rest), Interpolate(low.green, high.green, rest),
          Interpolate(low.blue, high.blue, rest)};
}

Colour ReadableOn(Colour background) {
  const double luminance = 0.2126 * Linear(background.red) + 0.7152 * Linear(background.green) +
                           0.0722 * Linear(background.blue);
  // At this luminance, black and white have the same WCAG contrast ratio.
  constexpr double kEven = 0.1791;
  return luminance > kEven ? kBlack : kWhite;
}

}  // namespace rapt
