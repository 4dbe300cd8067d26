// The subset of absl::StatusOr that attention uses; see status.h.
#ifndef RAPT_ATTENTION_C_STANDALONE_ABSL_STATUS_STATUSOR_H_
#define RAPT_ATTENTION_C_STANDALONE_ABSL_STATUS_STATUSOR_H_

#include <optional>
#include <utility>

#include "absl/status/status.h"

namespace absl {

template <typename T>
class [[nodiscard]] StatusOr {
 public:
  // NOLINTBEGIN(google-explicit-constructor): like Abseil's.
  StatusOr(Status error) : status_(std::move(error)) {}
  StatusOr(T value) : value_(std::move(value)) {}
  // NOLINTEND(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  const T& operator*() const& { return *value_; }
  T& operator*() & { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  const T* operator->() const { return &*value_; }
  T* operator->() { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace absl

#endif  // RAPT_ATTENTION_C_STANDALONE_ABSL_STATUS_STATUSOR_H_
