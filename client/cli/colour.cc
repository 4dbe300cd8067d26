#include "client/cli/colour.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>

namespace rapt {
namespace {

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
