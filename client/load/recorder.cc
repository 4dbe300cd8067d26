#include "client/load/recorder.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "rapt/cache.h"

namespace rapt::load {
namespace {

std::string WithoutNumbers(const std::string& message) {
  std::string cause;
  for (const char c : message) {
    if (!absl::ascii_isdigit(c)) {
      cause += c;
    } else if (cause.empty() || cause.back() != '#') {
      cause += '#';
    }
  }
  return cause;
}

void AddCause(const std::string& cause, int64_t count, std::map<std::string, int64_t>& causes) {
  const bool is_new = !causes.contains(cause);
  causes[is_new && causes.size() >= Failures::kMaxCauses ? Failures::kOtherCauses : cause] += count;
}

}  // namespace

std::optional<ServerTimes> ReadServerTimes(
    absl::FunctionRef<absl::string_view(const char* name)> value_of) {
  const auto read = [&](const char* name) -> std::optional<std::chrono::microseconds> {
    int64_t us = 0;
    if (!absl::SimpleAtoi(value_of(name), &us) || us < 0) return std::nullopt;
    return std::chrono::microseconds(us);
  };
  const auto total = read("rapt-total-us");
  if (!total) return std::nullopt;
  const std::chrono::microseconds none{0};
  return ServerTimes{read("rapt-queue-us").value_or(none), read("rapt-compute-us").value_or(none),
                     *total};
}

void Failures::Add(const absl::Status& status) {
  const std::string message(status.message());
  if (count++ == 0) example = message;
  const std::string reason = client::ReasonOf(status);
  AddCause(reason.empty() ? WithoutNumbers(message) : reason, 1, causes);
}

void Totals::Add(const Totals& other) {
  latency.Add(other.latency);
  service.Add(other.service);
  queue.Add(other.queue);
  compute.Add(other.compute);
  server.Add(other.server);
  between.Add(other.between);
  if (shapes.size() < other.shapes.size()) shapes.resize(other.shapes.size());
  for (size_t i = 0; i < other.shapes.size(); ++i) shapes[i].Add(other.shapes[i]);
  for (const auto& [code, theirs] : other.failures) {
    Failures& ours = failures[code];
    if (ours.count == 0) ours.example = theirs.example;
    ours.count += theirs.count;
    for (const auto& [cause, count] : theirs.causes) AddCause(cause, count, ours.causes);
    ours.latency.Add(theirs.latency);
  }
  within_slo += other.within_slo;
  request_bytes += other.request_bytes;
  response_bytes += other.response_bytes;
  late_sends += other.late_sends;
}

int64_t Totals::failed() const {
  int64_t sum = 0;
  for (const auto& [code, failed] : failures) sum += failed.count;
  return sum;
}

void Interval::Add(const Interval& other) {
  latency.Add(other.latency);
  service.Add(other.service);
  ok += other.ok;
  failed += other.failed;
  within_slo += other.within_slo;
  bytes += other.bytes;
}

Recorder::Recorder(size_t shapes, std::chrono::nanoseconds warmup,
                   std::optional<std::chrono::nanoseconds> slo)
    : warmup_(warmup), slo_(slo) {
  totals_.shapes.resize(shapes);
}

void Recorder::Record(const CallRecord& call) {
  const std::chrono::nanoseconds latency = call.done - call.due;
  const std::chrono::nanoseconds service = call.done - call.sent;
  const bool in_time = call.status.ok() && (!slo_ || latency <= *slo_);
  MutexLock lock(mutex_);
  ++(call.status.ok() ? interval_.ok : interval_.failed);
  if (in_time) ++interval_.within_slo;
  if (call.status.ok()) {
    interval_.latency.Record(latency.count());
    interval_.service.Record(service.count());
    interval_.bytes += call.request_bytes + call.response_bytes;
  }
  if (call.due < warmup_) return;

  if (call.sent - call.due > kLate) ++totals_.late_sends;
  if (!call.status.ok()) {
    Failures& failures = totals_.failures[call.status.code()];
    failures.Add(call.status);
    failures.latency.Record(latency.count());
    return;
  }
  if (in_time) ++totals_.within_slo;
  totals_.latency.Record(latency.count());
  totals_.service.Record(service.count());
  totals_.shapes[call.shape].Record(latency.count());
  totals_.request_bytes += call.request_bytes;
  totals_.response_bytes += call.response_bytes;
  if (!call.server) return;
  const auto nanoseconds = [](std::chrono::microseconds time) {
    return std::chrono::nanoseconds(time).count();
  };
  totals_.queue.Record(nanoseconds(call.server->queue));
  totals_.compute.Record(nanoseconds(call.server->compute));
  totals_.server.Record(nanoseconds(call.server->total));
  totals_.between.Record(service.count() - nanoseconds(call.server->total));
}

Interval Recorder::TakeInterval() {
  MutexLock lock(mutex_);
  return std::exchange(interval_, Interval());
}

int64_t Recorder::finished() const {
  MutexLock lock(mutex_);
  return totals_.finished();
}

Totals Recorder::totals() const {
  MutexLock lock(mutex_);
  return totals_;
}

}  // namespace rapt::load
