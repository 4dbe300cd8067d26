#ifndef RAPT_SERVER_CALLS_STREAM_COUNTS_H_
#define RAPT_SERVER_CALLS_STREAM_COUNTS_H_

#include <atomic>
#include <cstdint>

namespace rapt {

// Counts of streaming calls, updated while they run, because one may last for hours. Thread-safe.
struct StreamCounts {
  std::atomic<int64_t> open{0};    // open streams
  std::atomic<int64_t> chunks{0};  // chunks received since startup
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_STREAM_COUNTS_H_
