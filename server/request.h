// What passes between the protocols and the engine. Knows neither of them.
#ifndef RAPT_SERVER_REQUEST_H_
#define RAPT_SERVER_REQUEST_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/attention/operator.h"
#include "server/base/clock.h"

namespace rapt {

// Row-major bytes of the tensors as the caller laid them out, each of the size that the call
// states; of any alignment. Null where the call has no such tensor.
struct Inputs {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  const std::byte* mask = nullptr;
  const std::byte* past_key = nullptr;
  const std::byte* past_value = nullptr;
  std::vector<int64_t> key_lengths;  // nonpad_kv_seqlen, copied: it has to be aligned
};

// One attention call, checked as far as its shapes go.
struct Request {
  ResolvedCall call;
  Inputs inputs;
  // Keeps the inputs' bytes alive until done has run. Null where the caller sees to that itself.
  std::shared_ptr<const void> owner;

  Instant deadline = Instant::max();
  // Set by the caller at any time to give the request up; outlives done. Null: never.
  const std::atomic<bool>* cancelled = nullptr;
  // 0: the default; 1 is the most urgent.
  uint64_t priority = 0;
};

// Memory for an input that has to be converted before it can be read. Copies share it; the memory
// and its place in the budget are given back with the last one.
struct InputBuffer {
  absl::Span<std::byte> bytes;
  std::shared_ptr<const void> owner;
};

// An output's bytes, row-major, aligned to a cache line. Copies share them; the memory and its
// place in the budget are given back with the last one.
struct OutputBuffer {
  absl::Span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

struct Result {
  absl::Status status;

  // Empty unless the status is OK and the call wants them; Y is always there.
  OutputBuffer y, lse, scores, present_key, present_value;

  std::string backend;                       // "cpu"; empty where it never came to a plan
  std::string plan;                          // Plan::Describe()
  std::chrono::nanoseconds queue_time{0};    // from admission to the first task
  std::chrono::nanoseconds compute_time{0};  // from the first task to the last
};

// Runs exactly once for each request, on any thread.
using Done = absl::AnyInvocable<void(Result)>;

}  // namespace rapt

#endif  // RAPT_SERVER_REQUEST_H_
