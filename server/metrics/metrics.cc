#include "server/metrics/metrics.h"

#include <prometheus/text_serializer.h>

#include <utility>

namespace rapt {
namespace {

// 50 us to 30 s: from a tiny request answered on the spot to one that fills the machine.
const prometheus::Histogram::BucketBoundaries& DurationBuckets() {
  static const auto& buckets = *new prometheus::Histogram::BucketBoundaries{
      50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3,
      50e-3, 100e-3, 250e-3, 500e-3, 1,    2.5,    5,    10,    30};
  return buckets;
}

}  // namespace

void MethodMetrics::CountCall(absl::StatusCode code, std::chrono::nanoseconds duration) const {
  calls_[static_cast<int>(code)]->Increment();
  duration_seconds_->Observe(std::chrono::duration<double>(duration).count());
}

Metrics::Metrics()
    : requests_total_(prometheus::BuildCounter()
                          .Name("rapt_requests_total")
                          .Help("Calls that have ended, by method and status code.")
                          .Register(registry_)),
      request_duration_seconds_(prometheus::BuildHistogram()
                                    .Name("rapt_request_duration_seconds")
                                    .Help("Time from a call's arrival to its answer, by method.")
                                    .Register(registry_)) {}

MethodMetrics Metrics::ForMethod(absl::string_view method) {
  MethodMetrics metrics;
  const std::string name(method);
  for (int code = 0; code < MethodMetrics::kCodes; ++code) {
    metrics.calls_[code] = &requests_total_.Add(
        {{"method", name},
         {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
  }
  metrics.duration_seconds_ = &request_duration_seconds_.Add({{"method", name}}, DurationBuckets());
  return metrics;
}

void Metrics::ShowGauge(const std::string& name, const std::string& help,
                        std::function<double()> read) {
  prometheus::Gauge& gauge =
      prometheus::BuildGauge().Name(name).Help(help).Register(registry_).Add({});
  shown_gauges_.push_back({gauge, std::move(read)});
}

std::string Metrics::Serialize() const {
  for (const ShownGauge& shown : shown_gauges_) shown.gauge.Set(shown.read());
  return prometheus::TextSerializer().Serialize(registry_.Collect());
}

}  // namespace rapt
