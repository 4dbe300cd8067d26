// The definition of attention, one query row at a time, in float64, each step as problem.h states
// it. The reference backend and Diagnose stand on it. Slow, and meant to be read.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "attention/problem.h"

namespace rapt {

// What the T numbers of a row are after a step.
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
  QueryRow(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h, int64_t i);

  // Fills `scores`, T long, step by step; `observe` sees it after each. Leaves the weights there
  // and returns their lse, -inf when nothing is visible.
  using Observer = absl::FunctionRef<void(Step, absl::Span<const double>)>;
  double Weigh(absl::Span<double> scores, Observer observe) const;

  // The Dv numbers of the output that Weigh's result gives.
  void Output(absl::Span<const double> weights, double lse, absl::Span<double> output) const;

  // Why key j can't be attended: causality, window and lengths come first, the mask second.
  bool HiddenByPosition(int64_t j) const;
  bool HiddenByMask(int64_t j) const;

 private:
  double Dot(int64_t j) const;
  double Bias(int64_t j) const;
  double Softmax(absl::Span<double> scores) const;
  void DropOut(absl::Span<double> weights) const;
  const std::byte* KeyRow(const TensorView& past, const TensorView& now, int64_t j) const;

  const Problem& p_;
  const Arguments& a_;
  int64_t b_, h_, i_, kv_head_;
  KeyRange visible_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_
