#include "server/wire/health_watch.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/grpc/health/v1/health.pb.h"

namespace rapt {
namespace {

const CallObserver& NoObserver() {
  static const CallObserver* const none = new CallObserver([](const CallReport&) {});
  return *none;
}

}  // namespace

HealthWatch::HealthWatch(const CallEnvironment& environment, HealthStatus& health,
                         MessageStream& stream)
    : StreamCall(stream),
      health_(health),
      call_(environment, NoObserver(), {.carries_tensors = false, .is_public = true}),
      alarm_(environment.timer, [this] { OnDeadline(); }) {}

void HealthWatch::Begin() {
  const CallHeaders headers = stream().Headers(call_.arrived());
  absl::Status status = call_.Enter(headers);
  if (!status.ok()) return Continue(std::move(status));
  deadline_ = headers.deadline;
  alarm_.Set(std::min(deadline_, call_.Now() + call_.limits().default_deadline));
  stream().StartRead(/*max_bytes=*/0);
}

void HealthWatch::OnSize(int64_t bytes) {
  if (absl::Status status = call_.CheckMessageSize(bytes); !status.ok()) {
    return Continue(std::move(status));
  }
  call_.KeepMessageMemory(call_.engine().ChargeMessage(bytes, call_.caller_memory()));
  stream().StartRead(bytes);
}

void HealthWatch::OnReadDone(bool ok) {
  if (!ok) return Continue(absl::InvalidArgumentError("malformed request"));
  const IncomingMessage message = stream().TakeMessage();
  grpc::health::v1::HealthCheckRequest request;
  if (!request.ParseFromString(message.bytes.ToString())) {
    return Continue(absl::InvalidArgumentError("malformed request"));
  }
  call_.ReleaseMessageMemory();
  deadline_ == Instant::max() ? alarm_.Cancel() : alarm_.Set(deadline_);
  service_ = request.service();
  health_.Add(*this);
  Continue();
}

void HealthWatch::OnWriteDone(bool ok) {
  ok ? Continue() : Continue(absl::CancelledError("the caller cancelled the call"));
}

void HealthWatch::OnCancel() {
  {
    MutexLock lock(mutex_);
    end_ = absl::CancelledError("the caller cancelled the call");
  }
  OnChange();
}

void HealthWatch::OnDeadline() {
  bool is_busy;
  {
    MutexLock lock(mutex_);
    is_busy = is_busy_;
    end_ = absl::DeadlineExceededError("the deadline passed");
  }
  is_busy ? stream().Cancel() : OnChange();
}

void HealthWatch::OnDone() {
  alarm_.Cancel();
  health_.Remove(*this);
}

void HealthWatch::Continue(std::optional<absl::Status> end) {
  {
    MutexLock lock(mutex_);
    is_busy_ = false;
    if (end) end_ = std::move(end);
  }
  OnChange();
}

void HealthWatch::OnChange() {
  HealthStatus::Status status;
  std::optional<absl::Status> end;
  {
    MutexLock lock(mutex_);
    if (is_busy_) return;  // OnReadDone() may set service_
    status = health_.StatusOf(service_);
    if (!end_ && reported_ == status) return;
    is_busy_ = true;  // permanently if the call finishes
    reported_ = status;
    end = end_;
  }
  if (end) return stream().StartFinish(*end, call_);
  grpc::health::v1::HealthCheckResponse response;
  response.set_status(status);
  ResponseMessage message;
  message.Append(response.SerializeAsString());
  stream().StartWrite(std::move(message));
}

}  // namespace rapt
