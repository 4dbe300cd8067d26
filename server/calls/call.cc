#include "server/calls/call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/calls/call_headers.h"
#include "server/calls/per_model.h"
#include "server/rejection.h"

namespace rapt {
namespace {

// Grace for a sender, because connections may stall for a moment.
constexpr std::chrono::seconds kReceiveGrace{2};

// Grace for a reader, which may compute between two responses of a stream. While others wait for
// the memory, a unary call's reader has no more than a sender.
constexpr std::chrono::seconds kSendGrace{20};

std::chrono::nanoseconds SlowestTransfer(int64_t bytes, const CallLimits& limits) {
  const double seconds =
      static_cast<double>(bytes) / static_cast<double>(limits.min_receive_bytes_per_second);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, 1e6)));
}

absl::Status Yielded(absl::string_view what) {
  return Reject(Rejection::kCallerShare, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the ", what, " was slow while other callers waited for memory and ",
                             "this caller held more than its fair share"));
}

// 0 if the call never reached the stage.
std::string TimeSpent(std::chrono::nanoseconds time) {
  return absl::StrCat(Microseconds(std::max(time, std::chrono::nanoseconds::zero())));
}

}  // namespace

Call::Call(const CallEnvironment& environment, const CallObserver& observe, MethodTraits traits)
    : environment_(environment),
      observe_(observe),
      traits_(traits),
      arrived_(environment.clock.Now()) {
  report_.model = OtherModels();
}

Call::~Call() {
  ReleaseMessageMemory();
  if (caller_.empty()) return;
  if (is_idle_) {
    places().LeaveIdle(caller_);
  } else {
    places().Leave(caller_);
  }
}

absl::Status Call::Enter(const CallHeaders& headers) {
  report_.traceparent = TraceparentOf(headers.traceparent);
  RAPT_ASSIGN_OR_RETURN(std::string caller, traits_.is_public
                                                ? Access::PeerOf(headers)
                                                : environment_.access.Identify(headers));
  RAPT_RETURN_IF_ERROR(places().Enter(caller));
  if (traits_.carries_tensors) caller_memory_ = engine().CallerOf(caller);
  caller_ = std::move(caller);
  return absl::OkStatus();
}

absl::Status Call::SetDeadline(Instant requested) {
  if (requested == Instant::max()) requested = arrived_ + limits().default_deadline;
  SetStreamDeadline(requested);
  if (deadline_ > arrived_) return absl::OkStatus();
  return absl::DeadlineExceededError("the deadline had passed when the call arrived");
}

void Call::SetStreamDeadline(Instant requested) {
  deadline_ = std::min(requested, arrived_ + limits().max_deadline);
}

void Call::MarkIdle() {
  places().MarkIdle();
  is_idle_ = true;
  arrived_ = Now();
  std::string traceparent = std::move(report_.traceparent);
  report_ = {};
  report_.model = OtherModels();
  report_.traceparent = std::move(traceparent);
}

void Call::MarkActive() {
  places().MarkActive();
  is_idle_ = false;
  is_accepted_ = false;
  arrived_ = Now();
}

void Call::Cancel() {
  cancelled_ = true;
  engine().NoticeCancellation();
}

absl::Status Call::CancelledOrLate() const {
  if (Now() < deadline_) return absl::CancelledError("the caller cancelled the call");
  return absl::DeadlineExceededError("the deadline passed");
}

absl::Status Call::CheckMessageSize(int64_t bytes) const {
  int64_t most = limits().max_message_bytes;
  if (!traits_.carries_tensors) most = std::min(most, traits_.max_small_bytes);
  if (bytes <= most) return absl::OkStatus();
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the message has ", bytes, " bytes; at most ", most, " are allowed"));
}

void Call::BeginReceiving(int64_t bytes, AdmissionGate::Shares held, Alarm& alarm) {
  receive_began_ = Now();
  receive_wait_ = WaitForPeer(held, AdmissionGate::kSilentTime, receive_pace_,
                              receive_yields_to_waiters_, alarm);
  receive_end_ =
      std::min(deadline_, receive_began_ + kReceiveGrace + SlowestTransfer(bytes, limits()));
}

void Call::EndReceiving() {
  receive_wait_ = {};
  receive_yields_to_waiters_ = false;
  AddTimeSince(receive_began_, Stage::kReceive);
}

AdmissionGate::PeerWait Call::WaitForPeer(AdmissionGate::Shares held,
                                          std::chrono::nanoseconds patience,
                                          AdmissionGate::PeerPace& pace, std::atomic<bool>& yields,
                                          Alarm& alarm) {
  if (caller_memory_ == nullptr) return {};
  const Instant now = Now();
  pace.Begin(now);
  const auto end = [&yields, &alarm] {
    yields = true;
    alarm.SetNoLaterThan(Instant::min());
  };
  return engine().WaitForPeer(caller_memory_, held, now + patience, end,
                              keeps_pace_ ? &pace : nullptr);
}

void Call::Advance(AdmissionGate::PeerPace& pace, int64_t bytes) {
  if (caller_memory_ != nullptr) pace.Advance(Now(), SlowestTransfer(bytes, limits()));
}

void Call::EndWaits() {
  receive_wait_ = {};
  send_wait_ = {};
}

absl::Status Call::SlowSender(absl::string_view what) const {
  if (receive_yields_to_waiters_) return Yielded(what);
  return Reject(Rejection::kSlowSender, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the ", what, " arrived slower than ",
                             limits().min_receive_bytes_per_second, " bytes/s"));
}

void Call::BeginSending(int64_t bytes, Instant deadline, AdmissionGate::Shares held, Alarm& alarm) {
  report_.sent_bytes += bytes;
  send_began_ = Now();
  send_deadline_ = deadline;
  send_end_ = std::min(deadline, send_began_ + kSendGrace + SlowestTransfer(bytes, limits()));
  send_wait_ = WaitForPeer(held, keeps_pace_ ? AdmissionGate::kSilentTime : kSendGrace, send_pace_,
                           send_yields_to_waiters_, alarm);
}

void Call::EndSending() {
  send_wait_ = {};
  send_yields_to_waiters_ = false;
  AddTimeSince(send_began_, Stage::kSend);
}

absl::Status Call::NotSent() const {
  if (send_yields_to_waiters_) return Yielded("reader of the response");
  if (Now() < send_end_) return absl::CancelledError("the caller cancelled the call");
  if (send_end_ == send_deadline_) {
    return absl::DeadlineExceededError("the deadline passed while the response was sent");
  }
  return Reject(Rejection::kSlowReader, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the response was read slower than ",
                             limits().min_receive_bytes_per_second, " bytes/s"));
}

void Call::AddTime(Stage stage, std::chrono::nanoseconds time) {
  std::chrono::nanoseconds& sum = report_.time_of(stage);
  sum = std::max(sum, std::chrono::nanoseconds::zero()) + time;
}

void Call::Bind(Request& request) {
  request.deadline = std::min(request.deadline, deadline_);
  request.cancelled = &cancelled_;
  request.caller = caller_memory_;
  request.is_accepted =
      is_accepted_ || (traits_.serves_while_draining && request.model == Model::kAttentionSession);
  report_.model = request.model;
  SetProblem(request.call.problem);
}

void Call::SetProblem(const Problem& problem) {
  problem_ = problem;
  report_.problem = &problem_;
}

void Call::Record(const Result& result) {
  report_.ended_in = result.ended_in;
  AddTime(Stage::kQueue, result.queue_time);
  if (result.ended_in == Stage::kCompute) AddTime(Stage::kCompute, result.compute_time);
  report_.routing = result.routing;
  report_.plan = result.plan;
  report_.batch_size = result.batch_size;
  if (result.status.ok()) report_.flops += result.flops;
}

void Call::ForEachTrailer(Trailer trailer) const {
  if (!report_.traceparent.empty()) trailer(kTraceparentHeader, report_.traceparent);
  if (report_.routing.backend == nullptr) return;
  trailer("rapt-backend", NamesOf(report_.routing));
  trailer("rapt-plan", report_.plan);
  trailer("rapt-queue-us", TimeSpent(report_.time_of(Stage::kQueue)));
  trailer("rapt-compute-us", TimeSpent(report_.time_of(Stage::kCompute)));
  trailer("rapt-total-us", TimeSpent(Now() - arrived_));
}

void Call::Report(absl::Status status) {
  if (!traits_.carries_tensors) {
    std::string traceparent = std::move(report_.traceparent);
    report_ = {};
    report_.model = OtherModels();
    report_.traceparent = std::move(traceparent);
  }
  report_.status = std::move(status);
  report_.total = Now() - arrived_;
  observe_(report_);
}

}  // namespace rapt
