// Merges results of attention to disjoint sets of keys.
#ifndef RAPT_CLIENT_CPP_PARTIAL_RESULTS_H_
#define RAPT_CLIENT_CPP_PARTIAL_RESULTS_H_

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "absl/types/span.h"

namespace rapt::client {

// A row's result is its output O and lse, the natural logarithm of its sum of exponentials. The
// results of disjoint sets of keys a and b merge as
//
//     m = max(lse_a, lse_b);  O = (e^(lse_a-m) O_a + e^(lse_b-m) O_b) / (e^(lse_a-m) + e^(lse_b-m))
//     lse = m + log(e^(lse_a-m) + e^(lse_b-m))
//
// No keys are O = 0, lse = -inf, and change nothing. NaN or +inf in an lse gives NaN. Keeps the
// sums in FP64. Thread-compatible.
class PartialResults {
 public:
  // Rows of all heads, and their length.
  PartialResults(size_t rows, size_t size)
      : size_(size), y_(rows * size), max_(rows, kNone), sum_(rows) {}

  // REQUIRES: y has rows * size elements, lse has `rows`.
  template <typename Real>
  void Add(absl::Span<const Real> y, absl::Span<const Real> lse) {
    for (size_t row = 0; row < max_.size(); ++row) {
      AddRow(row, y.subspan(row * size_, size_), static_cast<double>(lse[row]));
    }
  }

  // Writes what was added. REQUIRES: as Add().
  template <typename Real>
  void Write(absl::Span<Real> y, absl::Span<Real> lse) const {
    for (size_t row = 0; row < max_.size(); ++row) {
      const bool is_empty = max_[row] == kNone;
      for (size_t d = row * size_; d < (row + 1) * size_; ++d) {
        y[d] = is_empty ? Real{0} : static_cast<Real>(y_[d] / sum_[row]);
      }
      lse[row] = static_cast<Real>(is_empty ? kNone : max_[row] + std::log(sum_[row]));
    }
  }

 private:
  static constexpr double kNone = -std::numeric_limits<double>::infinity();

  template <typename Real>
  void AddRow(size_t row, absl::Span<const Real> y, double lse) {
    if (lse == kNone) return;
    const double max = lse <= max_[row] ? max_[row] : lse;  // NaN stays
    const double before = max_[row] == kNone ? 0 : std::exp(max_[row] - max);
    const double added = std::exp(lse - max);
    double* const sums = &y_[row * size_];
    for (size_t d = 0; d < size_; ++d) {
      sums[d] = before * sums[d] + added * static_cast<double>(y[d]);
    }
    sum_[row] = before * sum_[row] + added;
    max_[row] = max;
  }

  const size_t size_;
  std::vector<double> y_;    // weighted by e^(lse - max), not yet divided by the sum
  std::vector<double> max_;  // the largest lse of each row
  std::vector<double> sum_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_PARTIAL_RESULTS_H_
