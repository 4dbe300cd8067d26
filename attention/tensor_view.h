// Non-owning views of tensors: where the bytes are, what they mean, how to step through them.
#ifndef RAPT_ATTENTION_TENSOR_VIEW_H_
#define RAPT_ATTENTION_TENSOR_VIEW_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"
#include "base/sliced_bytes.h"

namespace rapt {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kBool, kInt64 };

// Bytes of one element.
constexpr int64_t SizeOf(DType type) {
  switch (type) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

// The name that Triton, KServe and our own interfaces give the type: FP32, BF16, ...
constexpr absl::string_view NameOf(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "FP32";
    case DType::kFloat16:
      return "FP16";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat64:
      return "FP64";
    case DType::kBool:
      return "BOOL";
    case DType::kInt64:
      return "INT64";
  }
  return "?";
}

constexpr bool IsFloat(DType type) { return type != DType::kBool && type != DType::kInt64; }

// A tensor of rank 4, [batch, head, position, element]. `dims` and `strides` count elements, not
// bytes; a stride of 0 broadcasts. Lower ranks lead with axes of 1. `data` is null for a tensor
// that is absent; it need not be aligned (payloads are read where they arrived).
//
// A payload that arrived in pieces has no `data` but `slices`, which outlive the view: the
// row-major bytes of the tensor, and the strides step through them.
template <typename Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> dims = {0, 0, 0, 0};
  std::array<int64_t, 4> strides = {0, 0, 0, 0};

  const SlicedBytes* slices = nullptr;

  bool present() const { return data != nullptr || slices != nullptr; }

  // Where row (b, h, s) begins, in bytes.
  int64_t RowOffset(int64_t b, int64_t h, int64_t s) const {
    return (b * strides[0] + h * strides[1] + s * strides[2]) * SizeOf(dtype);
  }

  // The first byte of row (b, h, s), of a view without slices.
  Byte* Row(int64_t b, int64_t h, int64_t s) const { return data + RowOffset(b, h, s); }

  // Copies row (b, h, s), wherever it lies.
  void CopyRow(int64_t b, int64_t h, int64_t s, std::byte* target) const {
    const int64_t bytes = dims[3] * SizeOf(dtype);
    if (slices != nullptr) return slices->Copy(RowOffset(b, h, s), bytes, target);
    std::memcpy(target, Row(b, h, s), static_cast<size_t>(bytes));
  }
};

using TensorView = BasicTensorView<const std::byte>;
using MutableTensorView = BasicTensorView<std::byte>;

// Row-major strides of `dims`.
constexpr std::array<int64_t, 4> RowMajorStrides(const std::array<int64_t, 4>& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

}  // namespace rapt

#endif  // RAPT_ATTENTION_TENSOR_VIEW_H_
