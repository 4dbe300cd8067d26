// Biases by distance, expanded: ALiBi, the buckets of T5 and clipped tables become one table per
// head with the bias of every distance between the problem's queries and keys. The biases of a
// query row are a slice of it, which kernels add to the scores.
#ifndef RAPT_ATTENTION_SCORE_RELATIVE_TABLES_H_
#define RAPT_ATTENTION_SCORE_RELATIVE_TABLES_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "attention/problem.h"

namespace rapt {

// The tables of a problem with Problem::has_relative(), in memory of the caller. Their size is
// linear in the lengths. `Real` is the type of the scores, float or double.
template <typename Real>
class RelativeTables {
 public:
  // Numbers after the last table that kernels may read, because they add whole vectors or tiles.
  static constexpr int64_t kSlack = 32;

  // With the slack.
  static int64_t Bytes(const Problem& problem);
  // The number of tables: one per head, and per batch row if the rows differ.
  static int64_t Count(const Problem& problem);

  // REQUIRES: `memory` has Bytes() bytes, aligned to Real.
  RelativeTables(const Problem& problem, std::byte* memory);

  // Returns the table of a head. Those of different batch rows may be one.
  int64_t TableOf(int64_t b, int64_t h) const;

  // Fills table n. Different tables may be filled concurrently.
  void Fill(const Arguments& arguments, int64_t n) const;

  // Returns the biases of keys [0, T) for query i. REQUIRES: their table is filled.
  const std::byte* Row(int64_t b, int64_t h, int64_t i) const;

 private:
  const Problem& problem_;
  Real* memory_;
};

// Writes the biases of the T keys for one query, in float64.
void RelativeRow(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h,
                 int64_t i, absl::Span<double> biases);

// For gradients. The element of a head's alibi_slopes, bias_table or relative_bias that the bias of
// a distance comes from, and its factor.
struct RelativeEntry {
  int64_t index;  // from 0 to RelativeEntries() - 1
  double factor;
};
int64_t RelativeEntries(const Problem& problem);
RelativeEntry RelativeEntryOf(const Problem& problem, int64_t distance);

// Returns where that element is in a tensor with the axes of the input.
std::byte* RelativeElement(const Problem& problem, const MutableTensorView& table, int64_t b,
                           int64_t h, int64_t index);

}  // namespace rapt

#endif  // RAPT_ATTENTION_SCORE_RELATIVE_TABLES_H_
