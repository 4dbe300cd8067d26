#include "client/cli/library_types.h"

#include "base/check.h"

namespace rapt {

DType ToLibrary(client::DType dtype) {
  switch (dtype) {
    case client::DType::kFloat32:
      return DType::kFloat32;
    case client::DType::kFloat16:
      return DType::kFloat16;
    case client::DType::kBFloat16:
      return DType::kBFloat16;
    case client::DType::kFloat64:
      return DType::kFloat64;
    case client::DType::kBool:
      return DType::kBool;
    case client::DType::kInt64:
      return DType::kInt64;
    default:
      RAPT_CHECK(false, "rapt_attention has no such type");
  }
}

client::DType FromLibrary(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return client::DType::kFloat32;
    case DType::kFloat16:
      return client::DType::kFloat16;
    case DType::kBFloat16:
      return client::DType::kBFloat16;
    case DType::kFloat64:
      return client::DType::kFloat64;
    case DType::kBool:
      return client::DType::kBool;
    case DType::kInt64:
      return client::DType::kInt64;
  }
  RAPT_CHECK(false, "unknown DType");
}

}  // namespace rapt
