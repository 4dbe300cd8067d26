// A value of an enumeration in the payload of a status, which says why a call failed where the code
// stands for several reasons.
#ifndef RAPT_BASE_STATUS_VALUE_H_
#define RAPT_BASE_STATUS_VALUE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace rapt {

// Returns a status of this code that carries `value` in the payload of that name. REQUIRES: code is
// not OK; Enum has one byte.
template <typename Enum>
absl::Status StatusWith(absl::string_view payload, Enum value, absl::StatusCode code,
                        absl::string_view message) {
  static_assert(sizeof(Enum) == 1);
  absl::Status status(code, message);
  status.SetPayload(payload, absl::Cord(std::string(1, static_cast<char>(value))));
  return status;
}

// Returns the value that the status carries in that payload, otherwise Enum().
template <typename Enum>
Enum ValueIn(const absl::Status& status, absl::string_view payload) {
  const auto value = status.GetPayload(payload);
  return value ? static_cast<Enum>(*value->char_begin()) : Enum();
}

}  // namespace rapt

#endif  // RAPT_BASE_STATUS_VALUE_H_
