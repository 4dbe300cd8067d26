// Lock-free instruments for the path of a call; prometheus::Histogram takes a lock.
#ifndef RAPT_SERVER_METRICS_INSTRUMENTS_H_
#define RAPT_SERVER_METRICS_INSTRUMENTS_H_

#include <prometheus/client_metric.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace rapt {

// Thread-safe.
class Counter {
 public:
  void Add(int64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

// For sums that may exceed int64 within a server's lifetime.
class RealCounter {
 public:
  void Add(double n) { value_.fetch_add(n, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// Thread-safe. A scrape during Observe() may see the count before the sum.
class Histogram {
 public:
  static constexpr size_t kMaxBounds = 20;

  // Observes integers in a unit that is `unit` times the exported one: 1e-9 for nanoseconds
  // exported as seconds. REQUIRES: `bounds`, in the same unit, are ascending, at most kMaxBounds,
  // and outlive this.
  Histogram(absl::Span<const int64_t> bounds, double unit);

  void Observe(int64_t value);

  // Without labels.
  prometheus::ClientMetric Collect() const;

 private:
  const absl::Span<const int64_t> bounds_;
  const double unit_;
  std::array<Counter, kMaxBounds + 1>
      counts_;  // by bound; the last counts values beyond all bounds
  Counter sum_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_METRICS_INSTRUMENTS_H_
