// A histogram of durations with three significant digits, like HdrHistogram. Each power of two is
// divided into 1024 equal buckets, so the relative error is at most 1/1024 from microseconds to
// minutes, and any two histograms can be added.
#ifndef RAPT_CLIENT_LOAD_HISTOGRAM_H_
#define RAPT_CLIENT_LOAD_HISTOGRAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rapt::load {

// Thread-compatible.
class Histogram {
 public:
  // Clamps values to [0, kMaxValue].
  void Record(int64_t value, int64_t times = 1);
  void Add(const Histogram& other);
  void Clear();

  int64_t count() const { return count_; }
  int64_t min() const { return min_; }  // 0 if empty, like the rest
  int64_t max() const { return max_; }
  double mean() const;

  // Returns the smallest recorded value that is at least as large as a share `quantile` of all
  // values, rounded up to the end of its bucket, at most max().
  int64_t ValueAt(double quantile) const;

  // Returns the non-empty buckets in order. Recording each `value` `count` times gives a histogram
  // with the same quantiles.
  struct Bucket {
    int64_t value = 0;
    int64_t count = 0;
  };
  std::vector<Bucket> Buckets() const;

  static constexpr int64_t kMaxValue = int64_t{1} << 43;  // in nanoseconds, 2.4 hours

 private:
  std::vector<int64_t> counts_;  // up to the bucket of the largest value
  int64_t count_ = 0;
  int64_t min_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_HISTOGRAM_H_
