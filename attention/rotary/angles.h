// The cosines and sines of a position's angles, from a cache or computed.
#ifndef RAPT_ATTENTION_ROTARY_ANGLES_H_
#define RAPT_ATTENTION_ROTARY_ANGLES_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "attention/problem.h"
#include "attention/tensor_view.h"

namespace rapt {

struct AngleSource {
  // [M, pairs, 1, 1] with a row for each position, or [B, S, pairs, 1] with one for each token.
  TensorView cos;
  TensorView sin;
  bool by_token = false;
  // Instead of the caches: the angle of pair t is position * theta^(-t / pairs).
  std::optional<double> theta;
  std::optional<RopeScaling> scaling;  // of theta
  int64_t pairs = 0;
};

// Writes the frequencies of pairs, one for each element: what the angles are at position 1.
void RotaryFrequencies(double theta, const std::optional<RopeScaling>& scaling,
                       absl::Span<double> out);

// The angles of a few tokens, one in each slot. Computed ones are in double, and rounded to float
// unless the rotated elements are double.
class Angles {
 public:
  // `element` is the type of the rotated elements.
  static int64_t Bytes(int64_t pairs, DType element, int64_t slots);

  // REQUIRES: `memory` has Bytes() bytes, aligned to 8, and outlives the object.
  Angles(const AngleSource& source, DType element, int64_t slots, std::byte* memory);

  // Sets a slot to the angles of token (b, s) at `position`. Free if it has those of the position.
  // REQUIRES: the slots before it have been set.
  void Set(int64_t slot, int64_t b, int64_t s, int64_t position);

  // The cosines of a slot followed by the sines, `pairs` each: double for kFloat64, otherwise
  // float.
  const std::byte* of(int64_t slot) const { return memory_ + slot * bytes(); }
  int64_t bytes() const { return 2 * row_bytes_; }

 private:
  void Load(const TensorView& cache, int64_t b, int64_t s, std::byte* out) const;
  void Compute(int64_t position, std::byte* out) const;

  AngleSource source_;
  DType real_;
  int64_t row_bytes_;  // of the cosines of a slot
  std::byte* memory_;
  double* frequencies_;
  int64_t* positions_;  // of each slot
  int64_t filled_ = 0;  // slots that have been set
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_ANGLES_H_
