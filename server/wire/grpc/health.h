// The standard gRPC health checking protocol over gRPC.
#ifndef RAPT_SERVER_WIRE_GRPC_HEALTH_H_
#define RAPT_SERVER_WIRE_GRPC_HEALTH_H_

#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "server/wire/health_status.h"

namespace rapt {

// Replaces gRPC's own health service, which uses the callback interface and its polling threads,
// see docs/tuning.md. Thread-safe.
class Health final
    : public grpc::health::v1::Health::WithGenericMethod_Watch<grpc::health::v1::Health::Service> {
 public:
  // REQUIRES: `status` outlives this.
  explicit Health(const HealthStatus& status) : status_(status) {}

 private:
  // Watch is a generic method.
  grpc::Status Check(grpc::ServerContext* context,
                     const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override;

  const HealthStatus& status_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_HEALTH_H_
