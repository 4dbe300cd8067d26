// The instruments of calls, and the page of all metrics; docs/metrics.md documents them.
#ifndef RAPT_SERVER_METRICS_METRICS_H_
#define RAPT_SERVER_METRICS_METRICS_H_

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>
#include <prometheus/metric_type.h>

#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "server/calls/call_report.h"
#include "server/calls/per_model.h"
#include "server/metrics/instruments.h"
#include "server/rejection.h"

namespace rapt {

// Every label has a few values that are known at start-up, so that the number of series is bounded
// and counting a call needs only atomics. Thread-safe after all start-up calls.
class Metrics final : public MetricSink {
 public:
  // `backends` outlives this and holds every backend that a report names.
  explicit Metrics(const BackendSet& backends);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Returns a function that counts the calls of a method. Before the first scrape only; the result
  // is thread-safe and valid for the lifetime of this.
  std::function<void(const CallReport&)> ForMethod(absl::string_view name);

  // Before the first scrape only; `read` is called at every scrape.
  void AddGauge(const std::string& name, const std::string& help, Labels labels,
                std::function<double()> read) override;
  void AddCounter(const std::string& name, const std::string& help, Labels labels,
                  std::function<double()> read) override;

  // Returns all metrics in Prometheus' text format.
  std::string Serialize() const;

 private:
  using Families = std::vector<prometheus::MetricFamily>;

  static constexpr size_t kMaxBackends = 4;
  static constexpr size_t kCodes = 17;  // of gRPC
  // The first label is "none", for calls without a plan.
  static constexpr size_t kBackendLabels = kMaxBackends + 1;
  static constexpr size_t kTypeLabels = 5;
  using CountsByCode = std::array<Counter, kCodes>;

  struct Method {
    explicit Method(absl::string_view name);

    std::string name;
    std::array<std::array<CountsByCode, kTypeLabels>, kBackendLabels> calls;
    Histogram duration;
  };

  struct Series {
    Labels labels;
    std::function<double()> read;
  };
  struct ExportedFamily {
    std::string name;
    std::string help;
    prometheus::MetricType type;
    std::vector<Series> series;
  };

  size_t IndexOf(const Backend* backend) const;
  std::string BackendLabel(size_t label) const;
  void Count(Method& method, const CallReport& report);
  void CountStages(const CallReport& report);
  void CountVariants(const Problem& problem);
  void Add(prometheus::MetricType type, const std::string& name, const std::string& help,
           Labels labels, std::function<double()> read);
  void CollectMethods(Families& families) const;
  void CollectStages(Families& families) const;
  void CollectRefusals(Families& families) const;
  void CollectWork(Families& families) const;
  void CollectExported(Families& families) const;

  const BackendSet& backends_;
  std::deque<Method> methods_;  // a deque for stable addresses
  CountsByCode codes_;          // of all methods
  std::array<Histogram, kStages> stage_durations_;
  Histogram batch_size_;
  Histogram run_requests_;
  std::array<Counter, kStages> cancelled_;
  std::array<Counter, kStages> deadline_exceeded_;
  std::array<Counter, kRejections> rejected_;
  enum FallbackReason : uint8_t { kUnsupported, kNotNow, kStandIn, kFallbackReasons };
  // from, to, reason
  std::array<std::array<std::array<Counter, kFallbackReasons>, kMaxBackends>, kMaxBackends>
      fallbacks_;
  Counter received_bytes_;
  Counter sent_bytes_;
  RealCounter flops_;
  PerModel<Counter> models_;       // requests of each
  std::vector<Counter> variants_;  // of Variants(), requests that use each
  mutable Mutex exported_mutex_;
  std::vector<ExportedFamily> exported_ ABSL_GUARDED_BY(exported_mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_METRICS_METRICS_H_
