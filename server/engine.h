// The one way from a request to its result, or to a diagnosis of it.
#ifndef RAPT_SERVER_ENGINE_H_
#define RAPT_SERVER_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <memory>

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

// What a message holds while it is received and read. Move-only; gives it back on destruction.
using MessageReservation = MemoryBudget::Reservation;
using MessageAdmitted = absl::AnyInvocable<void(absl::StatusOr<MessageReservation>)>;

// Plan, admission, execution, done: only this class knows the order. Thread-safe. Everything
// borrowed outlives it.
class Engine {
 public:
  // `options` are valid and for the executor's number of threads; the pool has room for the gate's
  // compute share. With `lanes`, which has a thread for each lane of the device, backends that wait
  // for one are taken as well.
  Engine(PlanOptions options, AdmissionGate& gate, BufferPool& pool, Executor& executor,
         Executor* lanes = nullptr);

  // Before a message is received: waits for a place for its bytes, where there are any. Calls
  // `admitted` exactly once, on this thread where that is decided at once, with Unavailable,
  // ResourceExhausted, DeadlineExceeded or Cancelled where there is none.
  void AdmitMessage(int64_t bytes, Instant deadline, const std::atomic<bool>& cancelled,
                    MessageAdmitted admitted);
  // For a message that has come without a place: it is held all the same, so that others wait.
  MessageReservation ChargeMessage(int64_t bytes) {
    return gate_.Charge(AdmissionGate::Share::kReceive, bytes);
  }
  // When it is received: gives back all but `bytes`. Requests that waited for them may start on
  // this thread.
  void ShrinkMessage(MessageReservation& reservation, int64_t bytes);

  // A request's `cancelled` was set: those that wait for memory look at theirs now.
  void NoticeCancellation() { gate_.NoticeCancellation(); }

  // Calls done exactly once: on this thread where the request is refused or tiny, else on a compute
  // thread. Its status is
  //   Unavailable         after StopAccepting()
  //   InvalidArgument     what only the data tells, such as key lengths
  //   Unimplemented       the configured backend can't compute it
  //   ResourceExhausted   it can't fit into the memory budget, or did not within the queue's time
  //   DeadlineExceeded, Cancelled
  void Submit(Request request, Done done);

  // Looks into the request instead of answering it; statuses as with Submit(), but what the
  // configured backend can't compute is no error, the report says so.
  void Diagnose(Request request, DiagnosisDone done);

  // An attention whose tensors come in chunks, not yet admitted. Unavailable, InvalidArgument and
  // Unimplemented as with Submit(), and InvalidArgument for chunks that make no sense.
  absl::StatusOr<std::shared_ptr<AttentionStream>> PlanStream(StreamRequest request);

  // Takes the stream's memory: first `message_bytes` for its chunks, then everything else, as a
  // request does. Calls `admitted` exactly once, on this thread where that is decided at once; the
  // stream may be used when its status is OK, and else ends as AdmitMessage() and Submit() say.
  using StreamAdmitted = absl::AnyInvocable<void(absl::Status)>;
  void AdmitStream(std::shared_ptr<AttentionStream> stream, int64_t message_bytes,
                   StreamAdmitted admitted);

  // From now on requests are refused; those submitted before run to their end.
  void StopAccepting() { accepting_ = false; }
  bool accepting() const { return accepting_; }

  const PlanOptions& plan_options() const { return options_; }
  const AdmissionGate& gate() const { return gate_; }

 private:
  class Passage;
  class Flight;
  class Examination;
  absl::Status CheckAccepting() const;
  // Calls `callback` as AdmissionGate::Queue() does, but now if admitted at once.
  template <typename Callback>
  void AdmitOrQueue(const AdmissionGate::MemoryRequest& memory, Callback callback);
  void Admit(std::unique_ptr<Passage> passage);
  void Start(std::unique_ptr<Passage> passage, AdmissionGate::Result result, bool at_once);

  const PlanOptions options_;
  AdmissionGate& gate_;
  BufferPool& pool_;
  Executor& executor_;
  Executor* const lanes_;
  std::atomic<bool> accepting_{true};
};

}  // namespace rapt

#endif  // RAPT_SERVER_ENGINE_H_
