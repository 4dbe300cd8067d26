// The statuses that the standard gRPC health checking protocol reports, independent of the
// transport.
#ifndef RAPT_SERVER_WIRE_HEALTH_STATUS_H_
#define RAPT_SERVER_WIRE_HEALTH_STATUS_H_

#include <atomic>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "proto/grpc/health/v1/health.pb.h"

namespace rapt {

// The same status for the server and each of its services. Thread-safe.
class HealthStatus {
 public:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  class Watcher {
   public:
    // The status may have changed. Called on any thread. Must not add or remove watchers.
    virtual void OnChange() = 0;

   protected:
    ~Watcher() = default;
  };

  // Initially NOT_SERVING.
  explicit HealthStatus(std::vector<std::string> services) : services_(std::move(services)) {}

  void SetServing(bool serving);
  Status StatusOf(const std::string& service) const;

  // The method Check. NotFound if the service is unknown.
  absl::Status Respond(const grpc::health::v1::HealthCheckRequest& request,
                       grpc::health::v1::HealthCheckResponse& response) const;

  void Add(Watcher& watcher);
  // On return the watcher is not running and will not be called again.
  void Remove(Watcher& watcher);

 private:
  const std::vector<std::string> services_;
  std::atomic<bool> serving_{false};
  Mutex mutex_;
  absl::flat_hash_set<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HEALTH_STATUS_H_
