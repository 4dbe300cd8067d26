#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "proto/inference/grpc_service.pb.h"
#include "server/protocols/oip/codec.h"
#include "tests/support/wire_message.h"

namespace rapt::oip {
namespace {

// A request of one head of size 64 with as many positions.
std::string Message(int64_t positions) {
  inference::ModelInferRequest message;
  message.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *message.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t size : {int64_t{1}, int64_t{1}, positions, int64_t{64}}) {
      input.add_shape(size);
    }
    message.add_raw_input_contents(std::string(static_cast<size_t>(positions) * 64 * 4, '\0'));
  }
  return message.SerializeAsString();
}

// Its time must not grow with the payload, which is read in place.
void DecodeMessage(benchmark::State& state) {
  const SharedMemory no_shared_memory({});
  const test::WireMessage message(Message(state.range(0)));
  for (auto iteration : state) {
    const auto decoded =
        DecodeInfer(message.bytes(), Instant(std::chrono::hours(1)), no_shared_memory);
    if (!decoded.ok()) return state.SkipWithError("not decoded");
  }
}
BENCHMARK(DecodeMessage)->Name("oip_codec/decode_positions")->Arg(1)->Arg(4096);

}  // namespace
}  // namespace rapt::oip
