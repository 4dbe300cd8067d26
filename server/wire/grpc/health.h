// The standard gRPC health checking protocol.
#ifndef RAPT_SERVER_WIRE_GRPC_HEALTH_H_
#define RAPT_SERVER_WIRE_GRPC_HEALTH_H_

#include <atomic>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "base/mutex.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "server/wire/grpc/tensor_methods.h"

namespace rapt {

// Reports the same status for the server and each of its services. Replaces gRPC's own health
// service, which uses the callback interface and its polling threads, see docs/tuning.md.
// Thread-safe.
class Health final
    : public grpc::health::v1::Health::WithGenericMethod_Watch<grpc::health::v1::Health::Service> {
 public:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  // Initially NOT_SERVING. Adds the method Watch to `methods`. Outlives its calls.
  Health(std::vector<std::string> services, TensorMethods& methods);

  void SetServing(bool serving);

 private:
  class WatchCall;

  Status StatusOf(const std::string& service) const;

  grpc::Status Check(grpc::ServerContext* context,
                     const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override;

  const std::vector<std::string> services_;
  std::atomic<bool> serving_{false};
  Mutex mutex_;
  absl::flat_hash_set<WatchCall*> watches_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_HEALTH_H_
