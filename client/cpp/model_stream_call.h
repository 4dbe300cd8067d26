// One LinearAttendStream on a connection.
#ifndef RAPT_CLIENT_CPP_MODEL_STREAM_CALL_H_
#define RAPT_CLIENT_CPP_MODEL_STREAM_CALL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <stop_token>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"
#include "rapt/model.h"

namespace rapt::client {

class ModelStreamCall final : public ModelStream {
 public:
  // `connections` outlive it.
  ModelStreamCall(Connections& connections, const Deadline& deadline, std::stop_token stop);
  ~ModelStreamCall() override;

  absl::StatusOr<ModelResult> Infer(const ModelCall& tokens) override;
  absl::Status Finish() override;

 private:
  struct Cancel {
    grpc::ClientContext* context;
    void operator()() const { context->TryCancel(); }
  };

  absl::Status End();
  absl::Status Abort(absl::Status why);

  const Connections& connections_;
  const ConnectionLease connection_;
  const std::stop_token stop_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::LinearAttendRequest, v1::LinearAttendResponse>>
      stream_;
  const std::stop_callback<Cancel> on_stop_;
  bool has_ended_ = false;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_MODEL_STREAM_CALL_H_
