#ifndef RAPT_SERVER_PROTOCOLS_OIP_STATISTICS_H_
#define RAPT_SERVER_PROTOCOLS_OIP_STATISTICS_H_

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/calls/call_report.h"

namespace rapt::oip {

// The model's statistics, as returned by ModelStatistics. Triton's input, inference and output are
// receiving, computing and sending; an execution is a run. Thread-safe; a reader sees a request
// completely or not at all.
class Statistics {
 public:
  void Count(const CallReport& report);

  // Sets all fields except name and version.
  void Describe(inference::ModelStatistics& message) const;

 private:
  struct Sum {
    uint64_t count = 0;
    std::chrono::nanoseconds time{0};

    void Add(std::chrono::nanoseconds duration) {
      ++count;
      if (duration != CallReport::kNever) time += duration;
    }
  };
  static void Write(const Sum& sum, inference::StatisticDuration& message);

  mutable Mutex mutex_;
  Sum success_ ABSL_GUARDED_BY(mutex_);
  double executions_ ABSL_GUARDED_BY(mutex_) = 0;  // each request adds its fraction of a run
  Sum fail_ ABSL_GUARDED_BY(mutex_);
  Sum input_ ABSL_GUARDED_BY(mutex_);
  Sum queue_ ABSL_GUARDED_BY(mutex_);
  Sum infer_ ABSL_GUARDED_BY(mutex_);
  Sum output_ ABSL_GUARDED_BY(mutex_);
  std::chrono::system_clock::time_point last_inference_ ABSL_GUARDED_BY(mutex_){};
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_STATISTICS_H_
