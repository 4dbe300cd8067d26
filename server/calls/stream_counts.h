#ifndef RAPT_SERVER_CALLS_STREAM_COUNTS_H_
#define RAPT_SERVER_CALLS_STREAM_COUNTS_H_

#include <atomic>
#include <cstdint>

#include "base/metric_sink.h"

namespace rapt {

// Counts of streaming calls, updated while they run, because one may last for hours. Thread-safe.
struct StreamCounts {
  std::atomic<int64_t> open{0};    // open streams
  std::atomic<int64_t> chunks{0};  // chunks received since startup

  void ExportTo(MetricSink& sink) const {
    sink.AddGauge("rapt_open_streams", "Streaming calls in flight.", {},
                  [this] { return open.load(); });
    sink.AddCounter("rapt_chunks_total", "Chunks received by streaming calls.", {},
                    [this] { return chunks.load(); });
  }
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_STREAM_COUNTS_H_
