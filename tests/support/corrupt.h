// Bytes that were damaged on their way.
#ifndef RAPT_TESTS_SUPPORT_CORRUPT_H_
#define RAPT_TESTS_SUPPORT_CORRUPT_H_

#include <cstddef>
#include <random>
#include <string>

namespace rapt::test {

// Corrupts some bytes, as networks and attackers do: changes, removes or duplicates them.
inline std::string Corrupt(std::string bytes, std::mt19937& random) {
  const auto below = [&random](size_t n) { return n == 0 ? 0 : random() % n; };
  for (size_t faults = 1 + below(4); faults > 0 && !bytes.empty(); --faults) {
    const size_t at = below(bytes.size());
    switch (below(4)) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
        break;
      case 2:
        bytes.erase(at, below(16));
        break;
      default:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(32)));
    }
  }
  return bytes;
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CORRUPT_H_
