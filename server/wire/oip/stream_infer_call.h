// ModelStreamInfer: a sequence of requests on one call.
#ifndef RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_
#define RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/timer.h"
#include "server/cache/sequences.h"
#include "server/calls/call.h"
#include "server/protocols/oip/codec.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/message_stream.h"
#include "server/wire/oip/infer_run.h"

namespace rapt::oip {

// One request at a time: the next one is read when the response to the previous one has been sent.
// Therefore responses are in the order of requests, a stream holds the memory of one request only,
// and HTTP/2 flow control applies backpressure to a faster sender. An invalid request gets an
// error_message in its position; the stream continues. It ends when the caller has half-closed it
// and has received all responses.
//
// A stream may be silent for hours and then holds no memory. A message of at most
// kMaxUnreservedBytes is charged to the budget when its size has arrived; a larger one waits until
// its memory is reserved.
//
// The stream is cancelled if its caller reads a response too slowly or not within the default
// deadline.
//
// The stream has a place among its caller's open calls from its arrival, and is idle between
// requests, so that a silent one does not delay the drain of the server. Each request is reported
// on its own. Deletes itself.
class StreamInferCall final : public StreamCall {
 public:
  // Such a message fits into the window that a stream has before it is read.
  static constexpr int64_t kMaxUnreservedBytes = 64 * 1024;

  // Everything outlives the call. Null `sequences`: there is no attention_session.
  StreamInferCall(const CallEnvironment& environment, const SharedMemory& shared_memory,
                  cache::Sequences* sequences, const ModelContext& context,
                  const CallObserver& observe, MethodTraits traits, MessageStream& stream);

  void Begin() override;

 private:
  // The steps, each leading to the next on any thread; none after FinishStream().
  void Wait();
  void Refuse(const absl::Status& status);
  void OnSize(int64_t bytes) override;
  void Receive(int64_t bytes, MessageReservation memory);
  void OnBytesRead(int64_t bytes) override { call_.NoteReceived(bytes); }
  void OnBytesSent(int64_t bytes) override { call_.NoteSent(bytes); }
  void OnReadDone(bool ok) override;
  absl::StatusOr<DecodedInfer> Decode();
  void OnResult(Result result);
  void Respond(ResponseMessage response);
  void RespondWithError(absl::Status status);
  void OnWriteDone(bool ok) override;

  void FinishStream(const absl::Status& status);
  void OnCancel() override { call_.Cancel(); }
  void OnDone() override;

  const SharedMemory& shared_memory_;
  cache::Sequences* const sequences_;
  const ModelContext& model_context_;
  Call call_;
  bool has_size_ = false;  // the next message is being received, its memory admitted

  // Of the request in progress.
  IncomingMessage message_;
  std::string id_;
  std::optional<InferRun> run_;
  absl::Status status_;

  Alarm alarm_;  // the deadline; Call::receive_end() or send_end() while a message is in transit
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_
