#include "server/wire/rapt/linear_stream_call.h"

#include <utility>

namespace rapt::native {

void LinearStreamCall::OnMessage(const MessageBytes& message) {
  absl::StatusOr<Request> request = sequence_.Decode(message);
  if (!request.ok()) return End(request.status(), Stage::kReceive);
  if (kept_memory_.bytes() != sequence_.kept_bytes()) {
    kept_memory_ = call().engine().ChargeMessage(sequence_.kept_bytes(), call().caller_memory());
  }
  Compute(*std::move(request));
}

void LinearStreamCall::OnComputed(Result result) {
  ResponseMessage response = sequence_.Encode(result);
  result = {};
  ReleaseMessage();
  Send(std::move(response), {.compute = true});
}

void LinearStreamCall::Release() {
  sequence_ = {};
  kept_memory_ = {};
}

}  // namespace rapt::native
