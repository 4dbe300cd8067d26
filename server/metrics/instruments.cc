#include "server/metrics/instruments.h"

#include <algorithm>

#include "base/check.h"

namespace rapt {

Histogram::Histogram(absl::Span<const int64_t> bounds, double unit) : bounds_(bounds), unit_(unit) {
  RAPT_CHECK(bounds.size() <= kMaxBounds, "a histogram has too many bounds");
}

void Histogram::Observe(int64_t value) {
  const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  counts_[static_cast<size_t>(bound - bounds_.begin())].Add();
  sum_.Add(value);
}

prometheus::ClientMetric Histogram::Collect() const {
  prometheus::ClientMetric metric;
  uint64_t count = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    count += static_cast<uint64_t>(counts_[i].value());
    metric.histogram.bucket.push_back({count, static_cast<double>(bounds_[i]) * unit_});
  }
  metric.histogram.sample_count = count + static_cast<uint64_t>(counts_[bounds_.size()].value());
  metric.histogram.sample_sum = static_cast<double>(sum_.value()) * unit_;
  return metric;
}

}  // namespace rapt
