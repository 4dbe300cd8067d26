#include "server/wire/health_status.h"

#include <algorithm>

namespace rapt {

using grpc::health::v1::HealthCheckResponse;

void HealthStatus::SetServing(bool serving) {
  serving_ = serving;
  MutexLock lock(mutex_);
  for (Watcher* watcher : watchers_) watcher->OnChange();
}

HealthStatus::Status HealthStatus::StatusOf(const std::string& service) const {
  if (!service.empty() &&
      std::find(services_.begin(), services_.end(), service) == services_.end()) {
    return HealthCheckResponse::SERVICE_UNKNOWN;
  }
  return serving_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

absl::Status HealthStatus::Respond(const grpc::health::v1::HealthCheckRequest& request,
                                   HealthCheckResponse& response) const {
  const Status status = StatusOf(request.service());
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    return absl::NotFoundError("service name unknown");
  }
  response.set_status(status);
  return absl::OkStatus();
}

void HealthStatus::Add(Watcher& watcher) {
  MutexLock lock(mutex_);
  watchers_.insert(&watcher);
}

void HealthStatus::Remove(Watcher& watcher) {
  MutexLock lock(mutex_);
  watchers_.erase(&watcher);
}

}  // namespace rapt
