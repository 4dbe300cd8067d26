// LinearAttendStream: tokens in any number of messages, with the state kept between them.
#ifndef RAPT_SERVER_WIRE_RAPT_LINEAR_STREAM_CALL_H_
#define RAPT_SERVER_WIRE_RAPT_LINEAR_STREAM_CALL_H_

#include "server/protocols/rapt/linear_stream.h"
#include "server/wire/rapt/stepwise_call.h"

namespace rapt::native {

// Each message is received, computed and responded to. The state is a part of the memory of the
// message that made it. A server that drains lets the stream go on.
class LinearStreamCall final : public StepwiseCall {
 public:
  // `observe` outlives the call.
  LinearStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                   MessageStream& stream)
      : StepwiseCall(environment, observe, stream, "its state") {}

 private:
  void OnMessage(const MessageBytes& message) override;
  void OnHalfClose() override { End(absl::OkStatus(), Stage::kSend); }
  void OnComputed(Result result) override;
  void OnSent() override { Receive(); }
  AdmissionGate::Shares Held() const override { return {.compute = sequence_.has_state()}; }
  void Release() override;

  LinearStream sequence_;
  MessageReservation kept_memory_;  // of the sequence
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_LINEAR_STREAM_CALL_H_
