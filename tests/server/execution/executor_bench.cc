#include <benchmark/benchmark.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/blocking_counter.h"
#include "base/clock.h"
#include "server/execution/executor.h"
#include "server/execution/job.h"

namespace rapt {
namespace {

constexpr int kThreads = 2;

// A job of `tasks` tasks without work.
Job EmptyJob(int64_t tasks, absl::AnyInvocable<void(const JobReport&)> done) {
  Job job;
  job.stages = {tasks};
  job.run_task = [](int, int64_t, int, const Checkpoint&) {};
  job.done = std::move(done);
  return job;
}

// From Submit() to `done`, of `jobs` jobs at a time.
void Submit(benchmark::State& state) {
  const SteadyClock clock;
  Executor executor(kThreads, clock);
  const auto jobs = static_cast<int>(state.range(0));
  for (auto iteration : state) {
    absl::BlockingCounter pending(jobs);
    for (int n = 0; n < jobs; ++n) {
      executor.Submit(
          EmptyJob(state.range(1), [&pending](const JobReport&) { pending.DecrementCount(); }));
    }
    pending.Wait();
  }
  state.SetItemsProcessed(state.iterations() * jobs);
}
BENCHMARK(Submit)
    ->Name("executor/jobs,tasks")
    ->Args({1, 1})
    ->Args({64, 1})
    ->Args({1, 1024})
    ->UseRealTime();

// A job on the calling thread, as those of tiny problems.
void RunInline(benchmark::State& state) {
  const SteadyClock clock;
  Executor executor(kThreads, clock);
  for (auto iteration : state) executor.RunInline(EmptyJob(1, [](const JobReport&) {}));
}
BENCHMARK(RunInline)->Name("executor/inline");

}  // namespace
}  // namespace rapt
