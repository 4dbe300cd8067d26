#include "client/cpp/model_stream_call.h"

#include <utility>

#include "base/status_macros.h"
#include "client/cpp/codec.h"
#include "client/cpp/operator_codec.h"

namespace rapt::client {
namespace {

template <typename Context>
auto Start(const Connection& connection, const Deadline& deadline, Context& context) {
  context.set_deadline(deadline.ToGrpc());
  return connection.attention->LinearAttendStream(&context);
}

}  // namespace

ModelStreamCall::ModelStreamCall(Connections& connections, const Deadline& deadline,
                                 std::stop_token stop)
    : connections_(connections),
      connection_(connections.LeastBusy()),
      stop_(std::move(stop)),
      stream_(Start(*connection_, deadline, context_)),
      on_stop_(stop_, Cancel{&context_}) {}

ModelStreamCall::~ModelStreamCall() {
  if (!has_ended_) Abort({}).IgnoreError();
}

absl::StatusOr<ModelResult> ModelStreamCall::Infer(const ModelCall& tokens) {
  if (has_ended_) return absl::FailedPreconditionError("the stream has ended");
  v1::LinearAttendRequest request;
  if (absl::Status status = EncodeOperator(tokens, request); !status.ok()) return Abort(status);
  v1::LinearAttendResponse response;
  // After a failed write there is no response; the status says why.
  stream_->Write(request);
  if (!stream_->Read(&response)) {
    RAPT_RETURN_IF_ERROR(End());
    return MalformedResponse("the stream ended early");
  }
  absl::StatusOr<ModelResult> result = DecodeOperator(tokens, response);
  if (!result.ok()) return Abort(result.status());
  return result;
}

absl::Status ModelStreamCall::Finish() {
  if (has_ended_) return absl::FailedPreconditionError("the stream has ended");
  stream_->WritesDone();
  return End();
}

absl::Status ModelStreamCall::End() {
  has_ended_ = true;
  return connections_.FromGrpc(stream_->Finish(), stop_.stop_requested());
}

absl::Status ModelStreamCall::Abort(absl::Status why) {
  context_.TryCancel();
  End().IgnoreError();
  return why;
}

}  // namespace rapt::client
