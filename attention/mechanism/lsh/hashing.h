// The buckets of lsh_attention and the order of tokens by them. Buckets are those of float64
// arithmetic, which decides between products that are close in less precise arithmetic.
#ifndef RAPT_ATTENTION_MECHANISM_LSH_HASHING_H_
#define RAPT_ATTENTION_MECHANISM_LSH_HASHING_H_

#include <cstdint>

#include "attention/mechanism/lsh/lsh_shape.h"
#include "attention/problem.h"
#include "attention/work_meter.h"

namespace rapt {

// The rotations of a head and round, transposed: [columns][D].
struct LshRotations {
  const double* columns = nullptr;
  double largest_norm = 0;  // of a column; not finite if a number is not
};

// Writes rotations of head `h`, an index into those that the call has, to `columns`. Returns their
// largest norm. Stops early if the task is abandoned.
double ReadRotations(const LshShape& shape, const Arguments& arguments, int64_t h, int64_t round,
                     double* columns, WorkMeter& meter);

// Returns the bucket of the D numbers x: the first of the largest products, where NaN is largest.
int32_t BucketOf(const LshShape& shape, const LshRotations& rotations, const double* x,
                 WorkMeter& meter);

// The same, given the products as Real computed them. `norm` is that of x.
template <typename Real>
int32_t BucketOf(const LshShape& shape, const LshRotations& rotations, const double* x, double norm,
                 const Real* products, WorkMeter& meter);

// Writes the tokens [0, S) in the order of (bucket, position). `ends` has buckets + 1 elements.
void SortByBucket(const LshShape& shape, const int32_t* buckets, int32_t* ends, int32_t* order,
                  WorkMeter& meter);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_HASHING_H_
