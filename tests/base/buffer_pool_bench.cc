#include <benchmark/benchmark.h>

#include <cstdint>

#include "base/buffer_pool.h"
#include "base/clock.h"

namespace rapt {
namespace {

// Takes a buffer that an earlier one of its class left idle, and gives it back.
void TakeAndGiveBack(benchmark::State& state) {
  static const SteadyClock clock;
  static BufferPool pool(int64_t{1} << 30, clock);
  for (auto iteration : state) benchmark::DoNotOptimize(pool.Take(state.range(0)).data());
}
BENCHMARK(TakeAndGiveBack)->Name("buffer_pool/heap")->Arg(4096);
BENCHMARK(TakeAndGiveBack)->Name("buffer_pool/mapped")->Arg(1 << 20)->ThreadRange(1, 4);

}  // namespace
}  // namespace rapt
