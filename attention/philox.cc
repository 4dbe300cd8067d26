#include "attention/philox.h"

#include <cmath>
#include <numbers>

namespace rapt {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

void DropoutKeeps(double p, uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t begin,
                  int64_t count, bool* keep) {
  const double threshold = p * 4294967296.0;
  std::array<uint32_t, 4> draws = {};
  for (int64_t n = 0; n < count; ++n) {
    const int64_t j = begin + n;
    if (n == 0 || j % 4 == 0) {
      draws = Philox4x32({static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
                          static_cast<uint32_t>(h), static_cast<uint32_t>(b)},
                         {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
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
      draws = Philox4x32({static_cast<uint32_t>(t / 4), head, static_cast<uint32_t>(purpose), 0},
                         {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    }
    const auto uniform = [&](int64_t lane) { return (draws[lane] + 0.5) / 4294967296.0; };
    const int64_t first = t % 4 / 2 * 2;
    const double radius = std::sqrt(-2 * std::log(uniform(first)));
    const double angle = 2 * std::numbers::pi * uniform(first + 1);
    out[n] = radius * (t % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }
}

}  // namespace rapt
