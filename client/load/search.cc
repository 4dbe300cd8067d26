#include "client/load/search.h"

#include <utility>

#include "base/status_macros.h"

namespace rapt::load {

absl::StatusOr<std::vector<Trial>> SearchRate(
    double capacity, double precision,
    absl::FunctionRef<absl::StatusOr<Trial>(double rate)> try_rate) {
  std::vector<Trial> trials;
  double passes = 0, fails = capacity * 1.05;
  double rate = capacity * 0.7;  // queues grow quickly beyond this
  while (fails - passes > precision * fails && fails > capacity * 0.01) {
    RAPT_ASSIGN_OR_RETURN(const Trial trial, try_rate(rate));
    trials.push_back(trial);
    (trial.passed ? passes : fails) = rate;
    rate = (passes + fails) / 2;
  }
  return trials;
}

const Trial* BestOf(const std::vector<Trial>& trials) {
  const Trial* best = nullptr;
  for (const Trial& trial : trials) {
    if (trial.passed && (best == nullptr || trial.offered > best->offered)) best = &trial;
  }
  return best;
}

}  // namespace rapt::load
