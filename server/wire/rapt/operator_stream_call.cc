#include "server/wire/rapt/operator_stream_call.h"

#include <utility>

namespace rapt::native {

void OperatorStreamCall::OnMessage(const MessageBytes& message) {
  absl::StatusOr<Request> request = requests_->Decode(message);
  if (!request.ok()) return End(request.status(), Stage::kReceive);
  if (kept_memory_.bytes() != requests_->kept_bytes()) {
    kept_memory_ = call().engine().ChargeMessage(requests_->kept_bytes(), call().caller_memory());
  }
  Compute(*std::move(request));
}

void OperatorStreamCall::OnComputed(Result result) {
  ResponseMessage response = requests_->Encode(result);
  result = {};
  ReleaseMessage();
  Send(std::move(response), {.compute = true});
}

void OperatorStreamCall::Release() {
  requests_.reset();
  kept_memory_ = {};
}

}  // namespace rapt::native
