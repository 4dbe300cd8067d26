// Converts element types of the client library to those of rapt_attention, and back.
#ifndef RAPT_CLIENT_CLI_LIBRARY_TYPES_H_
#define RAPT_CLIENT_CLI_LIBRARY_TYPES_H_

#include "attention/tensor_view.h"
#include "rapt/tensor.h"

namespace rapt {

// REQUIRES: a float type, kBool, kInt64 or kInt32. Aborts otherwise.
DType ToLibrary(client::DType dtype);
client::DType FromLibrary(DType dtype);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LIBRARY_TYPES_H_
