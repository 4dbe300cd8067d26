// Random input for benchmarks.
#ifndef RAPT_BENCH_RANDOM_TENSOR_H_
#define RAPT_BENCH_RANDOM_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "attention/tensor_view.h"
#include "base/aligned_buffer.h"

namespace rapt::bench {

// Fills with normally distributed elements; two thirds of a mask's elements attend.
void FillWithRandom(DType dtype, absl::Span<std::byte> bytes);

// An owned row-major tensor of random numbers.
class RandomTensor {
 public:
  RandomTensor(DType dtype, const std::array<int64_t, 4>& dims);

  TensorView View() const { return {bytes_.data(), dtype_, dims_, RowMajorStrides(dims_)}; }
  MutableTensorView MutableView() { return {bytes_.data(), dtype_, dims_, RowMajorStrides(dims_)}; }

 private:
  DType dtype_;
  std::array<int64_t, 4> dims_;
  AlignedBuffer bytes_;
};

}  // namespace rapt::bench

#endif  // RAPT_BENCH_RANDOM_TENSOR_H_
