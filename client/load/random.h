// Counter-based random numbers: a seed and a position determine each number.
#ifndef RAPT_CLIENT_LOAD_RANDOM_H_
#define RAPT_CLIENT_LOAD_RANDOM_H_

#include <cstdint>

namespace rapt::load {

// The n-th number of SplitMix64's sequence.
inline uint64_t Draw(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// In [0, 1).
inline double UnitDraw(uint64_t seed, uint64_t n) {
  return static_cast<double>(Draw(seed, n) >> 11) * 0x1p-53;
}

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RANDOM_H_
