#include "rapt/tensor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "client/cpp/byte_size.h"

namespace rapt::client {

std::string ToString(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::optional<int64_t> ByteSize(DType dtype, const Shape& shape) {
  if (std::any_of(shape.begin(), shape.end(), [](int64_t axis) { return axis < 0; })) {
    return std::nullopt;
  }
  const std::optional<int64_t> elements = CheckedProduct(shape);
  return elements ? CheckedMul(*elements, SizeOf(dtype)) : std::nullopt;
}

Tensor::Tensor(DType dtype, Shape shape, std::shared_ptr<const void> owner,
               absl::Span<const std::byte> bytes)
    : dtype_(dtype), shape_(std::move(shape)), owner_(std::move(owner)), bytes_(bytes) {
  RAPT_CHECK(ByteSize(dtype_, shape_) == static_cast<int64_t>(bytes_.size()),
             "the number of bytes must match the shape and type of the tensor");
}

Tensor::Tensor(DType dtype, Shape shape, const std::shared_ptr<const std::string>& bytes)
    : Tensor(dtype, std::move(shape), bytes,
             {reinterpret_cast<const std::byte*>(bytes->data()), bytes->size()}) {}

Tensor::Tensor(DType dtype, Shape shape, std::string bytes)
    : Tensor(dtype, std::move(shape), std::make_shared<const std::string>(std::move(bytes))) {}

void Tensor::CheckDType(DType wanted) const {
  RAPT_CHECK(wanted == dtype_, "T of values<T>() must match the dtype() of the tensor");
}

}  // namespace rapt::client
