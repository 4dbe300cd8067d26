// The types of tensors in the C interface.
#ifndef RAPT_TESTS_ATTENTION_C_C_TYPE_H_
#define RAPT_TESTS_ATTENTION_C_C_TYPE_H_

#include <gtest/gtest.h>

#include <cstdint>

#include "rapt/attention.h"
#include "rapt/data_type.h"

namespace rapt::test {

// Of rapt_dtype, written out: the library derives them from the order.
inline int32_t CTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return RAPT_FP32;
    case DType::kFloat16:
      return RAPT_FP16;
    case DType::kBFloat16:
      return RAPT_BF16;
    case DType::kFloat64:
      return RAPT_FP64;
    case DType::kBool:
      return RAPT_BOOL;
    case DType::kInt32:
      return RAPT_INT32;
    case DType::kInt64:
      return RAPT_INT64;
    case DType::kInt8:
    case DType::kUint8:
      break;
  }
  ADD_FAILURE() << "C has no " << NameOf(dtype);
  return 0;
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_ATTENTION_C_C_TYPE_H_
