// Measures how far transfer and computation of a stream's chunks overlap: compares the time of a
// streamed call with the larger of its transfer alone and its computation alone, interleaved in one
// run, medians. Prints Markdown for RESULTS.md.
//
// Transfer alone is the same stream with a window of one key, which takes almost no computation.
// Computation alone is the compute time that the server reports for the same call in one message.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "bench/server_process.h"
#include "rapt/client.h"

namespace rapt::bench {
namespace {

using client::AttendCall;
using client::DType;
using client::Streaming;
using Seconds = std::chrono::duration<double>;

constexpr int64_t kHeads = 16;
constexpr int64_t kLength = 8192;
constexpr int64_t kSize = 128;
constexpr int kRounds = 3;

// Sine waves, as FP32 or as their upper halves (BF16).
std::string Values(DType dtype, float phase) {
  const int64_t count = kHeads * kLength * kSize;
  const auto element = static_cast<size_t>(client::SizeOf(dtype));
  std::string bytes(static_cast<size_t>(count) * element, '\0');
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::sin(phase + 0.1f * static_cast<float>(i % 65521));
    const auto* first = reinterpret_cast<const char*>(&value) + sizeof(value) - element;
    std::memcpy(bytes.data() + static_cast<size_t>(i) * element, first, element);
  }
  return bytes;
}

client::TensorView ViewOf(DType dtype, const std::string& bytes) {
  return {dtype,
          {1, kHeads, kLength, kSize},
          {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}};
}

double TimeOf(client::Client& client, const AttendCall& call, const client::StreamOptions& stream) {
  const auto begin = std::chrono::steady_clock::now();
  const auto result = client.AttendStream(call, stream);
  RAPT_CHECK(result.ok(), std::string(result.status().message()).c_str());
  return Seconds(std::chrono::steady_clock::now() - begin).count();
}

double ComputeTimeOf(client::Client& client, const AttendCall& call) {
  const auto result = client.Attend(call);
  RAPT_CHECK(result.ok(), std::string(result.status().message()).c_str());
  RAPT_CHECK(result->path == client::Path::kMessage, "the call did not use messages");
  return Seconds(result->compute_time).count();
}

void Measure(client::Client& client, DType dtype) {
  const std::string q = Values(dtype, 1), k = Values(dtype, 2), v = Values(dtype, 3);
  const AttendCall call = {.q = ViewOf(dtype, q), .k = ViewOf(dtype, k), .v = ViewOf(dtype, v)};
  AttendCall idle = call;
  idle.window = {.left = 0, .right = 0};
  const Streaming sides[] = {Streaming::kKeys, Streaming::kQueries};
  std::vector<double> compute, transfer[2], streamed[2];
  ComputeTimeOf(client, call);  // touches the buffers that are reused
  for (int round = 0; round < kRounds; ++round) {
    compute.push_back(ComputeTimeOf(client, call));
    for (int side = 0; side < 2; ++side) {
      const client::StreamOptions stream = {.streaming = sides[side]};
      transfer[side].push_back(TimeOf(client, idle, stream));
      streamed[side].push_back(TimeOf(client, call, stream));
    }
  }
  for (int side = 0; side < 2; ++side) {
    const double largest = std::max(Median(transfer[side]), Median(compute));
    std::printf("| %s | %s | %.0f | %.0f | %.0f | %.2f |\n",
                std::string(client::NameOf(dtype)).c_str(), side == 0 ? "keys" : "queries",
                Median(transfer[side]) * 1e3, Median(compute) * 1e3, Median(streamed[side]) * 1e3,
                Median(streamed[side]) / largest);
  }
  std::fflush(stdout);
}

int Main() {
  const Server rapt = StartRapt({});
  {
    const auto client =
        client::Client::Connect(absl::StrCat("127.0.0.1:", rapt.port), {.shared_memory = false});
    RAPT_CHECK(client.ok(), "no connection");
    std::printf("1 x %ld x %ld^2, head size %ld; ratio of a stream to the larger of the two\n\n",
                static_cast<long>(kHeads), static_cast<long>(kLength), static_cast<long>(kSize));
    std::printf("| type | what streams | transfer ms | compute ms | streamed ms | ratio |\n");
    std::printf("| --- | --- | --- | --- | --- | --- |\n");
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) Measure(**client, dtype);
  }
  Stop(rapt);
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main() { return rapt::bench::Main(); }
