#ifndef RAPT_BASE_BYTE_SLICE_H_
#define RAPT_BASE_BYTE_SLICE_H_

#include <cstddef>
#include <cstdint>

namespace rapt {

// The bytes at [begin, end) of a sequence. A plain struct without functions, so that kernels can
// share it.
struct ByteSlice {
  const std::byte* data;
  int64_t begin;
  int64_t end;
};

}  // namespace rapt

#endif  // RAPT_BASE_BYTE_SLICE_H_
