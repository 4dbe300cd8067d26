// The subset of absl::Status that attention uses, only for librapt_attention.so: see
// docs/decisions/0007-a-library-without-abseils-status.md.
#ifndef RAPT_ATTENTION_C_STANDALONE_ABSL_STATUS_STATUS_H_
#define RAPT_ATTENTION_C_STANDALONE_ABSL_STATUS_STATUS_H_

#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace absl {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, absl::string_view message) : code_(code), message_(message) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  absl::string_view message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return Status(); }

inline Status InvalidArgumentError(absl::string_view message) {
  return Status(StatusCode::kInvalidArgument, message);
}
inline Status ResourceExhaustedError(absl::string_view message) {
  return Status(StatusCode::kResourceExhausted, message);
}
inline Status FailedPreconditionError(absl::string_view message) {
  return Status(StatusCode::kFailedPrecondition, message);
}
inline Status UnimplementedError(absl::string_view message) {
  return Status(StatusCode::kUnimplemented, message);
}
inline Status InternalError(absl::string_view message) {
  return Status(StatusCode::kInternal, message);
}

}  // namespace absl

#endif  // RAPT_ATTENTION_C_STANDALONE_ABSL_STATUS_STATUS_H_
