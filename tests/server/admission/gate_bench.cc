#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/synchronization/blocking_counter.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/admission/gate.h"

namespace rapt {
namespace {

struct Fixture {
  SteadyClock clock;
  Timer timer{clock};
  AdmissionGate gate{{.budget_bytes = int64_t{1} << 32,
                      .max_queued = 1024,
                      .max_queue_delay = std::chrono::seconds(10)},
                     timer,
                     clock};
};

// A call that needs not wait reserves its memory and releases it.
void AdmitNow(benchmark::State& state) {
  static Fixture fixture;
  const std::shared_ptr<CallerMemory> caller = fixture.gate.CallerOf("caller");
  const AdmissionGate::MemoryRequest request = {.bytes = state.range(0), .caller = caller};
  for (auto iteration : state) {
    std::optional<AdmissionGate::Result> result = fixture.gate.AdmitNow(request);
    if (!result || !result->ok()) return state.SkipWithError("not admitted");
  }
}
BENCHMARK(AdmitNow)->Name("gate/small")->Arg(4096)->ThreadRange(1, 4);
BENCHMARK(AdmitNow)->Name("gate/large")->Arg(int64_t{1} << 27);

// A call waits until the one before has released its memory, and is served on any thread.
void WaitInQueue(benchmark::State& state) {
  Fixture fixture;
  const int64_t most = int64_t{1} << 30;  // more than half of a share
  for (auto iteration : state) {
    std::optional<AdmissionGate::Result> first = fixture.gate.AdmitNow({.bytes = most});
    if (!first || !first->ok() || fixture.gate.AdmitNow({.bytes = most})) {
      return state.SkipWithError("the second call need not wait");
    }
    absl::BlockingCounter waiting(1);
    fixture.gate.Queue({.bytes = most},
                       [&waiting](const AdmissionGate::Result&) { waiting.DecrementCount(); });
    first.reset();
    fixture.gate.Serve();
    waiting.Wait();
  }
}
BENCHMARK(WaitInQueue)->Name("gate/queue")->UseRealTime();

}  // namespace
}  // namespace rapt
