// The buckets of lsh_attention and the order of tokens by them. Buckets are those of float64
// arithmetic, which decides between products that are close in less precise arithmetic.
#ifndef RAPT_ATTENTION_MECHANISM_LSH_HASHING_H_
#define RAPT_ATTENTION_MECHANISM_LSH_HASHING_H_

#include <cstdint>

#include "attention/mechanism/lsh/lsh_shape.h"
#include "attention/mechanism/lsh/pacer.h"
#include "attention/problem.h"

namespace rapt {

// The rotations of a head and round, transposed: [columns][D].
struct LshRotations {
  const double* columns = nullptr;
  double largest_norm = 0;  // of a column; not finite if a number is not
};

// Writes rotations of head `h`, an index into those that the call has, to `columns`. Returns their
// largest norm. Stops early if the task is abandoned.
double ReadRotations(const LshShape& shape, const Arguments& arguments, int64_t h, int64_t round,
                     double* columns, Pacer& pacer);

// Returns the bucket of the D numbers x: the first of the largest products, where NaN is largest.
int32_t BucketOf(const LshShape& shape, const LshRotations& rotations, const double* x,
                 Pacer& pacer);

// The same, given the products as Real computed them. `norm` is that of x.
template <typename Real>
int32_t BucketOf(const LshShape& shape, const LshRotations& rotations, const double* x, double norm,
                 const Real* products, Pacer& pacer);

// Writes the tokens [0, S) in the order of (bucket, position). `ends` has buckets + 1 elements.
void SortByBucket(const LshShape& shape, const int32_t* buckets, int32_t* ends, int32_t* order,
                  Pacer& pacer);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_HASHING_H_
