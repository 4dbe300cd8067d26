// Computes requests: plan, admission, execution.
#ifndef RAPT_SERVER_ENGINE_H_
#define RAPT_SERVER_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "attention/diagnosis.h"
#include "attention/plan.h"
#include "base/buffer_pool.h"
#include "server/admission/gate.h"
#include "server/admission/memory_budget.h"
#include "server/attention_stream.h"
#include "server/execution/executor.h"
#include "server/request.h"

namespace rapt {

// Runs exactly once for each diagnosis, on any thread.
using DiagnosisDone = absl::AnyInvocable<void(absl::StatusOr<DiagnosisReport>)>;

// Memory reserved for a message while it is received and read. Move-only; released on destruction.
using MessageReservation = MemoryBudget::Reservation;
using MessageAdmitted = absl::AnyInvocable<void(absl::StatusOr<MessageReservation>)>;

// Runs plan, admission, execution and done in this order for every request. Thread-safe. Everything
// that it references outlives it.
class Engine {
 public:
  // REQUIRES: `options` are valid and have the executor's number of threads; the pool's capacity is
  // the gate's compute share. `lanes` has a thread for each lane of the device; null: backends with
  // lanes are not used.
  Engine(PlanOptions options, AdmissionGate& gate, BufferPool& pool, Executor& executor,
         Executor* lanes = nullptr);

  // Reserves memory for a message before it is received, waiting if necessary. Calls `admitted`
  // exactly once, on this thread if the decision is immediate, with Unavailable, ResourceExhausted,
  // DeadlineExceeded or Cancelled on failure.
  void AdmitMessage(int64_t bytes, Instant deadline, const std::atomic<bool>& cancelled,
                    std::shared_ptr<CallerMemory> caller, MessageAdmitted admitted);
  // The same after StopAccepting(), for a message of a call that was accepted before.
  void AdmitNextMessage(int64_t bytes, Instant deadline, const std::atomic<bool>& cancelled,
                        std::shared_ptr<CallerMemory> caller, MessageAdmitted admitted);
  // Charges the budget for a message that arrived without a reservation, even beyond the limit, so
  // that others wait.
  MessageReservation ChargeMessage(int64_t bytes,
                                   const std::shared_ptr<CallerMemory>& caller = nullptr) {
    return gate_.Charge(AdmissionGate::Share::kReceive, bytes, caller);
  }

  // Same as in AdmissionGate.
  std::shared_ptr<CallerMemory> CallerOf(const std::string& name) { return gate_.CallerOf(name); }
  AdmissionGate::PeerWait WaitForPeer(std::shared_ptr<CallerMemory> caller,
                                      AdmissionGate::Shares shares, Instant silent_at,
                                      absl::AnyInvocable<void()> end,
                                      const AdmissionGate::PeerPace* pace) {
    return gate_.WaitForPeer(std::move(caller), shares, silent_at, std::move(end), pace);
  }

  // Call after setting a request's `cancelled`, so that waiting requests check theirs.
  void NoticeCancellation() { gate_.NoticeCancellation(); }

  // Calls `done` exactly once: on this thread if the request is rejected or tiny, else on a compute
  // thread. The status is
  //   Unavailable         after StopAccepting(), unless the request was accepted before
  //   InvalidArgument     invalid data, such as key lengths out of range
  //   Unimplemented       the configured backend does not support the problem
  //   ResourceExhausted   it exceeds the memory budget, the queue is full or the wait was too long
  //   DeadlineExceeded, Cancelled
  void Submit(Request&& request, Done done);

  // Diagnoses the request instead of computing it. Statuses as for Submit(), except that
  // unsupported problems are part of the report instead of Unimplemented.
  void Diagnose(Request request, DiagnosisDone done);

  // Plans a call whose tensors arrive in chunks, without admitting it. Unavailable, InvalidArgument
  // and Unimplemented as for Submit(), and InvalidArgument for invalid chunk sizes.
  absl::StatusOr<std::shared_ptr<AttentionStream>> PlanStream(StreamRequest request);

  // Reserves the stream's memory: first `message_bytes` for its chunks, then everything else. Calls
  // `admitted` exactly once, on this thread if the decision is immediate, with a status as for
  // AdmitMessage() and Submit(). The stream may be used only if the status is OK.
  using StreamAdmitted = absl::AnyInvocable<void(absl::Status)>;
  void AdmitStream(std::shared_ptr<AttentionStream> stream, int64_t message_bytes,
                   StreamAdmitted admitted);

  // Rejects new requests; submitted ones run to completion.
  void StopAccepting() { accepting_ = false; }
  bool accepting() const { return accepting_; }

  const PlanOptions& plan_options() const { return options_; }
  const AdmissionGate& gate() const { return gate_; }

 private:
  class PendingCall;
  class PendingAttention;
  class PendingDiagnosis;
  absl::Status CheckAccepting() const;
  // The same, but a request whose message was admitted before is accepted.
  absl::Status CheckAccepting(const Request& request) const;
  // Like AdmissionGate::Queue(), but calls `callback` on this thread if admitted at once.
  template <typename Callback>
  void AdmitOrQueue(const AdmissionGate::MemoryRequest& memory, Callback callback);
  void Admit(std::unique_ptr<PendingCall> pending);
  void Start(std::unique_ptr<PendingCall> pending, AdmissionGate::Result result, bool at_once);

  const PlanOptions options_;
  AdmissionGate& gate_;
  BufferPool& pool_;
  Executor& executor_;
  Executor* const lanes_;
  std::atomic<bool> accepting_{true};
};

}  // namespace rapt

#endif  // RAPT_SERVER_ENGINE_H_
