#include "base/sliced_bytes.h"

#include <algorithm>
#include <cstring>

namespace rapt {

void SlicedBytes::Copy(int64_t begin, int64_t size, std::byte* target) const {
  if (size == 0) return;
  int64_t position = offset + begin;
  const int64_t end = position + size;
  auto slice = std::partition_point(slices.begin(), slices.end(),
                                    [&](const ByteSlice& s) { return s.end <= position; });
  for (; position < end; ++slice) {
    const int64_t count = std::min(end, slice->end) - position;
    std::memcpy(target, slice->data + (position - slice->begin), count);
    target += count;
    position += count;
  }
}

}  // namespace rapt
