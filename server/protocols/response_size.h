#ifndef RAPT_SERVER_PROTOCOLS_RESPONSE_SIZE_H_
#define RAPT_SERVER_PROTOCOLS_RESPONSE_SIZE_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/operator.h"

namespace rapt {

// ResourceExhausted if these tensors do not fit into one message.
absl::Status CheckResponseSize(absl::Span<const TensorSpec* const> outputs);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_RESPONSE_SIZE_H_
