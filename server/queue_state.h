#ifndef RAPT_SERVER_QUEUE_STATE_H_
#define RAPT_SERVER_QUEUE_STATE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/metric_sink.h"

namespace rapt {

// The current state of a queue.
struct QueueState {
  int64_t depth = 0;
  std::chrono::nanoseconds oldest_age{0};  // 0 if the queue is empty
};

// Exports depth and age with the label queue=`name`.
void ExportQueue(const std::string& name, const std::function<QueueState()>& read,
                 MetricSink& sink);

}  // namespace rapt

#endif  // RAPT_SERVER_QUEUE_STATE_H_
