// What counts on the path of a call: atomics, and no lock as prometheus::Histogram has one.
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

// For sums that outgrow int64 within a server's life.
class RealCounter {
 public:
  void Add(double n) { value_.fetch_add(n, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

// Thread-safe. A scrape in the middle of an Observe() may see its count and not yet its sum.
class Histogram {
 public:
  static constexpr size_t kMaxBounds = 20;

  // Observes whole numbers of a unit that is `unit` of what is shown: 1e-9 for nanoseconds shown as
  // seconds. `bounds` are in that unit too, ascending, at most kMaxBounds, and outlive this.
  Histogram(absl::Span<const int64_t> bounds, double unit);

  void Observe(int64_t value);

  // Without labels.
  prometheus::ClientMetric Collect() const;

 private:
  const absl::Span<const int64_t> bounds_;
  const double unit_;
  std::array<Counter, kMaxBounds + 1> counts_;  // by bound; the last one is beyond all of them
  Counter sum_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_METRICS_INSTRUMENTS_H_
