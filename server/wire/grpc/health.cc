#include "server/wire/grpc/health.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "server/wire/grpc/status.h"

namespace rapt {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// Writes the status and its changes, one at a time. If it changes several times during a write,
// only the last change is written next. Deletes itself.
class Health::WatchCall final : public GenericCall, private HealthStatus::Watcher {
 public:
  WatchCall(HealthStatus& health, std::unique_ptr<GrpcCall> call)
      : GenericCall(std::move(call)), health_(health) {}

  void Begin() override { StartRead(&buffer_); }

  // Writes a new status or finishes, unless an operation is pending; its completion calls this
  // again.
  void OnChange() override {
    HealthStatus::Status status;
    std::optional<grpc::Status> end;
    {
      MutexLock lock(mutex_);
      if (is_busy_) return;  // OnReadDone() may set service_
      status = health_.StatusOf(service_);
      if (!end_ && reported_ == status) return;
      is_busy_ = true;  // permanently if the call finishes
      reported_ = status;
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
      return Continue(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "malformed request"));
    }
    service_ = request.service();
    health_.Add(*this);
    Continue();
  }

  void OnWriteDone(bool ok) override { ok ? Continue() : Continue(grpc::Status::CANCELLED); }

  // The pending operation completed.
  void Continue(std::optional<grpc::Status> end = std::nullopt) {
    {
      MutexLock lock(mutex_);
      is_busy_ = false;
      if (end) end_ = std::move(end);
    }
    OnChange();
  }

  void OnCancel() override {
    {
      MutexLock lock(mutex_);
      end_ = grpc::Status::CANCELLED;
    }
    OnChange();
  }

  void OnDone() override {
    health_.Remove(*this);
    delete this;
  }

  HealthStatus& health_;
  std::string service_;
  grpc::ByteBuffer buffer_;  // the request, then the response
  Mutex mutex_;
  bool is_busy_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<HealthStatus::Status> reported_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

Health::Health(HealthStatus& status, TensorMethods& methods) : status_(status) {
  methods.Add("/grpc.health.v1.Health/Watch",
              [this](auto call) { return new WatchCall(status_, std::move(call)); });
}

grpc::Status Health::Check(grpc::ServerContext*, const HealthCheckRequest* request,
                           HealthCheckResponse* response) {
  return ToGrpcStatus(status_.Answer(*request, *response));
}

}  // namespace rapt
