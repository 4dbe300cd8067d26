#include "server/wire/grpc/status.h"

#include "server/wire/status_message.h"

namespace rapt {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), StatusMessage(status)};
}

}  // namespace rapt
