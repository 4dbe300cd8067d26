#ifndef RAPT_TESTS_FUZZ_OPERATOR_CODECS_H_
#define RAPT_TESTS_FUZZ_OPERATOR_CODECS_H_

#include "absl/algorithm/container.h"
#include "absl/strings/string_view.h"
#include "server/protocols/rapt/operator_codec.h"

namespace rapt {

// REQUIRES: there is an operator with this method.
inline const native::OperatorCodec& CodecOf(absl::string_view method) {
  return *absl::c_find_if(native::OperatorCodecs(), [&](const native::OperatorCodec& codec) {
    return codec.schema().method == method;
  });
}

}  // namespace rapt

#endif  // RAPT_TESTS_FUZZ_OPERATOR_CODECS_H_
