#ifndef RAPT_SERVER_WIRE_GRPC_GRPC_STREAM_H_
#define RAPT_SERVER_WIRE_GRPC_GRPC_STREAM_H_

#include <grpcpp/support/byte_buffer.h>

#include <memory>

#include "server/wire/grpc/generic_call.h"
#include "server/wire/message_stream.h"

namespace rapt {

// A MessageStream over gRPC. Deletes itself.
class GrpcStream final : public GenericCall, private MessageStream {
 public:
  explicit GrpcStream(std::unique_ptr<GrpcCall> call) : GenericCall(std::move(call)) {}

  // Call it once, before Begin().
  void Serve(const StreamMethods::mapped_type& new_call) { call_ = new_call(*this); }
  void Begin() override { call_->Begin(); }

 private:
  CallHeaders Headers(Instant now) const override;
  bool ReportsSizes() const override { return false; }
  void StartRead(int64_t max_bytes) override;
  absl::StatusOr<IncomingMessage> TakeMessage() override;
  void StartWrite(ResponseMessage message) override;
  void StartWriteAndFinish(ResponseMessage message, const Call& call) override;
  void StartFinish(const absl::Status& status, const Call& call) override;
  void Cancel() override { context().TryCancel(); }

  void OnReadDone(bool ok) override { call_->OnReadDone(ok); }
  void OnWriteDone(bool ok) override;
  void OnCancel() override { call_->OnCancel(); }
  void OnDone() override;

  std::unique_ptr<StreamCall> call_;
  grpc::ByteBuffer incoming_, outgoing_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_GRPC_STREAM_H_
