#include "client/cli/library_types.h"

#include "base/check.h"

namespace rapt {

// The types before the integers have the same values in both libraries.
static_assert(static_cast<DType>(client::DType::kFloat32) == DType::kFloat32);
static_assert(static_cast<DType>(client::DType::kFloat16) == DType::kFloat16);
static_assert(static_cast<DType>(client::DType::kBFloat16) == DType::kBFloat16);
static_assert(static_cast<DType>(client::DType::kFloat64) == DType::kFloat64);
static_assert(static_cast<DType>(client::DType::kBool) == DType::kBool);
static_assert(static_cast<int>(DType::kInt64) == static_cast<int>(DType::kBool) + 1);

DType ToLibrary(client::DType dtype) {
  if (dtype == client::DType::kInt64) return DType::kInt64;
  if (dtype == client::DType::kInt32) return DType::kInt32;
  RAPT_CHECK(dtype <= client::DType::kBool, "rapt_attention has no such type");
  return static_cast<DType>(dtype);
}

client::DType FromLibrary(DType dtype) {
  if (dtype == DType::kInt64) return client::DType::kInt64;
  if (dtype == DType::kInt32) return client::DType::kInt32;
  return static_cast<client::DType>(dtype);
}

}  // namespace rapt
