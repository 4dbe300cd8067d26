#ifndef RAPT_SERVER_METRICS_PROCESS_H_
#define RAPT_SERVER_METRICS_PROCESS_H_

#include <cstdint>

#include "base/metric_sink.h"

namespace rapt {

// The state of this process from /proc; 0 for values that cannot be read.
struct ProcessState {
  double cpu_seconds = 0;
  double start_time_seconds = 0;  // since the epoch
  int64_t resident_bytes = 0;
  int64_t virtual_bytes = 0;
  int64_t threads = 0;
  int64_t open_fds = 0;
  int64_t max_fds = 0;
};

ProcessState ReadProcessState();

// Exports process_*, named as in Prometheus' client libraries.
void ExportProcess(MetricSink& sink);

}  // namespace rapt

#endif  // RAPT_SERVER_METRICS_PROCESS_H_
