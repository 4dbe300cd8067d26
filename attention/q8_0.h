// Rows of numbers in 8 bits: the format q8_0 of llama.cpp (block_q8_0 in ggml/src/ggml-common.h). A
// block of 32 numbers is an FP16 scale and 32 INT8; a number is their product. The last block of a
// row has as many as are left.
#ifndef RAPT_ATTENTION_Q8_0_H_
#define RAPT_ATTENTION_Q8_0_H_

#include <cstddef>
#include <cstdint>

#include "attention/tensor_view.h"

namespace rapt::q8_0 {

inline constexpr int64_t kBlock = 32;
inline constexpr int64_t kScaleBytes = 2;
inline constexpr int64_t kBlockBytes = kScaleBytes + kBlock;

// Returns the bytes of a row of `size` numbers: 34/64 of FP16 if `size` is a multiple of 32.
// REQUIRES: size >= 0, and 2 * size fits int64.
constexpr int64_t RowBytes(int64_t size) {
  return size + (size + kBlock - 1) / kBlock * kScaleBytes;
}

// Stores a row of `size` numbers, FP32, FP16 or BF16. The result depends on the numbers alone.
//
// Unlike that of llama.cpp, the scale is rounded up, so that no number is cut: it is the least FP16
// that is at least max |x| / 127, and each number is off by at most half of it, apart from the
// rounding of one division. A block with NaN, an infinity or a number beyond 127 * 65504 is all
// NaN.
void StoreRow(const std::byte* numbers, DType dtype, int64_t size, std::byte* row);

// Returns number n of a row, exactly.
float LoadNumber(const std::byte* row, int64_t n);

}  // namespace rapt::q8_0

#endif  // RAPT_ATTENTION_Q8_0_H_
