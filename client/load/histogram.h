// How often which duration came, to three significant digits, as HdrHistogram keeps it: every power
// of two is cut into 1024 equal buckets, so that a value is known to one part in 1024 whether it is
// microseconds or minutes, and histograms of any two runs can be added.
#ifndef RAPT_CLIENT_LOAD_HISTOGRAM_H_
#define RAPT_CLIENT_LOAD_HISTOGRAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rapt::load {

// Thread-compatible.
class Histogram {
 public:
  // Negative values count as 0, those above kMaxValue as kMaxValue.
  void Record(int64_t value, int64_t times = 1);
  void Add(const Histogram& other);
  void Clear();

  int64_t count() const { return count_; }
  int64_t min() const { return min_; }  // 0 when empty, as all that follow
  int64_t max() const { return max_; }
  double mean() const;

  // The least value that at least `quantile` of all are not above: its bucket's upper end, or
  // max().
  int64_t ValueAt(double quantile) const;

  // Of those that are not 0, in their order. Recording each `value` `count` times gives a histogram
  // whose quantiles are the same.
  struct Bucket {
    int64_t value = 0;
    int64_t count = 0;
  };
  std::vector<Bucket> Buckets() const;

  static constexpr int64_t kMaxValue = int64_t{1} << 43;  // in nanoseconds, 2.4 hours

 private:
  std::vector<int64_t> counts_;  // as long as the largest value needs
  int64_t count_ = 0;
  int64_t min_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_HISTOGRAM_H_
