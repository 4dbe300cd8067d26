#include "server/queue_state.h"

namespace rapt {

void ExportQueue(const std::string& name, const std::function<QueueState()>& read,
                 MetricSink& sink) {
  sink.AddGauge("rapt_queue_depth", "Requests waiting for memory, a compute thread or a GPU lane.",
                {{"queue", name}}, [read] { return read().depth; });
  sink.AddGauge("rapt_queue_oldest_age_seconds", "Age of the oldest waiting request.",
                {{"queue", name}},
                [read] { return std::chrono::duration<double>(read().oldest_age).count(); });
}

}  // namespace rapt
