#include "attention/philox.h"

#include <array>
#include <cmath>
#include <numbers>

#include "base/philox.h"

namespace rapt {

void DropoutKeeps(double p, uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t begin,
                  int64_t count, bool* keep) {
  const double threshold = p * 4294967296.0;
  std::array<uint32_t, 4> draws = {};
  for (int64_t n = 0; n < count; ++n) {
    const int64_t j = begin + n;
    if (n == 0 || j % 4 == 0) {
      draws = Philox4x32({static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
                          static_cast<uint32_t>(h), static_cast<uint32_t>(b)},
                         seed);
    }
    keep[n] = draws[j % 4] >= threshold;
  }
}

void DrawNormals(uint64_t seed, uint32_t head, DrawPurpose purpose, int64_t begin,
                 absl::Span<double> out) {
  std::array<uint32_t, 4> draws = {};
  for (size_t n = 0; n < out.size(); ++n) {
    const int64_t t = begin + static_cast<int64_t>(n);
    if (n == 0 || t % 4 == 0) {
      draws =
          Philox4x32({static_cast<uint32_t>(t / 4), head, static_cast<uint32_t>(purpose), 0}, seed);
    }
    const auto uniform = [&](int64_t lane) { return (draws[lane] + 0.5) / 4294967296.0; };
    const int64_t first = t % 4 / 2 * 2;
    const double radius = std::sqrt(-2 * std::log(uniform(first)));
    const double angle = 2 * std::numbers::pi * uniform(first + 1);
    out[n] = radius * (t % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }
}

}  // namespace rapt
