// The Open Inference Protocol over HTTP: the paths below /v2.
#ifndef RAPT_SERVER_WIRE_OIP_REST_METHODS_H_
#define RAPT_SERVER_WIRE_OIP_REST_METHODS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer_pool.h"
#include "base/clock.h"
#include "server/calls/call_observer.h"
#include "server/wire/event_loop.h"
#include "server/wire/http/router.h"
#include "server/wire/oip/methods.h"

namespace rapt::oip {

// Threads that read and write large JSON, which would delay the network. Thread-safe.
class JsonThreads {
 public:
  JsonThreads(int threads, const Clock& clock);

  // Runs the task on one of the threads, on each in turn.
  void Post(EventLoop::Task task) { loops_[next_++ % loops_.size()]->Post(std::move(task)); }

 private:
  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::atomic<size_t> next_{0};
};

// What inference in JSON needs. Outlives its calls.
struct JsonInference {
  const Methods& methods;
  BufferPool& pool;
  JsonThreads& threads;
  int64_t max_json_bytes;
};

// Adds the paths below /v2, with the fields of Triton's HTTP interface. They are counted as calls
// of "v2/ModelInfer" and so on. REQUIRES: everything borrowed outlives the router.
void AddRestMethods(const JsonInference& inference, const CallObserverFactory& observe,
                    http::Router& router);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_REST_METHODS_H_
