#include "server/wire/unary_stream_call.h"

#include <limits>

namespace rapt {

void UnaryStreamCall::Begin() {
  OnHeaders(stream().Headers(call().arrived()));
  stream().StartRead(/*max_bytes=*/-1);
}

// The size, which has arrived, is admitted.
void UnaryStreamCall::StartReading() {
  stream().Post([this] {
    if (OnReadingStarted()) stream().StartRead(std::numeric_limits<int64_t>::max());
  });
}

void UnaryStreamCall::OnReadDone(bool ok) {
  if (!OnRead(ok)) return;
  message_ = stream().TakeMessage();
  handler_->OnMessage(message_.bytes, *this);
}

void UnaryStreamCall::Respond(ResponseMessage response) {
  BeginResponse(response.size());
  stream().StartWriteAndFinish(std::move(response), call());
}

}  // namespace rapt
