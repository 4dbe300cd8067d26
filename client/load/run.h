// Runs one load on one server and measures it.
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
#include "client/load/arrivals.h"
#include "client/load/recorder.h"
#include "client/load/requests.h"
#include "client/load/wire.h"
#include "client/load/workload.h"

namespace rapt::load {

struct Load {
  Interface interface;
  // Open loop: calls are due at these times and wait if every stream is busy. Absent: closed loop,
  // each stream sends its next call when the previous one is done.
  std::optional<Arrivals> arrivals;
  // The shape of each arrival. Empty: at random, by weight.
  std::vector<size_t> shape_of;

  int streams = 1;  // maximum calls in flight, spread evenly over the connections
  int threads = 1;  // for receiving and, in a closed loop, sending
  // Closed loop: number of streams that send together, once all of them have their responses.
  // Divides `streams`.
  int group = 1;

  std::chrono::nanoseconds warmup{0};    // not measured
  std::chrono::nanoseconds duration{0};  // measured, minimum
  int64_t min_requests = 0;              // measured, minimum
  std::chrono::nanoseconds deadline{0};  // of each call, from when it is due
  std::chrono::nanoseconds interval{0};  // length of an interval
  std::optional<std::chrono::nanoseconds> slo;
  uint64_t seed = 0;
};

// Statistics of one interval of the measured time.
struct TimedInterval {
  std::chrono::nanoseconds begin{0};  // since the end of the warm-up
  std::chrono::nanoseconds length{0};
  int64_t due = 0;    // calls that became due, open loop
  int in_flight = 0;  // at the end
  Interval calls = {};
};

// The load on the load tester itself.
struct TesterLoad {
  double cpu_seconds = 0;     // of the process, in the measured time
  double busiest_thread = 0;  // CPU share of the busiest thread
  // Late sends that waited for a free stream, or behind such a send. The load tester caused the
  // others.
  int64_t held_up = 0;
};

struct Run {
  std::chrono::nanoseconds measured{0};  // duration
  Totals totals;                         // of calls due in the measured time
  std::vector<TimedInterval> intervals;
  TimedInterval after;  // from the end of the measured time to the last response
  Histogram groups;     // latency of groups, until the last response
  int64_t due = 0;      // open loop: calls that became due
  int64_t dropped = 0;  // calls not sent: no stream was free before their deadline
  TesterLoad tester;
  int64_t checked = 0;              // responses compared with the definition
  std::vector<absl::Status> wrong;  // for each response that differs
};

// Blocks until the load is over and no call is in flight. `observe` gets every interval, including
// those of the warm-up, whose `begin` is negative. Ends early, with partial results, when `stop` is
// set. Returns the errors of Workload::NewSource() and CallSource::Prepare(). What the calls hold
// at the server is released in any case.
absl::StatusOr<Run> RunLoad(const Load& load, Workload& workload, Wire& wire,
                            absl::FunctionRef<void(const TimedInterval&)> observe,
                            const std::atomic<bool>& stop);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RUN_H_
