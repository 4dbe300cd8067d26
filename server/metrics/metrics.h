// Every instrument of the server, in one place.
#ifndef RAPT_SERVER_METRICS_METRICS_H_
#define RAPT_SERVER_METRICS_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace rapt {

// The instruments of one method, their labels resolved. Thread-safe.
class MethodMetrics {
 public:
  void CountCall(absl::StatusCode code, std::chrono::nanoseconds duration) const;

 private:
  friend class Metrics;
  static constexpr int kCodes = static_cast<int>(absl::StatusCode::kUnauthenticated) + 1;

  std::array<prometheus::Counter*, kCodes> calls_;
  prometheus::Histogram* duration_seconds_;
};

// Thread-safe, once every method and gauge is known.
class Metrics {
 public:
  Metrics();

  // rapt_requests_total{method,code} and rapt_request_duration_seconds{method}. Every code's series
  // is there from the start, so that a rate over it is never missing its zero. Valid as long as
  // this.
  MethodMetrics ForMethod(absl::string_view method);

  // A gauge that is read at every scrape. Start-up only; `read` is called from any thread.
  void ShowGauge(const std::string& name, const std::string& help, std::function<double()> read);

  // Everything in Prometheus' text format.
  std::string Serialize() const;

 private:
  struct ShownGauge {
    prometheus::Gauge& gauge;
    std::function<double()> read;
  };

  prometheus::Registry registry_;
  prometheus::Family<prometheus::Counter>& requests_total_;
  prometheus::Family<prometheus::Histogram>& request_duration_seconds_;
  std::vector<ShownGauge> shown_gauges_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_METRICS_METRICS_H_
