// Random combinations of the features of a problem, compared with the oracle on every backend and
// instruction set. Every pair of features occurs in one of them, or is refused with an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "tests/support/features.h"
#include "tests/support/padding.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

std::string TextOf(const FeaturePair& pair) {
  return std::string(pair.first->name) + " and " + std::string(pair.second->name);
}

constexpr uint64_t kProblems = 400;

// Each problem has a pair that the problems before it lack, until there is none.
const std::vector<Problem>& Problems() {
  static const std::vector<Problem> problems = [] {
    std::vector<Problem> drawn;
    std::vector<FeaturePair> missing = AllowedPairs();
    for (uint64_t seed = 0; seed < kProblems; ++seed) {
      Rng rng(seed);
      const std::vector<FeaturePair>& from = missing.empty() ? AllowedPairs() : missing;
      const FeaturePair pair = from[UniformInt(rng, 0, static_cast<int64_t>(from.size()) - 1)];
      const Problem& problem = drawn.emplace_back(ProblemWith(pair, rng));
      std::erase_if(missing, [&](const FeaturePair& other) { return Has(problem, other); });
    }
    return drawn;
  }();
  return problems;
}

TEST(CombinationsTest, EveryPairOccursOrIsRefused) {
  for (const FeaturePair& pair : AllPairs()) {
    const bool occurs = std::any_of(Problems().begin(), Problems().end(),
                                    [&](const Problem& problem) { return Has(problem, pair); });
    EXPECT_NE(occurs, RefusalOf(pair) != nullptr) << TextOf(pair);
  }
}

TEST(CombinationsTest, TheOtherPairsAreRefused) {
  size_t refused = 0;
  for (const FeaturePair& pair : AllPairs()) {
    const Refusal* const refusal = RefusalOf(pair);
    if (refusal == nullptr) continue;
    ++refused;
    SCOPED_TRACE(TextOf(pair));
    Rng rng(0);
    Problem problem = RandomShapes(rng);
    pair.first->add(problem, rng);
    pair.second->add(problem, rng);
    for (const Target& target : Targets()) {
      const absl::Status status = MakePlan(problem, target.Options()).status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(refusal->error)));
    }
  }
  EXPECT_EQ(refused, Refusals().size()) << "a refusal names no pair";
}

TEST(CombinationsTest, EachFeatureIsAcceptedAlone) {
  for (const Feature& feature : Features()) {
    Rng rng(0);
    Problem problem = RandomShapes(rng);
    feature.add(problem, rng);
    EXPECT_TRUE(feature.has(problem)) << feature.name;
    const absl::Status status = Validate(problem);
    EXPECT_TRUE(status.ok()) << feature.name << ": " << status;
  }
}

constexpr uint64_t kProblemsInARange = 20;

class RandomCombinationsTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(RandomCombinationsTest, MatchTheOracle) {
  for (uint64_t n = GetParam(); n < GetParam() + kProblemsInARange; ++n) {
    const Problem& problem = Problems()[n];
    SCOPED_TRACE("problem " + std::to_string(n) + ": " + FeaturesOf(problem));
    Rng rng(kProblems + n);
    const Arrangement arrangement = RandomArrangement(rng);
    const Inputs inputs = InputsFor(problem, arrangement, rng);
    ExpectConforms(problem, inputs, Pick(rng, {1, 2, 5}), arrangement.output);
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, RandomCombinationsTest,
                         ::testing::Range<uint64_t>(0, kProblems, kProblemsInARange));

class PaddingTest : public ::testing::TestWithParam<Alignment> {
 protected:
  // A problem with the pair and with the alignment, whose rows can be computed alone.
  static Problem Draw(const FeaturePair& pair, Rng& rng) {
    for (;;) {
      Problem p = ProblemWith(pair, rng);
      if (p.query_length > p.key_length) continue;
      p.alignment = GetParam();
      p.dropout.reset();
      p.wants_present = false;
      p.score_output.reset();
      return p;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(, PaddingTest,
                         ::testing::Values(Alignment::kTopLeft, Alignment::kBottomRight));

TEST_P(PaddingTest, APaddedRowEqualsTheRowAlone) {
  uint64_t seed = 0;
  for (const FeaturePair& pair : AllowedPairs()) {
    if (pair.first->name != "key lengths" && pair.second->name != "key lengths") continue;
    Rng rng(++seed);
    const Problem padded = Draw(pair, rng);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + FeaturesOf(padded) + ToText(padded));
    Inputs inputs = InputsFor(padded, {}, rng);
    for (int64_t& length : inputs.key_lengths) length = UniformInt(rng, 1, padded.key_length);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const absl::StatusOr<Outputs> got = RunAttention(padded, inputs, target.Options());
      ASSERT_TRUE(got.ok()) << got.status();
      for (int64_t b = 0; b < padded.batch; ++b) {
        const RowAlone alone = AloneOf(padded, inputs, b);
        Outputs row{.output = RowsOf(got->output, b, alone.problem.query_length)};
        if (got->lse) row.lse = RowsOf(*got->lse, b, alone.problem.query_length);
        EXPECT_TRUE(Matches(alone.problem, row, Attend(alone.problem, alone.inputs)))
            << "row " << b << " of length " << inputs.key_lengths[b];
      }
    }
  }
}

}  // namespace
}  // namespace rapt::test
