#ifndef RAPT_SERVER_CALLS_STREAM_COUNTS_H_
#define RAPT_SERVER_CALLS_STREAM_COUNTS_H_

#include <atomic>
#include <cstdint>

namespace rapt {

// Calls of several messages, counted while they run: one may last for hours. Thread-safe.
struct StreamCounts {
  std::atomic<int64_t> open{0};    // streams now
  std::atomic<int64_t> chunks{0};  // of keys and values or of queries, received since the start
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_STREAM_COUNTS_H_
