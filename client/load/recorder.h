// What became of the calls of a load.
#ifndef RAPT_CLIENT_LOAD_RECORDER_H_
#define RAPT_CLIENT_LOAD_RECORDER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "client/load/histogram.h"

namespace rapt::load {

// Where the server's time went, as its trailing metadata says.
struct ServerTimes {
  std::chrono::microseconds queue{0};
  std::chrono::microseconds compute{0};
  std::chrono::microseconds total{0};
};

// One call. Times are from the start of the load.
struct Outcome {
  size_t shape = 0;
  std::chrono::nanoseconds due{0};   // when it should have been sent
  std::chrono::nanoseconds sent{0};  // when it was
  std::chrono::nanoseconds done{0};
  absl::Status status = {};
  int64_t request_bytes = 0;
  int64_t answer_bytes = 0;
  std::optional<ServerTimes> server = {};
};

// Calls that failed with one code.
struct Failures {
  int64_t count = 0;
  std::string example;  // the first one's message
  Histogram latency;
};

// What calls add up to. In nanoseconds, of calls that succeeded, where nothing else is said.
struct Totals {
  Histogram latency;              // from when a call was due
  Histogram service;              // from when it was sent
  Histogram queue, compute;       // at the server
  Histogram server;               // from its first byte at the server to its answer's
  Histogram between;              // service time that the server does not know of
  std::vector<Histogram> shapes;  // latency by shape
  std::map<absl::StatusCode, Failures> failures;
  int64_t within_slo = 0;  // as Recorder was told
  int64_t request_bytes = 0;
  int64_t answer_bytes = 0;
  int64_t late_sends = 0;  // more than kLate after they were due

  void Add(const Totals& other);
  int64_t failed() const;
  int64_t finished() const { return latency.count() + failed(); }
};

// A send that is later than this has been held up: by the operating system's clock it is not.
inline constexpr std::chrono::milliseconds kLate{1};

// A stretch of the load, of calls that ended in it.
struct Stretch {
  Histogram latency;
  Histogram service;
  int64_t ok = 0;
  int64_t failed = 0;
  int64_t within_slo = 0;
  int64_t bytes = 0;  // both ways

  void Add(const Stretch& other);
};

// Thread-safe. Calls that were due before `warmup` count for stretches alone.
class Recorder {
 public:
  Recorder(size_t shapes, std::chrono::nanoseconds warmup,
           std::optional<std::chrono::nanoseconds> slo);

  void Record(const Outcome& outcome);

  // Of what came since the last time.
  Stretch TakeStretch();
  int64_t finished() const;
  Totals totals() const;

 private:
  const std::chrono::nanoseconds warmup_;
  const std::optional<std::chrono::nanoseconds> slo_;
  mutable Mutex mutex_;
  Totals totals_ ABSL_GUARDED_BY(mutex_);
  Stretch stretch_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RECORDER_H_
