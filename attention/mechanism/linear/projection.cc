#include "attention/mechanism/linear/projection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/philox.h"

namespace rapt {
namespace {

// Replaces the rows of `matrix` by an orthonormal basis, each with a positive component along the
// row that it replaces. Twice, because once loses digits if rows are almost parallel. Returns false
// if the checkpoint says so.
bool Orthonormalize(int64_t size, absl::Span<double> matrix, const Checkpoint& checkpoint) {
  const auto row = [&](int64_t n) { return absl::Span<double>(matrix.data() + n * size, size); };
  const auto dot = [](absl::Span<const double> a, absl::Span<const double> b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  for (int64_t n = 0; n < size; ++n) {
    const absl::Span<double> x = row(n);
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t m = 0; m < n; ++m) {
        const absl::Span<const double> y = row(m);
        const double along = dot(x, y);
        for (int64_t d = 0; d < size; ++d) x[d] -= along * y[d];
      }
      const double norm = std::sqrt(dot(x, x));
      for (double& value : x) value /= norm;
    }
    if (checkpoint.go_on != nullptr && !checkpoint.go_on(checkpoint.context)) return false;
  }
  return true;
}

}  // namespace

void DrawProjectionBlock(uint64_t seed, int64_t block, int64_t features, int64_t size,
                         absl::Span<double> workspace, absl::Span<double> out,
                         const Checkpoint& checkpoint) {
  // The columns of the Gaussian block are the rows of `columns`.
  const absl::Span<double> columns(workspace.data(), size * size);
  const absl::Span<double> gaussian(workspace.data() + size * size, size);
  for (int64_t n = 0; n < size; ++n) {
    DrawNormals(seed, 0, DrawPurpose::kDirections, (block * size + n) * size, gaussian);
    for (int64_t d = 0; d < size; ++d) columns[d * size + n] = gaussian[d];
  }
  if (!Orthonormalize(size, columns, checkpoint)) return;
  const int64_t rows = std::min(size, features - block * size);
  for (int64_t n = 0; n < rows; ++n) {
    DrawNormals(seed, 0, DrawPurpose::kNorms, (block * size + n) * size, gaussian);
    const double norm =
        std::sqrt(std::inner_product(gaussian.begin(), gaussian.end(), gaussian.begin(), 0.0));
    for (int64_t d = 0; d < size; ++d) out[n * size + d] = columns[d * size + n] * norm;
  }
}

}  // namespace rapt
