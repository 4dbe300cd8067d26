// The random projection of FAVOR+ (Choromanski et al. 2021), from a seed.
#ifndef RAPT_ATTENTION_MECHANISM_LINEAR_PROJECTION_H_
#define RAPT_ATTENTION_MECHANISM_LINEAR_PROJECTION_H_

#include <cstdint>

#include "absl/types/span.h"
#include "attention/checkpoint.h"

namespace rapt {

// Writes rows [block * size, (block + 1) * size) of the projection [features][size], at most up to
// `features`, to the first elements of `out`: rows of a Haar-orthogonal matrix times the norms of
// Gaussian vectors. `out` has size * size elements; only the last block uses fewer rows. Different
// blocks may be drawn concurrently. Stops early if the checkpoint says so.
void DrawProjectionBlock(uint64_t seed, int64_t block, int64_t features, int64_t size,
                         absl::Span<double> workspace, absl::Span<double> out,
                         const Checkpoint& checkpoint);

// Returns the numbers of `workspace`.
constexpr int64_t ProjectionWorkspace(int64_t size) { return size * size + size; }

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LINEAR_PROJECTION_H_
