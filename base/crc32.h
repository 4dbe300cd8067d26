// The CRC-32 of zlib, gzip and PNG. What includes this links with zlib; rapt_base does not, because
// librapt_attention.so contains it.
#ifndef RAPT_BASE_CRC32_H_
#define RAPT_BASE_CRC32_H_

#include <zlib.h>

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace rapt {

// Returns the checksum of these bytes after those that `before` is the checksum of.
inline uint32_t Crc32(absl::Span<const std::byte> bytes, uint32_t before = 0) {
  if (bytes.empty()) return before;  // zlib begins again if it gets no address
  return static_cast<uint32_t>(
      crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}
inline uint32_t Crc32(absl::string_view bytes, uint32_t before = 0) {
  return Crc32(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()),
               before);
}

}  // namespace rapt

#endif  // RAPT_BASE_CRC32_H_
