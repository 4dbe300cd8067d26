// The client library's element types as rapt_attention's, which files are read in, and back.
#ifndef RAPT_CLIENT_CLI_LIBRARY_TYPES_H_
#define RAPT_CLIENT_CLI_LIBRARY_TYPES_H_

#include "attention/tensor_view.h"
#include "rapt/tensor.h"

namespace rapt {

// Of a float type, kBool or kInt64; aborts for the others.
DType ToLibrary(client::DType dtype);
client::DType FromLibrary(DType dtype);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LIBRARY_TYPES_H_
