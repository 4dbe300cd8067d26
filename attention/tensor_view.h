// Non-owning views of tensors: location, type, shape and strides.
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

// Returns the bytes of one element.
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

// Returns the type's name in Triton, KServe and our own interfaces: FP32, BF16, ...
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
// bytes; a stride of 0 broadcasts. Lower ranks have leading axes of 1. `data` is null for an absent
// tensor; it need not be aligned, because payloads are read in place.
//
// A payload that arrived in slices has `slices` instead of `data`: the row-major bytes of the
// tensor, to which the strides refer. They outlive the view.
template <typename Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> dims = {0, 0, 0, 0};
  std::array<int64_t, 4> strides = {0, 0, 0, 0};

  const SlicedBytes* slices = nullptr;

  bool present() const { return data != nullptr || slices != nullptr; }

  // Returns the byte offset of row (b, h, s).
  int64_t RowOffset(int64_t b, int64_t h, int64_t s) const {
    return (b * strides[0] + h * strides[1] + s * strides[2]) * SizeOf(dtype);
  }

  // Returns the first byte of row (b, h, s). REQUIRES: the view has no slices.
  Byte* Row(int64_t b, int64_t h, int64_t s) const { return data + RowOffset(b, h, s); }

  // Copies row (b, h, s), which may be in slices.
  void CopyRow(int64_t b, int64_t h, int64_t s, std::byte* target) const {
    const int64_t bytes = dims[3] * SizeOf(dtype);
    if (slices != nullptr) return slices->Copy(RowOffset(b, h, s), bytes, target);
    std::memcpy(target, Row(b, h, s), static_cast<size_t>(bytes));
  }
};

using TensorView = BasicTensorView<const std::byte>;
using MutableTensorView = BasicTensorView<std::byte>;

// Returns the row-major strides of `dims`.
constexpr std::array<int64_t, 4> RowMajorStrides(const std::array<int64_t, 4>& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

}  // namespace rapt

#endif  // RAPT_ATTENTION_TENSOR_VIEW_H_
