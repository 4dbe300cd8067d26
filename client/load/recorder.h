// Statistics of the calls of a load.
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
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "client/load/histogram.h"

namespace rapt::load {

// Times at the server, from its trailing metadata.
struct ServerTimes {
  std::chrono::microseconds queue{0};
  std::chrono::microseconds compute{0};
  std::chrono::microseconds total{0};
};

// Reads them. `value_of` returns "" for a name that the metadata lacks. Returns nullopt without a
// total.
std::optional<ServerTimes> ReadServerTimes(
    absl::FunctionRef<absl::string_view(const char* name)> value_of);

// The record of one call. Times are since the start of the load.
struct CallRecord {
  size_t shape = 0;
  std::chrono::nanoseconds due{0};   // scheduled time
  std::chrono::nanoseconds sent{0};  // actual time
  std::chrono::nanoseconds done{0};
  absl::Status status = {};
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
  std::optional<ServerTimes> server = {};
};

// Calls that failed with the same code.
struct Failures {
  // Further causes are counted as kOtherCauses.
  static constexpr size_t kMaxCauses = 8;
  static constexpr char kOtherCauses[] = "other messages";

  void Add(const absl::Status& status);

  int64_t count = 0;
  std::string example;  // the first message
  // Calls by the reason that the server gave for an error on a cache ("pages", "quota"), else by
  // message. Numbers in messages are replaced by #, so that those that differ only in addresses and
  // sizes count as one.
  std::map<std::string, int64_t> causes;
  Histogram latency;
};

// Totals over calls. Nanoseconds, of successful calls, unless stated otherwise.
struct Totals {
  Histogram latency;              // since the call was due
  Histogram service;              // since it was sent
  Histogram queue, compute;       // at the server
  Histogram server;               // from the first byte received to the response
  Histogram between;              // service time outside the server
  std::vector<Histogram> shapes;  // latency by shape
  std::map<absl::StatusCode, Failures> failures;
  int64_t within_slo = 0;  // successful calls within the SLO of Recorder
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
  int64_t late_sends = 0;  // sent more than kLate after they were due

  void Add(const Totals& other);
  int64_t failed() const;
  int64_t finished() const { return latency.count() + failed(); }
};

// A send that is later than this was delayed by more than timer inaccuracy.
inline constexpr std::chrono::milliseconds kLate{1};

// Statistics of the calls that finished in one time interval.
struct Interval {
  Histogram latency;
  Histogram service;
  int64_t ok = 0;
  int64_t failed = 0;
  int64_t within_slo = 0;
  int64_t bytes = 0;  // sent and received

  void Add(const Interval& other);
};

// Thread-safe. Calls due before `warmup` count only in intervals, not in totals.
class Recorder {
 public:
  Recorder(size_t shapes, std::chrono::nanoseconds warmup,
           std::optional<std::chrono::nanoseconds> slo);

  void Record(const CallRecord& call);

  // Returns the statistics since the previous call.
  Interval TakeInterval();
  int64_t finished() const;
  Totals totals() const;

 private:
  const std::chrono::nanoseconds warmup_;
  const std::optional<std::chrono::nanoseconds> slo_;
  mutable Mutex mutex_;
  Totals totals_ ABSL_GUARDED_BY(mutex_);
  Interval interval_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RECORDER_H_
