// Colours, and the colour scale of heat maps.
#ifndef RAPT_CLIENT_CLI_COLOUR_H_
#define RAPT_CLIENT_CLI_COLOUR_H_

#include <cstdint>

namespace rapt {

// sRGB.
struct Colour {
  uint8_t red = 0;
  uint8_t green = 0;
  uint8_t blue = 0;

  bool operator==(const Colour&) const = default;
};

inline constexpr Colour kBlack = {0, 0, 0};
inline constexpr Colour kWhite = {255, 255, 255};

// The Viridis scale. Its lightness grows evenly, so equal steps look equal, also in grey and with
// colour blindness. `share` is clamped to [0, 1].
Colour Viridis(double share);

// Black or white, whichever is easier to read on `background`.
Colour ReadableOn(Colour background);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_COLOUR_H_
