#ifndef RAPT_SERVER_QUEUE_STATE_H_
#define RAPT_SERVER_QUEUE_STATE_H_

#include <chrono>
#include <cstdint>

namespace rapt {

// The current state of a queue.
struct QueueState {
  int64_t depth = 0;
  std::chrono::nanoseconds oldest_age{0};  // 0 if the queue is empty
};

}  // namespace rapt

#endif  // RAPT_SERVER_QUEUE_STATE_H_
