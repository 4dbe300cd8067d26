// Tensors of a call: inputs are views of the caller's memory, outputs own their bytes. Row-major,
// little endian, contiguous.
#ifndef RAPT_CLIENT_RAPT_TENSOR_H_
#define RAPT_CLIENT_RAPT_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "rapt/data_type.h"

namespace rapt::client {

using rapt::DType;
using rapt::NameOf;
using rapt::SizeOf;

// The DType of T. C++20 has no 16-bit float types; tensors of these are made from bytes.
template <typename T>
constexpr DType DTypeOf() {
  if constexpr (std::is_same_v<T, float>) {
    return DType::kFloat32;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::kFloat64;
  } else if constexpr (std::is_same_v<T, bool>) {
    return DType::kBool;
  } else if constexpr (std::is_same_v<T, int8_t>) {
    return DType::kInt8;
  } else if constexpr (std::is_same_v<T, uint8_t>) {
    return DType::kUint8;
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return DType::kInt32;
  } else {
    static_assert(std::is_same_v<T, int64_t>, "no DType holds this type");
    return DType::kInt64;
  }
}

using Shape = absl::InlinedVector<int64_t, 4>;

// "[2, 8, 128, 64]"
std::string ToString(const Shape& shape);

// A tensor in memory that must outlive the view. `data` has product(shape) * SizeOf(dtype) bytes of
// any alignment.
struct TensorView {
  DType dtype = DType::kFloat32;
  Shape shape = {};
  absl::Span<const std::byte> data = {};
};

// A view of values: View<float>({1, 8, 128, 64}, q).
template <typename T>
TensorView View(Shape shape, absl::Span<const T> values) {
  return {DTypeOf<T>(),
          std::move(shape),
          {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)}};
}

// An immutable tensor that owns its bytes. Copies share them. Thread-compatible.
class Tensor {
 public:
  Tensor() = default;
  // REQUIRES: the size of `bytes` matches shape and type. Aborts otherwise.
  Tensor(DType dtype, Shape shape, std::string bytes);
  // Refers to bytes that `owner` keeps alive, aligned to 8. REQUIRES: as above.
  Tensor(DType dtype, Shape shape, std::shared_ptr<const void> owner,
         absl::Span<const std::byte> bytes);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  // Aligned to 8.
  absl::Span<const std::byte> bytes() const { return bytes_; }

  // Returns the elements. REQUIRES: DTypeOf<T>() is the tensor's type. Aborts otherwise.
  template <typename T>
  absl::Span<const T> values() const {
    CheckDType(DTypeOf<T>());
    // Not in braces: they would make a list of two bools of pointer and size.
    return absl::Span<const T>(reinterpret_cast<const T*>(bytes_.data()),
                               bytes_.size() / sizeof(T));
  }

  TensorView view() const { return {dtype_, shape_, bytes_}; }

 private:
  Tensor(DType dtype, Shape shape, const std::shared_ptr<const std::string>& bytes);
  void CheckDType(DType wanted) const;

  DType dtype_ = DType::kFloat32;
  Shape shape_;
  // Shared by copies.
  std::shared_ptr<const void> owner_;
  absl::Span<const std::byte> bytes_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_TENSOR_H_
