// The features of a problem, and random problems that combine them.
#ifndef RAPT_TESTS_SUPPORT_FEATURES_H_
#define RAPT_TESTS_SUPPORT_FEATURES_H_

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "attention/problem.h"
#include "tests/support/run_attention.h"

namespace rapt::test {

inline bool OneIn(Rng& rng, int64_t n) { return UniformInt(rng, 1, n) == 1; }

template <typename T>
T Pick(Rng& rng, std::initializer_list<T> choices) {
  return choices.begin()[UniformInt(rng, 0, static_cast<int64_t>(choices.size()) - 1)];
}

struct Feature {
  std::string_view name;
  // The field of which this is one of several values; empty if a problem may have it or not.
  std::string_view field;
  bool (*has)(const Problem&);
  // Adds it, and what it needs, to a problem that may have the features above.
  void (*add)(Problem&, Rng&);
};

// What decides the shape comes before what is shaped by it.
absl::Span<const Feature> Features();

// A pair of features that a problem may not have, and words of the error. `first` is above `second`
// in Features().
struct Refusal {
  std::string_view first, second, error;
};
absl::Span<const Refusal> Refusals();

using FeaturePair = std::pair<const Feature*, const Feature*>;  // in the order of Features()

// The pairs of features that are not values of one field, and those of them that a problem may
// have.
std::vector<FeaturePair> AllPairs();
const std::vector<FeaturePair>& AllowedPairs();

// Null: the pair is allowed.
const Refusal* RefusalOf(const FeaturePair& pair);

bool Has(const Problem& problem, const FeaturePair& pair);

Problem RandomShapes(Rng& rng);

// A problem with the pair, and with a few of the other features that it may have.
Problem ProblemWith(const FeaturePair& pair, Rng& rng);

std::string FeaturesOf(const Problem& problem);

Arrangement RandomArrangement(Rng& rng);
Inputs InputsFor(const Problem& problem, const Arrangement& arrangement, Rng& rng);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_FEATURES_H_
