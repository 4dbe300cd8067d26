#include "server/protocols/oip/statistics.h"

#include <algorithm>
#include <cmath>

#include "base/clock.h"

namespace rapt::oip {

void Statistics::Count(const CallReport& report) {
  const auto now = std::chrono::system_clock::now();  // base/clock.h has no wall-clock time
  MutexLock lock(mutex_);
  if (!report.status.ok()) return fail_.Add(report.total);
  success_.Add(report.total);
  executions_ += 1.0 / static_cast<double>(std::max<int64_t>(report.batch_size, 1));
  queue_.Add(report.time_of(Stage::kQueue));
  input_.Add(report.time_of(Stage::kReceive));
  infer_.Add(report.time_of(Stage::kCompute));
  output_.Add(report.time_of(Stage::kSend));
  last_inference_ = now;
}

void Statistics::Write(const Sum& sum, inference::StatisticDuration& message) {
  message.set_count(sum.count);
  message.set_ns(static_cast<uint64_t>(sum.time.count()));
}

void Statistics::Describe(inference::ModelStatistics& message) const {
  MutexLock lock(mutex_);
  const auto last = last_inference_.time_since_epoch();
  message.set_last_inference(static_cast<uint64_t>(Milliseconds(last)));
  message.set_inference_count(success_.count);
  message.set_execution_count(static_cast<uint64_t>(std::llround(executions_)));
  inference::InferStatistics& stats = *message.mutable_inference_stats();
  Write(success_, *stats.mutable_success());
  Write(fail_, *stats.mutable_fail());
  Write(queue_, *stats.mutable_queue());
  Write(input_, *stats.mutable_compute_input());
  Write(infer_, *stats.mutable_compute_infer());
  Write(output_, *stats.mutable_compute_output());
  stats.mutable_cache_hit();
  stats.mutable_cache_miss();
  if (success_.count == 0) return;
  // The batch is an axis of the tensors, so a request counts as a batch of one.
  inference::InferBatchStatistics& batch = *message.add_batch_stats();
  batch.set_batch_size(1);
  Write(input_, *batch.mutable_compute_input());
  Write(infer_, *batch.mutable_compute_infer());
  Write(output_, *batch.mutable_compute_output());
}

}  // namespace rapt::oip
