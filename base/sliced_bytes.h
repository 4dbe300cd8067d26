// Bytes in slices, as a transport delivers them, read in place instead of being gathered first.
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

// Returns where consecutive pieces lie, without the empty ones. A piece has begin() and size(), as
// a transport's slices do.
template <typename Pieces>
std::vector<ByteSlice> PlacesOf(const Pieces& pieces) {
  std::vector<ByteSlice> places;
  places.reserve(pieces.size());
  int64_t position = 0;
  for (const auto& piece : pieces) {
    const int64_t end = position + static_cast<int64_t>(piece.size());
    if (end == position) continue;
    places.push_back({reinterpret_cast<const std::byte*>(piece.begin()), position, end});
    position = end;
  }
  return places;
}

}  // namespace rapt

#endif  // RAPT_BASE_SLICED_BYTES_H_
