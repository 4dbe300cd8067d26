// relative_keys and relative_values, prepared for the kernels: the rows of the distances that the
// problem's queries and keys can have, in the type of the sums. Keys are transposed, so that a
// product with queries reads consecutive distances.
#ifndef RAPT_ATTENTION_CPU_VECTOR_TABLES_H_
#define RAPT_ATTENTION_CPU_VECTOR_TABLES_H_

#include <cstddef>
#include <cstdint>

#include "attention/cpu/kernels.h"
#include "attention/problem.h"

namespace rapt::cpu {

// The tables of a problem with Problem::has_relative_vectors(), in memory of the caller. `Real` is
// the type of the sums, float or double.
template <typename Real>
class VectorTables {
 public:
  // Linear in the lengths and in those of the tables. Does not depend on the position of a section.
  static int64_t Bytes(const Problem& problem);
  // The number of tables: one per head of the two inputs.
  static int64_t Count(const Problem& problem);

  // REQUIRES: `memory` has Bytes() bytes, aligned to kVectorBytes.
  VectorTables(const Problem& problem, std::byte* memory);

  // Fills table n. Different tables may be filled concurrently.
  void Fill(const Arguments& arguments, int64_t n) const;

  // What kernels need for tasks of batch row b.
  FlashVectors For(const Arguments& arguments, int64_t b) const;

 private:
  void FillKeys(const TensorView& table, int64_t h) const;
  void FillValues(const TensorView& table, int64_t h) const;

  const Problem& problem_;
  Real* keys_;       // [heads][D][distances]
  Real* values_;     // [heads][distances][Dv]
  int64_t* finite_;  // [heads], of the values
};

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_VECTOR_TABLES_H_
