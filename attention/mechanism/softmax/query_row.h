// The definition of attention for one query row, in float64, with the steps of problem.h. Used by
// the reference backend and Diagnose. Written for clarity, not speed.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "attention/rotary/rotation.h"
#include "attention/score/score.h"

namespace rapt {

// The state of a row's T numbers.
enum class Step : uint8_t {
  kRaw,         // Q (K + Rk)^T, or additive scores
  kScaled,      // ScoreOutput::kScores
  kSoftcapped,  // ScoreOutput::kSoftcapped
  kBiased,      // ScoreOutput::kBiased
  kSoftmax,     // weights before dropout
  kWeights,     // ScoreOutput::kWeights
};

// What the backward pass of a row is given.
struct RowCotangent {
  absl::Span<const double> output;  // dY, Dv numbers
  double lse = 0;                   // dlse
  // lse and sum dY Y of the forward pass, if both are given; otherwise they are computed.
  struct Forward {
    double lse = 0;
    double sum = 0;
  };
  std::optional<Forward> forward = std::nullopt;
};

// The gradients of a row's steps, T numbers each; 0 for hidden keys.
struct RowGradient {
  absl::Span<double> weights;  // not a gradient: P Z, by which dY is multiplied in dV
  absl::Span<double> biased;   // dX
  absl::Span<double> raw;      // of Step::kRaw
  double sink = 0;             // of head_sink
};

// Borrows problem and arguments, which are valid. Thread-compatible.
class QueryRow {
 public:
  // `rotation` is null unless the problem has_rotary(); the arguments then have its rotated keys.
  // REQUIRES: `memory` has MemoryBytes(problem) bytes, aligned to double, and outlives the object.
  QueryRow(const Problem& problem, const Arguments& arguments, const Rotation* rotation, int64_t b,
           int64_t h, int64_t i, std::byte* memory);

  QueryRow(const QueryRow&) = delete;
  QueryRow& operator=(const QueryRow&) = delete;

  // The size of the biases by distance, of a rotated query and of the selected keys; 0 if the
  // problem has none of them.
  static int64_t MemoryBytes(const Problem& problem);

  // Computes the T weights in `scores` and returns their lse; if no key is visible, the sink or
  // -inf. Normalizers other than softmax have no lse: only whether it is -inf has a meaning. Calls
  // `observe` after each step.
  using Observer = absl::FunctionRef<void(Step, absl::Span<const double>)>;
  double Weigh(absl::Span<double> scores, Observer observe) const;

  // Computes the Dv numbers of the output. REQUIRES: weights and lse are Weigh()'s result.
  void Output(absl::Span<const double> weights, double lse, absl::Span<double> output) const;

  // The backward pass of Weigh() and Output(); see Backward in problem.h. Overwrites the spans of
  // `gradient`.
  void Differentiate(const RowCotangent& cotangent, RowGradient& gradient) const;

  // Add the share of key j, given its gradient of Step::kRaw, to that of the query (as rotated), of
  // relative_query, of the key (as rotated), of its vector in relative_keys, of additive_weight.
  void AddToQuery(int64_t j, double raw, absl::Span<double> query) const;
  void AddToRelativeQuery(int64_t j, double raw, absl::Span<double> query) const;
  void AddToKey(int64_t j, double raw, absl::Span<double> key) const;
  void AddToRelativeKey(double raw, absl::Span<double> vector) const;
  void AddToAdditiveWeight(int64_t j, double raw, absl::Span<double> weight) const;

  // Returns the index of the vector for the distance from the query to key j.
  int64_t RelativeIndex(Role role, int64_t j) const;

  // Returns whether key j is hidden for any of these reasons.
  bool Hidden(int64_t j) const;
  // Return whether key j is hidden by causality, window or lengths; by the block mask; because it
  // is not selected; by mask or bias.
  bool HiddenByPosition(int64_t j) const;
  bool HiddenByBlock(int64_t j) const;
  bool HiddenBySelection(int64_t j) const;
  bool HiddenByMask(int64_t j) const;

 private:
  double Dot(int64_t j) const;
  double Relative(Role role, int64_t j, int64_t d) const;
  double AdditiveScore(int64_t j) const;
  double AdditiveTanh(int64_t j, int64_t d) const;
  double AdditiveWeightOf(int64_t d) const;
  double AdditiveSlope(int64_t j, int64_t d) const;
  double DropoutFactor(int64_t j) const;
  double ValueGradient(int64_t j, absl::Span<const double> output) const;
  double Normalize(absl::Span<double> scores) const;
  double Softmax(absl::Span<double> scores) const;
  void DropOut(absl::Span<double> weights) const;

  const Problem& p_;
  const Arguments& a_;
  int64_t b_, h_, i_, kv_head_;
  double alpha_;      // 1: softmax
  TensorView query_;  // row (b, h, i) is the query
  ScoreParams score_;
  ScoreRow row_;
  SparseRow sparse_ = {};  // if the problem is sparse
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_QUERY_ROW_H_
