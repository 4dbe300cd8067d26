#ifndef RAPT_SERVER_PROTOCOLS_RAPT_JSON_TENSORS_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_JSON_TENSORS_H_

#include <google/protobuf/descriptor.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace rapt::native {

// The text takes at most this many times the bytes of the JSON: "1," becomes 8 bytes in base64.
inline constexpr int64_t kTextBytesPerJsonByte = 6;

// Rewrites JSON of a message of type `type`: a Tensor may be written as an input of the Open
// Inference Protocol, with a name that means nothing, `datatype` for `dtype` and numbers, in arrays
// of any nesting, for the base64 of `data`. The result is Protocol Buffers' JSON if the rest is.
// InvalidArgument names the tensor, the value received and the values allowed.
absl::StatusOr<std::string> WithBinaryTensors(const google::protobuf::Descriptor& type,
                                              absl::string_view json);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_JSON_TENSORS_H_
