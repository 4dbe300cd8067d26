// Checks of the rotary embedding's shapes and positions, for Validate() in problem.h.
#ifndef RAPT_ATTENTION_ROTARY_CHECKS_H_
#define RAPT_ATTENTION_ROTARY_CHECKS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/field_names.h"
#include "attention/problem.h"

namespace rapt {

// Each returns InvalidArgument with the field, its value and the allowed values; OK if the problem
// has no rotary embedding.

// REQUIRES: the problem's axes and attributes are valid.
absl::Status CheckRotary(const Problem& problem, const FieldNames& names);

// Checks the positions that queries have without ids. REQUIRES: the lengths are valid.
absl::Status CheckQueryPositions(const Problem& problem, absl::Span<const int64_t> key_lengths,
                                 const FieldNames& names);

// Checks the values of position_ids or key_position_ids, if the problem has them.
absl::Status CheckPositionIds(Role role, const Problem& problem, const Arguments& arguments,
                              const FieldNames& names);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_CHECKS_H_
