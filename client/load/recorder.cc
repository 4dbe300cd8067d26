#include "client/load/recorder.h"

#include <utility>

namespace rapt::load {

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
    ours.latency.Add(theirs.latency);
  }
  within_slo += other.within_slo;
  request_bytes += other.request_bytes;
  answer_bytes += other.answer_bytes;
  late_sends += other.late_sends;
}

int64_t Totals::failed() const {
  int64_t sum = 0;
  for (const auto& [code, failed] : failures) sum += failed.count;
  return sum;
}

void Stretch::Add(const Stretch& other) {
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

void Recorder::Record(const Outcome& outcome) {
  const std::chrono::nanoseconds latency = outcome.done - outcome.due;
  const std::chrono::nanoseconds service = outcome.done - outcome.sent;
  const bool in_time = outcome.status.ok() && (!slo_ || latency <= *slo_);
  MutexLock lock(mutex_);
  ++(outcome.status.ok() ? stretch_.ok : stretch_.failed);
  if (in_time) ++stretch_.within_slo;
  if (outcome.status.ok()) {
    stretch_.latency.Record(latency.count());
    stretch_.service.Record(service.count());
    stretch_.bytes += outcome.request_bytes + outcome.answer_bytes;
  }
  if (outcome.due < warmup_) return;

  if (outcome.sent - outcome.due > kLate) ++totals_.late_sends;
  if (!outcome.status.ok()) {
    Failures& failures = totals_.failures[outcome.status.code()];
    if (failures.count++ == 0) failures.example = std::string(outcome.status.message());
    failures.latency.Record(latency.count());
    return;
  }
  if (in_time) ++totals_.within_slo;
  totals_.latency.Record(latency.count());
  totals_.service.Record(service.count());
  totals_.shapes[outcome.shape].Record(latency.count());
  totals_.request_bytes += outcome.request_bytes;
  totals_.answer_bytes += outcome.answer_bytes;
  if (!outcome.server) return;
  const auto nanoseconds = [](std::chrono::microseconds time) {
    return std::chrono::nanoseconds(time).count();
  };
  totals_.queue.Record(nanoseconds(outcome.server->queue));
  totals_.compute.Record(nanoseconds(outcome.server->compute));
  totals_.server.Record(nanoseconds(outcome.server->total));
  totals_.between.Record(service.count() - nanoseconds(outcome.server->total));
}

Stretch Recorder::TakeStretch() {
  MutexLock lock(mutex_);
  return std::exchange(stretch_, Stretch());
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
