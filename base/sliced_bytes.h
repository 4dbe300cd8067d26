// Bytes in slices, as a transport delivers them, to be read in place instead of being gathered.
#ifndef RAPT_BASE_SLICED_BYTES_H_
#define RAPT_BASE_SLICED_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "base/byte_slice.h"

namespace rapt {

// A part of a sequence of contiguous, non-empty slices. Non-owning.
struct SlicedBytes {
  absl::Span<const ByteSlice> slices;
  int64_t offset = 0;  // position of the part's first byte in the sequence

  // Copies bytes [begin, begin + size) of the part. REQUIRES: they lie within the slices.
  void Copy(int64_t begin, int64_t size, std::byte* target) const;
};

// Returns the consecutive slices of a transport without the empty ones. A transport's slice has
// begin() and size().
template <typename Slices>
std::vector<ByteSlice> ToByteSlices(const Slices& slices) {
  std::vector<ByteSlice> result;
  result.reserve(slices.size());
  int64_t position = 0;
  for (const auto& slice : slices) {
    const int64_t end = position + static_cast<int64_t>(slice.size());
    if (end == position) continue;
    result.push_back({reinterpret_cast<const std::byte*>(slice.begin()), position, end});
    position = end;
  }
  return result;
}

}  // namespace rapt

#endif  // RAPT_BASE_SLICED_BYTES_H_
