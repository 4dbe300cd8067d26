// Limits of the names and ids of caches.
#ifndef RAPT_SERVER_CACHE_LIMITS_H_
#define RAPT_SERVER_CACHE_LIMITS_H_

#include <cstddef>

namespace rapt::cache {

inline constexpr size_t kMaxNameBytes = 256;
// An id is "instance:start:random", with 4 and 16 random bytes in hexadecimal.
inline constexpr size_t kMaxIdBytes = 128;
inline constexpr size_t kMaxInstanceBytes = kMaxIdBytes - 2 * (4 + 16) - 2;

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_LIMITS_H_
