// The highest rate that still meets an objective.
#ifndef RAPT_CLIENT_LOAD_SEARCH_H_
#define RAPT_CLIENT_LOAD_SEARCH_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/load/result.h"

namespace rapt::load {

// Halves the range between a rate that passes and one that does not until they are within
// `precision` of each other. `capacity` is what the server does without a pause between calls: no
// rate much above it can pass. `try_rate` offers a rate and says whether it passed. Returns the
// trials in their order; the highest that passed is the answer, none: not even a hundredth of the
// capacity does.
absl::StatusOr<std::vector<Trial>> SearchRate(
    double capacity, double precision,
    absl::FunctionRef<absl::StatusOr<Trial>(double rate)> try_rate);

// The one with the highest offered rate among those that passed; null: none.
const Trial* BestOf(const std::vector<Trial>& trials);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_SEARCH_H_
