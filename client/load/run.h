// One load on one server: sends, measures, counts.
#ifndef RAPT_CLIENT_LOAD_RUN_H_
#define RAPT_CLIENT_LOAD_RUN_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/load/arrivals.h"
#include "client/load/call_data.h"
#include "client/load/recorder.h"
#include "client/load/requests.h"

namespace rapt::load {

struct Load {
  Interface interface;
  // Open loop: calls are due when these say, and wait where every stream is busy. Absent: closed
  // loop, every stream sends when its last call is done.
  std::optional<Arrivals> arrivals;
  // Which shape each arrival has; empty: by weight, at random.
  std::vector<size_t> shape_of;

  int streams = 1;  // calls in flight at most, spread evenly over the connections
  int threads = 1;  // that take answers, and in a closed loop send
  // Closed loop: so many streams send together, when the answers of all of them have come. Divides
  // `streams`.
  int group = 1;

  std::chrono::nanoseconds warmup{0};    // not measured
  std::chrono::nanoseconds duration{0};  // measured, at least
  int64_t min_requests = 0;              // measured, at least
  std::chrono::nanoseconds deadline{0};  // of every call, from when it is due
  std::chrono::nanoseconds stretch{0};   // how often to look
  std::optional<std::chrono::nanoseconds> slo;
  uint64_t seed = 0;
};

// A stretch of the measured time.
struct TimedStretch {
  std::chrono::nanoseconds begin{0};  // from the end of the warm-up
  std::chrono::nanoseconds length{0};
  int64_t due = 0;    // calls that became due, open loop
  int in_flight = 0;  // at its end
  Stretch calls = {};
};

// What it was like for the load tester.
struct TesterLoad {
  double cpu_seconds = 0;     // of the whole process in the measured time
  double busiest_thread = 0;  // the share of that time that the busiest of our threads computed
  // Late sends that had to wait for a stream, or behind such. The other late ones are our fault.
  int64_t held_up = 0;
};

struct Run {
  std::chrono::nanoseconds measured{0};  // how long
  Totals totals;                         // of calls due in that time
  std::vector<TimedStretch> stretches;
  Histogram groups;     // of groups of more than one, until the last answer
  int64_t due = 0;      // open loop: calls that became due
  int64_t dropped = 0;  // of them, not sent: no stream was free before their deadline
  TesterLoad tester;
  int64_t checked = 0;              // answers compared with the definition
  std::vector<absl::Status> wrong;  // those that differ, and how
};

// Blocks until the load is over and the answers of the calls in flight have come. `observe` sees
// every stretch, warm-up included, where `begin` is below 0. Ends early, with what there is, once
// `stop` is set. Errors are those of Encode().
absl::StatusOr<Run> RunLoad(const Load& load, const std::vector<CallData>& calls,
                            client::Connections& connections,
                            absl::FunctionRef<void(const TimedStretch&)> observe,
                            const std::atomic<bool>& stop);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RUN_H_
