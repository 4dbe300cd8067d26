#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "base/clock.h"
#include "server/protocols/oip/json_codec.h"

namespace rapt::oip {
namespace {

constexpr int64_t kMaxJsonBytes = int64_t{1} << 30;

std::string Json(int64_t numbers) {
  std::string data;
  for (int64_t n = 0; n < numbers; ++n) absl::StrAppend(&data, n > 0 ? "," : "", 0.123456789 * n);
  return absl::StrCat(R"({"inputs":[{"name":"Q","datatype":"FP32","shape":[1,1,1,)", numbers,
                      R"(],"data":[)", data, "]}]}");
}

void ReadNumbers(benchmark::State& state) {
  const SteadyClock clock;
  BufferPool pool(kMaxJsonBytes, clock);
  const std::string json = Json(state.range(0));
  const auto size = static_cast<int64_t>(json.size());
  const ByteSlice slice = {reinterpret_cast<const std::byte*>(json.data()), 0, size};
  for (auto iteration : state) {
    if (!ReadJsonInfer({{{&slice, 1}, 0}, size}, size, kMaxJsonBytes, pool).ok()) {
      return state.SkipWithError("not read");
    }
  }
  state.SetBytesProcessed(state.iterations() * size);
}
BENCHMARK(ReadNumbers)->Name("oip_json_codec/read_numbers")->Arg(1)->Arg(1 << 16);

}  // namespace
}  // namespace rapt::oip
