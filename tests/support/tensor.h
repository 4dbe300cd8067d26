// Tensors for tests: typed storage with any strides, accessed as double, and the comparison that
// every numeric test uses.
#ifndef RAPT_TESTS_SUPPORT_TENSOR_H_
#define RAPT_TESTS_SUPPORT_TENSOR_H_

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attention/tensor_view.h"

namespace rapt::test {

using Dims = std::array<int64_t, 4>;
using Rng = std::mt19937_64;

// Uniform in [low, high). Deterministic on every platform.
double Uniform(Rng& rng, double low, double high);
// Uniform in [low, high], both included.
int64_t UniformInt(Rng& rng, int64_t low, int64_t high);

// The bits of `value` rounded to nearest even, and back. Independent of the library's
// conversions, which are under test.
uint16_t EncodeHalf(double value);
double DecodeHalf(uint16_t bits);
uint16_t EncodeBFloat16(double value);
double DecodeBFloat16(uint16_t bits);

// Returns `value` rounded to `dtype`.
double RoundTo(DType dtype, double value);

// The largest finite value of a float type.
double MaxOf(DType dtype);

// How the elements of [B, H, S, E] lie in memory. Gaps hold bytes that read as NaN.
enum class Storage {
  kRowMajor,
  kBshd,            // [B, S, H, E]
  kPositionFirst,   // [S, B, H, E]
  kPaddedRows,      // row-major with three more elements in every row
  kMisaligned,      // row-major from an odd address
  kBroadcastBatch,  // all batch rows share memory
  kBroadcastHeads,  // all heads share memory
  kTransposed,      // [B, H, E, S]; only for masks, as other tensors have a last stride of 1
  kElementsApart,   // row-major, every second element; only for masks
};

// Owns its bytes. The allocation ends with the last element, so that AddressSanitizer sees a read
// beyond it, unless there are `guard_bytes` on both sides.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Dims dims, Storage storage = Storage::kRowMajor, size_t guard_bytes = 0);

  DType dtype() const { return dtype_; }
  const Dims& dims() const { return dims_; }
  int64_t size() const { return dims_[0] * dims_[1] * dims_[2] * dims_[3]; }

  // Axes of size 1 broadcast: any coordinate is valid.
  double At(int64_t b, int64_t h, int64_t s, int64_t e) const;
  void Set(int64_t b, int64_t h, int64_t s, int64_t e, double value);

  // In the order of the coordinates, independent of the storage.
  Tensor& Fill(double value);
  Tensor& FillUniform(Rng& rng, double low, double high);
  Tensor& FillBool(Rng& rng, double share_of_true);

  std::vector<double> ToVector() const;

  TensorView View() const;
  MutableTensorView MutableView();

  // Returns whether all bytes outside the elements are unchanged since construction.
  bool GapsIntact() const;

 private:
  int64_t ByteOffset(int64_t b, int64_t h, int64_t s, int64_t e) const;

  DType dtype_ = DType::kFloat32;
  Dims dims_ = {0, 0, 0, 0};
  Dims strides_ = {0, 0, 0, 0};
  size_t first_byte_ = 0;
  std::vector<std::byte> bytes_;
};

// Concatenates along axis 2, if `first` is set. Returns a row-major tensor.
Tensor JoinRows(const std::optional<Tensor>& first, const Tensor& second);

// Returns positions [begin, begin + count) of the axis, or the whole tensor if the axis has size 1
// and broadcasts. Row-major.
Tensor SliceAxis(const Tensor& tensor, int axis, int64_t begin, int64_t count);

// Writes `part` to positions [begin, ...) of the axis.
void PasteAxis(Tensor& whole, int axis, int64_t begin, const Tensor& part);

// |got - want| <= relative * (1 + |want|) against float64.
double ToleranceOf(DType dtype);

struct Tolerance {
  double relative = 0;
  // Added for all elements of row (b, h, s), in row-major order; empty: none.
  std::vector<double> row_slack;
};

// Compares element by element with `want`, row-major and not rounded to got's type. NaN
// equals NaN and an infinity equals itself; a finite `want` beyond the type's range equals an
// infinity. The message has the name, the shape and the first mismatches: index, got, want.
::testing::AssertionResult AllClose(const std::string& name, const Tensor& got,
                                    const std::vector<double>& want, const Tolerance& tolerance);

// Compares bits, including those of NaN.
::testing::AssertionResult SameBits(const std::string& name, const Tensor& a, const Tensor& b);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_TENSOR_H_
