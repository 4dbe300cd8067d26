#ifndef RAPT_SERVER_PROTOCOLS_RESPONSE_SIZE_H_
#define RAPT_SERVER_PROTOCOLS_RESPONSE_SIZE_H_

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/operator.h"
#include "attention/tensor_operator.h"

namespace rapt {

// Returns those outputs of an operator. REQUIRES: it has them.
absl::InlinedVector<const TensorSpec*, 4> OutputsOf(const TensorOperator& op, SlotSet slots);

// Returns the bytes of these tensors together; nullopt if they exceed int64_t. InvalidArgument if
// those of one do.
absl::StatusOr<std::optional<int64_t>> TotalBytes(absl::Span<const TensorSpec* const> outputs);

// ResourceExhausted if these tensors do not fit into one message.
absl::Status CheckResponseSize(absl::Span<const TensorSpec* const> outputs);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_RESPONSE_SIZE_H_
