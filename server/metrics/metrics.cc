#include "server/metrics/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "attention/variants.h"
#include "base/check.h"

namespace rapt {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// Nanoseconds, 50 us to 30 s: from a tiny request computed inline to one that occupies the whole
// machine.
constexpr int64_t kMicrosecond = 1'000;
constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kDurationBounds[] = {50 * kMicrosecond,  100 * kMicrosecond, 250 * kMicrosecond,
                                       500 * kMicrosecond, 1 * kMillisecond,   2'500 * kMicrosecond,
                                       5 * kMillisecond,   10 * kMillisecond,  25 * kMillisecond,
                                       50 * kMillisecond,  100 * kMillisecond, 250 * kMillisecond,
                                       500 * kMillisecond, 1 * kSecond,        2'500 * kMillisecond,
                                       5 * kSecond,        10 * kSecond,       30 * kSecond};
constexpr double kNanosecond = 1e-9;

// For batch sizes, and for the number of requests in a joined run.
constexpr int64_t kBatchBounds[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};

constexpr absl::string_view kNone = "none";
constexpr absl::string_view kStageNames[kStages] = {"receive", "queue", "compute", "send"};
// In the order of DType, after "none".
constexpr absl::string_view kTypeNames[] = {kNone, "FP32", "FP16", "BF16", "FP64"};
static_assert(static_cast<int>(DType::kFloat32) == 0 && static_cast<int>(DType::kFloat64) == 3);

// In the order of Metrics::FallbackReason.
constexpr const char* kFallbackReasonNames[] = {"unsupported", "not_now", "stand_in"};

MetricFamily Family(MetricType type, std::string name, std::string help) {
  return {std::move(name), std::move(help), type, {}};
}

ClientMetric WithLabels(const MetricSink::Labels& labels) {
  ClientMetric metric;
  for (const auto& [name, value] : labels) metric.label.push_back({name, value});
  return metric;
}

ClientMetric CounterOf(const MetricSink::Labels& labels, double value) {
  ClientMetric metric = WithLabels(labels);
  metric.counter.value = value;
  return metric;
}

ClientMetric HistogramOf(const MetricSink::Labels& labels, const Histogram& histogram) {
  ClientMetric metric = histogram.Collect();
  metric.label = WithLabels(labels).label;
  return metric;
}

template <typename Counters, typename Name>
MetricFamily CountersOf(std::string name, std::string help, const char* label,
                        const Counters& counters, Name name_of) {
  MetricFamily family = Family(MetricType::Counter, std::move(name), std::move(help));
  for (size_t i = 0; i < counters.size(); ++i) {
    family.metric.push_back(
        CounterOf({{label, std::string(name_of(i))}}, static_cast<double>(counters[i].value())));
  }
  return family;
}

}  // namespace

Metrics::Method::Method(absl::string_view name_in)
    : name(name_in), duration(kDurationBounds, kNanosecond) {}

Metrics::Metrics(const BackendSet& backends)
    : backends_(backends),
      stage_durations_{{{kDurationBounds, kNanosecond},
                        {kDurationBounds, kNanosecond},
                        {kDurationBounds, kNanosecond},
                        {kDurationBounds, kNanosecond}}},
      batch_size_(kBatchBounds, 1),
      run_requests_(kBatchBounds, 1),
      variants_(Variants().size()) {
  RAPT_CHECK(backends.size() <= kMaxBackends, "there are more backends than kMaxBackends");
}

size_t Metrics::IndexOf(const Backend* backend) const {
  const auto found = std::find(backends_.begin(), backends_.end(), backend);
  RAPT_CHECK(found != backends_.end(), "a report names an unknown backend");
  return static_cast<size_t>(found - backends_.begin());
}

std::string Metrics::BackendLabel(size_t label) const {
  return std::string(label == 0 ? kNone : backends_[label - 1]->name());
}

std::function<void(const CallReport&)> Metrics::ForMethod(absl::string_view name) {
  Method& method = methods_.emplace_back(name);
  return [this, &method](const CallReport& report) { Count(method, report); };
}

void Metrics::Count(Method& method, const CallReport& report) {
  const Routing& routing = report.routing;
  const size_t backend = routing.backend == nullptr ? 0 : IndexOf(routing.backend) + 1;
  const size_t type =
      report.problem == nullptr ? 0 : static_cast<size_t>(report.problem->dtype) + 1;
  const auto code = static_cast<size_t>(report.status.code());
  method.calls[backend][type][code].Add();
  codes_[code].Add();
  method.duration.Observe(report.total.count());
  CountStages(report);
  received_bytes_.Add(report.received_bytes);
  sent_bytes_.Add(report.sent_bytes);
  if (report.problem != nullptr) batch_size_.Observe(report.problem->batch);
  if (report.batch_size > 0) run_requests_.Observe(report.batch_size);
  if (report.flops > 0) flops_.Add(report.flops);
  if (report.problem != nullptr) models_[report.model].Add();
  if (report.problem != nullptr && IsAttention(report.model)) CountVariants(*report.problem);
  if (routing.declined != nullptr && routing.backend != nullptr) {
    const FallbackReason reason = routing.declined_for_now ? kNotNow : kUnsupported;
    fallbacks_[IndexOf(routing.declined)][IndexOf(routing.backend)][reason].Add();
  }
  if (routing.piece_fallback != nullptr) {
    fallbacks_[IndexOf(routing.backend)][IndexOf(routing.piece_fallback)][kStandIn].Add();
  }
}

void Metrics::CountStages(const CallReport& report) {
  for (size_t stage = 0; stage < kStages; ++stage) {
    const std::chrono::nanoseconds time = report.stage_times[stage];
    if (time != CallReport::kNever) stage_durations_[stage].Observe(time.count());
  }
  if (report.status.ok()) return;
  const auto ended_in = static_cast<size_t>(report.ended_in);
  if (absl::IsCancelled(report.status)) cancelled_[ended_in].Add();
  if (absl::IsDeadlineExceeded(report.status)) deadline_exceeded_[ended_in].Add();
  rejected_[static_cast<size_t>(RejectionOf(report.status))].Add();
}

void Metrics::CountVariants(const Problem& problem) {
  for (size_t n = 0; n < variants_.size(); ++n) {
    if (Variants()[n].used(problem)) variants_[n].Add();
  }
}

void Metrics::AddGauge(const std::string& name, const std::string& help, Labels labels,
                       std::function<double()> read) {
  Add(MetricType::Gauge, name, help, std::move(labels), std::move(read));
}

void Metrics::AddCounter(const std::string& name, const std::string& help, Labels labels,
                         std::function<double()> read) {
  Add(MetricType::Counter, name, help, std::move(labels), std::move(read));
}

void Metrics::Add(MetricType type, const std::string& name, const std::string& help, Labels labels,
                  std::function<double()> read) {
  MutexLock lock(exported_mutex_);
  auto family = std::find_if(exported_.begin(), exported_.end(),
                             [&name](const ExportedFamily& f) { return f.name == name; });
  if (family == exported_.end()) family = exported_.insert(family, {name, help, type, {}});
  family->series.push_back({std::move(labels), std::move(read)});
}

// An idle server has one series a method, so that the page stays small. Rates of errors need every
// code before it occurs, but not for each method.
void Metrics::CollectMethods(Families& families) const {
  families.push_back(CountersOf(
      "rapt_finished_calls_total", "Finished calls of all methods, by status code.", "code", codes_,
      [](size_t code) { return absl::StatusCodeToString(static_cast<absl::StatusCode>(code)); }));

  MetricFamily calls = Family(MetricType::Counter, "rapt_requests_total",
                              "Finished calls by method, backend, tensor type and status code.");
  MetricFamily durations = Family(MetricType::Histogram, "rapt_request_duration_seconds",
                                  "Time from a call's arrival until its response is sent.");
  for (const Method& method : methods_) {
    for (size_t backend = 0; backend < kBackendLabels; ++backend) {
      for (size_t type = 0; type < kTypeLabels; ++type) {
        for (size_t code = 0; code < kCodes; ++code) {
          const bool is_first = backend == 0 && type == 0 && code == 0;
          const int64_t count = method.calls[backend][type][code].value();
          if (count == 0 && !is_first) continue;
          calls.metric.push_back(
              CounterOf({{"method", method.name},
                         {"backend", BackendLabel(backend)},
                         {"dtype", std::string(kTypeNames[type])},
                         {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}},
                        static_cast<double>(count)));
        }
      }
    }
    ClientMetric duration = HistogramOf({{"method", method.name}}, method.duration);
    if (duration.histogram.sample_count > 0) durations.metric.push_back(std::move(duration));
  }
  families.push_back(std::move(calls));
  families.push_back(std::move(durations));
}

void Metrics::CollectStages(Families& families) const {
  MetricFamily stages = Family(MetricType::Histogram, "rapt_stage_duration_seconds",
                               "Time that calls spent in each stage that they reached.");
  for (size_t stage = 0; stage < kStages; ++stage) {
    stages.metric.push_back(
        HistogramOf({{"stage", std::string(kStageNames[stage])}}, stage_durations_[stage]));
  }
  families.push_back(std::move(stages));

  const auto stage_name = [](size_t stage) { return kStageNames[stage]; };
  families.push_back(CountersOf("rapt_cancelled_total", "Calls cancelled by the caller.", "phase",
                                cancelled_, stage_name));
  families.push_back(CountersOf("rapt_deadline_exceeded_total", "Calls whose deadline passed.",
                                "phase", deadline_exceeded_, stage_name));
}

void Metrics::CollectRefusals(Families& families) const {
  MetricFamily rejected =
      CountersOf("rapt_rejected_total", "Valid calls that the server rejected, by reason.",
                 "reason", rejected_, [](size_t i) { return NameOf(static_cast<Rejection>(i)); });
  rejected.metric.erase(rejected.metric.begin());  // kNone: other failures
  families.push_back(std::move(rejected));

  MetricFamily fallbacks = Family(MetricType::Counter, "rapt_backend_fallback_total",
                                  "Calls that a preferred backend could not compute.");
  for (size_t from = 0; from < backends_.size(); ++from) {
    for (size_t to = from + 1; to < backends_.size(); ++to) {
      for (const FallbackReason reason : {kUnsupported, kNotNow, kStandIn}) {
        const Counter& counter = fallbacks_[from][to][reason];
        fallbacks.metric.push_back(CounterOf({{"from", BackendLabel(from + 1)},
                                              {"to", BackendLabel(to + 1)},
                                              {"reason", kFallbackReasonNames[reason]}},
                                             static_cast<double>(counter.value())));
      }
    }
  }
  families.push_back(std::move(fallbacks));
}

void Metrics::CollectWork(Families& families) const {
  MetricFamily batch =
      Family(MetricType::Histogram, "rapt_batch_size", "Size of the batch axis of the requests.");
  batch.metric.push_back(HistogramOf({}, batch_size_));
  families.push_back(std::move(batch));

  MetricFamily run = Family(MetricType::Histogram, "rapt_run_requests",
                            "For each request, the number of requests computed by the same run.");
  run.metric.push_back(HistogramOf({}, run_requests_));
  families.push_back(std::move(run));

  MetricFamily models = Family(MetricType::Counter, "rapt_model_requests_total",
                               "Valid requests, by the model of the Open Inference Protocol.");
  models_.ForEach([&models](absl::string_view name, const Counter& requests) {
    models.metric.push_back(
        CounterOf({{"model", std::string(name)}}, static_cast<double>(requests.value())));
  });
  families.push_back(std::move(models));

  families.push_back(CountersOf("rapt_variant_requests_total",
                                "Valid attention requests that use each variant.", "variant",
                                variants_, [](size_t i) { return Variants()[i].name; }));

  MetricFamily payload = Family(MetricType::Counter, "rapt_payload_bytes_total",
                                "Bytes of messages that carry tensors.");
  payload.metric.push_back(
      CounterOf({{"direction", "received"}}, static_cast<double>(received_bytes_.value())));
  payload.metric.push_back(
      CounterOf({{"direction", "sent"}}, static_cast<double>(sent_bytes_.value())));
  families.push_back(std::move(payload));

  MetricFamily flops = Family(MetricType::Counter, "rapt_flops_total",
                              "Floating-point operations of computed plans.");
  flops.metric.push_back(CounterOf({}, flops_.value()));
  families.push_back(std::move(flops));
}

void Metrics::CollectExported(Families& families) const {
  MutexLock lock(exported_mutex_);
  for (const ExportedFamily& exported : exported_) {
    MetricFamily family = Family(exported.type, exported.name, exported.help);
    for (const Series& series : exported.series) {
      ClientMetric metric = WithLabels(series.labels);
      (exported.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) =
          series.read();
      family.metric.push_back(std::move(metric));
    }
    families.push_back(std::move(family));
  }
}

std::string Metrics::Serialize() const {
  Families families;
  CollectMethods(families);
  CollectStages(families);
  CollectRefusals(families);
  CollectWork(families);
  CollectExported(families);
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace rapt
