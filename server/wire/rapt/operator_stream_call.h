// A stream of an operator that has a state: tokens in any number of messages.
#ifndef RAPT_SERVER_WIRE_RAPT_OPERATOR_STREAM_CALL_H_
#define RAPT_SERVER_WIRE_RAPT_OPERATOR_STREAM_CALL_H_

#include <optional>

#include "server/protocols/rapt/operator_stream.h"
#include "server/wire/rapt/stepwise_call.h"

namespace rapt::native {

// Each message is received, computed and responded to. The state is a part of the memory of the
// message that made it. A server that drains lets the stream go on.
class OperatorStreamCall final : public StepwiseCall {
 public:
  // `codec` and `observe` outlive the call.
  OperatorStreamCall(const OperatorCodec& codec, const CallEnvironment& environment,
                     const CallObserver& observe, MessageStream& stream)
      : StepwiseCall(environment, observe, stream, "its state"), requests_(codec) {}

 private:
  void OnMessage(const MessageBytes& message) override;
  void OnHalfClose() override { End(absl::OkStatus(), Stage::kSend); }
  void OnComputed(Result result) override;
  void OnSent() override { Receive(); }
  AdmissionGate::Shares Held() const override { return {.compute = requests_->has_state()}; }
  void Release() override;

  std::optional<OperatorStream> requests_;
  MessageReservation kept_memory_;  // of the requests
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_OPERATOR_STREAM_CALL_H_
