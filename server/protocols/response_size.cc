#include "server/protocols/response_size.h"

#include <cstdint>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/checked_math.h"
#include "base/status_macros.h"
#include "server/rejection.h"

namespace rapt {
namespace {

// Protocol Buffers messages are limited to 2 GiB; the difference is for names and shapes.
constexpr int64_t kMaxResponseBytes = std::numeric_limits<int32_t>::max() - 64 * 1024;

}  // namespace

absl::InlinedVector<const TensorSpec*, 4> OutputsOf(const TensorOperator& op, SlotSet slots) {
  absl::InlinedVector<const TensorSpec*, 4> outputs;
  for (const Slot slot : slots) outputs.push_back(&*op.outputs()[slot]);
  return outputs;
}

absl::StatusOr<std::optional<int64_t>> TotalBytes(absl::Span<const TensorSpec* const> outputs) {
  std::optional<int64_t> total = 0;
  for (const TensorSpec* output : outputs) {
    RAPT_ASSIGN_OR_RETURN(const int64_t bytes, ByteSize("an output", *output));
    total = total ? CheckedAdd(*total, bytes) : std::nullopt;
  }
  return total;
}

absl::Status CheckResponseSize(absl::Span<const TensorSpec* const> outputs) {
  RAPT_ASSIGN_OR_RETURN(const std::optional<int64_t> total, TotalBytes(outputs));
  if (total && *total <= kMaxResponseBytes) return absl::OkStatus();
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the outputs need ", total ? absl::StrCat(*total) : "more than 2^63",
                             " bytes; a response holds at most ", kMaxResponseBytes));
}

}  // namespace rapt
