// Propagation of errors. The functions that use these macros return absl::Status or absl::StatusOr.
#ifndef RAPT_BASE_STATUS_MACROS_H_
#define RAPT_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"

// Returns the status that an expression has, unless it is OK:
//
//     RAPT_RETURN_IF_ERROR(CheckShape(q));
#define RAPT_RETURN_IF_ERROR(...)                                      \
  do {                                                                 \
    if (absl::Status rapt_status = (__VA_ARGS__); !rapt_status.ok()) { \
      return rapt_status;                                              \
    }                                                                  \
  } while (false)

// Declares or assigns a variable from an absl::StatusOr, or returns its error:
//
//     RAPT_ASSIGN_OR_RETURN(const TensorSpec spec, ReadTensor(q));
#define RAPT_ASSIGN_OR_RETURN(variable, ...) \
  RAPT_ASSIGN_OR_RETURN_BY(RAPT_JOINED(rapt_result_, __LINE__), variable, __VA_ARGS__)

#define RAPT_JOINED(a, b) RAPT_JOINED_AS_GIVEN(a, b)
#define RAPT_JOINED_AS_GIVEN(a, b) a##b
#define RAPT_ASSIGN_OR_RETURN_BY(result, variable, ...) \
  auto result = (__VA_ARGS__);                          \
  if (!result.ok()) return std::move(result).status();  \
  variable = *std::move(result)

#endif  // RAPT_BASE_STATUS_MACROS_H_
