#include "server/wire/grpc/health.h"

#include "server/wire/grpc/status.h"

namespace rapt {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

grpc::Status Health::Check(grpc::ServerContext*, const HealthCheckRequest* request,
                           HealthCheckResponse* response) {
  return ToGrpcStatus(status_.Respond(*request, *response));
}

}  // namespace rapt
