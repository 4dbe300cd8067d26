// One LinearAttendStream on a connection.
#ifndef RAPT_CLIENT_CPP_LINEAR_STREAM_CALL_H_
#define RAPT_CLIENT_CPP_LINEAR_STREAM_CALL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <stop_token>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"
#include "rapt/linear.h"

namespace rapt::client {

class LinearStreamCall final : public LinearStream {
 public:
  // `connections` outlive it.
  LinearStreamCall(Connections& connections, const Deadline& deadline, std::stop_token stop);
  ~LinearStreamCall() override;

  absl::StatusOr<LinearResult> Attend(const LinearCall& tokens) override;
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
  bool has_begun_ = false;  // attributes are sent
  bool has_ended_ = false;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_LINEAR_STREAM_CALL_H_
