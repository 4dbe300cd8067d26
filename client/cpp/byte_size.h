// The size of a tensor's data.
#ifndef RAPT_CLIENT_CPP_BYTE_SIZE_H_
#define RAPT_CLIENT_CPP_BYTE_SIZE_H_

#include <cstdint>
#include <optional>

#include "rapt/tensor.h"

namespace rapt::client {

// Returns nullopt if an axis is negative or the product overflows.
std::optional<int64_t> ByteSize(DType dtype, const Shape& shape);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_BYTE_SIZE_H_
