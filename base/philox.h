// Philox4x32-10, a counter-based generator of random numbers: the numbers of any counter can be
// drawn in any order. Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
#ifndef RAPT_BASE_PHILOX_H_
#define RAPT_BASE_PHILOX_H_

#include <array>
#include <cstdint>

namespace rapt {

inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, uint64_t seed) {
  std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
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

}  // namespace rapt

#endif  // RAPT_BASE_PHILOX_H_
