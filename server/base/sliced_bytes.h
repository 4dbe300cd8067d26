// Bytes in pieces, as a transport delivers them: read where they are, rather than gathered first.
#ifndef RAPT_SERVER_BASE_SLICED_BYTES_H_
#define RAPT_SERVER_BASE_SLICED_BYTES_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "server/base/byte_slice.h"

namespace rapt {

// A part of a sequence of slices that follow each other without a gap or an empty one. Non-owning.
struct SlicedBytes {
  absl::Span<const ByteSlice> slices;
  int64_t offset = 0;  // of the part's first byte in the sequence

  // Copies bytes [begin, begin + size) of the part, which lie within the slices.
  void Copy(int64_t begin, int64_t size, std::byte* target) const;
};

}  // namespace rapt

#endif  // RAPT_SERVER_BASE_SLICED_BYTES_H_
