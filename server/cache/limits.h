// Limits of the names, ids and sizes of caches.
#ifndef RAPT_SERVER_CACHE_LIMITS_H_
#define RAPT_SERVER_CACHE_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace rapt::cache {

inline constexpr size_t kMaxNameBytes = 256;
// An id is "instance:start:random", with 4 and 16 random bytes in hexadecimal.
inline constexpr size_t kMaxIdBytes = 128;
inline constexpr size_t kMaxInstanceBytes = kMaxIdBytes - 2 * (4 + 16) - 2;

inline constexpr int64_t kMaxLayers = 1024;
// Heads, and numbers of a head. The bytes of a page then have 64 bits.
inline constexpr int64_t kMaxHeads = int64_t{1} << 20;
inline constexpr int64_t kMaxHeadSize = int64_t{1} << 20;

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_LIMITS_H_
