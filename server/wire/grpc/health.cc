#include "server/wire/grpc/health.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace rapt {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// Writes the status and its changes, one at a time. If it changes several times during a write,
// only the last change is written next. Deletes itself.
class Health::WatchCall final : public GenericCall {
 public:
  WatchCall(Health& health, std::unique_ptr<GrpcCall> call)
      : GenericCall(std::move(call)), health_(health) {}

  void Begin() override { StartRead(&buffer_); }

  // Writes a new status or finishes, unless an operation is pending, whose completion calls this
  // again.
  void Proceed() {
    const Status status = health_.StatusOf(service_);
    std::optional<grpc::Status> end;
    {
      MutexLock lock(mutex_);
      if (is_busy_ || (!end_ && told_ == status)) return;
      is_busy_ = true;  // permanently if the call finishes
      told_ = status;
      end = end_;
    }
    if (end) return StartFinish(*end);
    HealthCheckResponse response;
    response.set_status(status);
    bool owned;
    grpc::SerializationTraits<HealthCheckResponse>::Serialize(response, &buffer_, &owned);
    StartWrite(&buffer_);
  }

 private:
  void OnReadDone(bool ok) override {
    HealthCheckRequest request;
    if (!ok ||
        !grpc::SerializationTraits<HealthCheckRequest>::Deserialize(&buffer_, &request).ok()) {
      return GoOn(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "malformed request"));
    }
    service_ = request.service();
    {
      MutexLock lock(health_.mutex_);
      health_.watches_.insert(this);
    }
    GoOn();
  }

  void OnWriteDone(bool ok) override { ok ? GoOn() : GoOn(grpc::Status::CANCELLED); }

  // The pending operation completed.
  void GoOn(std::optional<grpc::Status> end = std::nullopt) {
    {
      MutexLock lock(mutex_);
      is_busy_ = false;
      if (end) end_ = std::move(end);
    }
    Proceed();
  }

  void OnCancel() override {
    {
      MutexLock lock(mutex_);
      end_ = grpc::Status::CANCELLED;
    }
    Proceed();
  }

  void OnDone() override {
    {
      MutexLock lock(health_.mutex_);
      health_.watches_.erase(this);
    }
    delete this;
  }

  Health& health_;
  std::string service_;
  grpc::ByteBuffer buffer_;  // the request, then the response
  Mutex mutex_;
  bool is_busy_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<Status> told_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

Health::Health(std::vector<std::string> services, TensorMethods& methods)
    : services_(std::move(services)) {
  methods.Add("/grpc.health.v1.Health/Watch",
              [this](auto call) { return new WatchCall(*this, std::move(call)); });
}

void Health::SetServing(bool serving) {
  serving_ = serving;
  MutexLock lock(mutex_);  // so that no watcher is deleted meanwhile
  for (WatchCall* watch : watches_) watch->Proceed();
}

Health::Status Health::StatusOf(const std::string& service) const {
  if (!service.empty() &&
      std::find(services_.begin(), services_.end(), service) == services_.end()) {
    return HealthCheckResponse::SERVICE_UNKNOWN;
  }
  return serving_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

grpc::Status Health::Check(grpc::ServerContext*, const HealthCheckRequest* request,
                           HealthCheckResponse* response) {
  const Status status = StatusOf(request->service());
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    return {grpc::StatusCode::NOT_FOUND, "service name unknown"};
  }
  response->set_status(status);
  return grpc::Status::OK;
}

}  // namespace rapt
