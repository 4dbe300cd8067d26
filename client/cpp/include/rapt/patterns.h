// Common sparsity patterns, as masks and block masks of an AttendCall. True: the query may see the
// key. Positions of queries and keys are the same, 0 to length - 1.
#ifndef RAPT_CLIENT_RAPT_PATTERNS_H_
#define RAPT_CLIENT_RAPT_PATTERNS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "rapt/tensor.h"

namespace rapt::client {

// All return InvalidArgument with the argument, its value and the allowed values. A mask has fewer
// than 2^31 values: a message cannot hold more.

// Longformer (Beltagy et al. 2020): keys at most `window` before or after the query; keys and
// queries at the positions `global` see and are seen by all. [length, length], for
// AttendCall::mask. The same without a mask: window and AttendCall::global_mask.
absl::StatusOr<Tensor> LongformerMask(int64_t length, int64_t window,
                                      absl::Span<const int64_t> global);

// The Sparse Transformer's strided pattern (Child et al. 2019), causal: the last `stride` keys, and
// every stride-th key before the query. [length, length].
absl::StatusOr<Tensor> StridedMask(int64_t length, int64_t stride);

// BigBird (Zaheer et al. 2020), for AttendCall::block_mask with block_q = block_k = block: the
// first and last rows and columns of blocks, the diagonal block and its neighbours, and `random`
// more blocks for each row and head, or all if fewer are left. [1, heads, n, n].
//
// Of a row's blocks that are left, in ascending order, draw t takes number floor(x * count / 2^32)
// of the `count` that remain, where x is lane t % 4 of Philox4x32-10 with key = seed and counter =
// (t / 4, row, head, 0).
struct BigBird {
  int64_t length = 0;
  int64_t block = 64;
  int64_t heads = 1;
  int64_t random = 3;
  uint64_t seed = 0;
};
absl::StatusOr<Tensor> BigBirdBlockMask(const BigBird& pattern);

// Neighbourhood attention (Hassani et al. 2022) over positions of a grid of 1 to 3 axes, row-major:
// along each axis of size n, a query sees `kernel` keys, of which it is in the middle unless the
// grid ends: from clip(i - kernel / 2, 0, n - kernel) on. With a dilation, this holds for each set
// of positions with the same remainder. [length, length], where length is the product of `shape`.
absl::StatusOr<Tensor> NeighbourhoodMask(absl::Span<const int64_t> shape, int64_t kernel,
                                         int64_t dilation = 1);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_PATTERNS_H_
