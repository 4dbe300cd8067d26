// The definition of attention for one query row, in float64, with the steps of problem.h. Used by
// the reference backend and Diagnose. Written for clarity, not speed.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "attention/score/score.h"

namespace rapt {

// The state of a row's T numbers.
enum class Step : uint8_t {
  kRaw,         // Q K^T
  kScaled,      // ScoreOutput::kScores
  kSoftcapped,  // ScoreOutput::kSoftcapped
  kBiased,      // ScoreOutput::kBiased
  kSoftmax,     // weights before dropout
  kWeights,     // ScoreOutput::kWeights
};

// Borrows problem and arguments, which are valid. Thread-compatible.
class QueryRow {
 public:
  // REQUIRES: `memory` has MemoryBytes(problem) bytes, aligned to double, and outlives the object.
  QueryRow(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h, int64_t i,
           std::byte* memory);

  // The size of the biases by distance; 0 if the problem has none.
  static int64_t MemoryBytes(const Problem& problem);

  // Computes the T weights in `scores` and returns their lse; if no key is visible, the sink or
  // -inf. Calls `observe` after each step.
  using Observer = absl::FunctionRef<void(Step, absl::Span<const double>)>;
  double Weigh(absl::Span<double> scores, Observer observe) const;

  // Computes the Dv numbers of the output. REQUIRES: weights and lse are Weigh()'s result.
  void Output(absl::Span<const double> weights, double lse, absl::Span<double> output) const;

  // Return whether key j is hidden by causality, window or lengths; by mask or bias.
  bool HiddenByPosition(int64_t j) const;
  bool HiddenByMask(int64_t j) const;

 private:
  double Dot(int64_t j) const;
  double Softmax(absl::Span<double> scores) const;
  void DropOut(absl::Span<double> weights) const;

  const Problem& p_;
  const Arguments& a_;
  int64_t b_, h_, i_, kv_head_;
  ScoreParams score_;
  ScoreRow row_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_
