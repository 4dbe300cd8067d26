// The method Watch of the gRPC health checking protocol.
#ifndef RAPT_SERVER_WIRE_HEALTH_WATCH_H_
#define RAPT_SERVER_WIRE_HEALTH_WATCH_H_

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/calls/call.h"
#include "server/wire/health_status.h"
#include "server/wire/message_stream.h"

namespace rapt {

// Writes the status and its changes, one at a time. If it changes several times during a write,
// only the last change is written next. Counts as an open call without tensors. Ends at the
// caller's deadline, and if the request does not arrive within the default deadline.
class HealthWatch final : public StreamCall, private HealthStatus::Watcher {
 public:
  // Everything borrowed outlives the call.
  HealthWatch(const CallEnvironment& environment, HealthStatus& health, MessageStream& stream);

  void Begin() override;

 private:
  void OnSize(int64_t bytes) override;
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // Writes a new status or finishes, unless an operation is pending; its completion calls this
  // again.
  void OnChange() override;
  void OnDeadline();
  // The pending operation completed.
  void Continue(std::optional<absl::Status> end = std::nullopt);

  HealthStatus& health_;
  Call call_;
  Instant deadline_ = Instant::max();  // the caller's
  Alarm alarm_;                        // the deadline, or the end of the time to send the request
  std::string service_;
  Mutex mutex_;
  bool is_busy_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<HealthStatus::Status> reported_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HEALTH_WATCH_H_
