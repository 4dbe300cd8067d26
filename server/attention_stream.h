// Attention over tensors that arrive in chunks.
#ifndef RAPT_SERVER_ATTENTION_STREAM_H_
#define RAPT_SERVER_ATTENTION_STREAM_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "attention/mechanism/softmax/chunked.h"
#include "attention/operator.h"
#include "base/buffer_pool.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/admission/memory_budget.h"
#include "server/execution/executor.h"
#include "server/request.h"

namespace rapt {

struct StreamRequest {
  Problem problem;  // the whole problem
  Chunking chunking;
  Layout layout = Layout::kBhsd;  // of the chunks and of Y; kBhsd or kBshd
  std::vector<int64_t> key_lengths;
  // The data of the tensors that do not arrive in chunks, of the size that the problem states.
  InputMap<std::string> tensors;
  const FieldNames* names = &kOnnxNames;  // outlives the stream
  Instant deadline = Instant::max();
  const std::atomic<bool>* cancelled = nullptr;  // as in Request
  uint64_t priority = 0;                         // as in Request
  std::shared_ptr<CallerMemory> caller;          // as in Request
};

// Rows of Q, or of K and V, with the parts of mask and bias that belong to streaming rows.
// Row-major in the stream's layout. The problem and the number of rows determine the sizes.
struct StreamChunk {
  RowRange rows = {};
  InputBytes query = {}, key = {}, value = {}, mask = {}, bias = {};
};

// The result of a step.
struct StepResult {
  enum class Outputs : uint8_t {
    kNone,
    kScores,  // of keys `rows`
    kRows,    // of Y, and of lse and scores if requested
  };

  absl::Status status = absl::OkStatus();
  Outputs outputs = Outputs::kNone;
  RowRange rows = {};
  OutputBuffer y = {}, lse = {}, scores = {};
  double flops = 0;
  std::chrono::nanoseconds queue_time{0};
  std::chrono::nanoseconds compute_time{0};
};

// The resident tensors of a stream and its steps. First the chunks of the resident side are stored.
// Then the streaming chunks are folded in, one at a time and in order. If keys stream, the rows of
// the output are finished at the end.
//
// Engine::AdmitStream() reserves all memory once: the request's and the resident tensors, the
// running softmax, the workspace, and two result slots, one of which is filled while the other is
// sent. A step with results waits until a slot is free. Destruction releases everything except
// results that are still referenced.
//
// REQUIRES: one step at a time; the next may begin once `done` of the previous one has been called,
// on a compute thread. Until then the caller keeps the stream and the bytes of the chunk alive.
// Everything borrowed outlives the stream.
class AttentionStream : public std::enable_shared_from_this<AttentionStream> {
 public:
  using StepDone = absl::AnyInvocable<void(StepResult)>;

  AttentionStream(StreamRequest request, ChunkedPlan plan, Executor& executor);

  const ChunkedPlan& plan() const { return plan_; }
  const StreamRequest& request() const { return request_; }

  // Returns the bytes that Allocate() needs; ResourceExhausted on overflow.
  absl::StatusOr<int64_t> NeededBytes() const;
  // Call before the first step. `messages` is the reservation of the chunks held at a time.
  absl::Status Allocate(BufferPool& pool, MemoryBudget::Reservation messages,
                        MemoryBudget::Reservation reservation);

  void Keep(const StreamChunk& chunk, StepDone done);
  void Fold(const StreamChunk& chunk, StepDone done);
  void Finish(RowRange rows, StepDone done);

 private:
  static constexpr int kSlots = 2;
  using WithSlot = absl::AnyInvocable<void(int slot)>;

  // A buffer of the stream and its size.
  struct Part {
    int64_t bytes = 0;
    ReservedBuffer buffer;
    std::byte* data() const { return buffer.buffer.data(); }
  };
  // An input of a chunk that is copied to contiguous memory first.
  struct Gather {
    const InputBytes* source;
    std::byte* target;
  };

  int64_t HeaderBytes() const;
  int64_t GatheredBytes() const;
  void ViewChunk(const ResolvedCall& call);
  TensorView ViewInput(TensorView view, const InputBytes& bytes, bool reads_slices,
                       std::byte*& gathered);
  void RunFold(int slot, StepDone done);
  void RunFinish(RowRange rows, int slot, StepDone done);
  void Submit(Job job, StepResult result, StepDone done);

  void WhenSlotIsFree(WithSlot run);
  void ReturnSlot(int slot);
  std::shared_ptr<const void> Share(int slot);

  const StreamRequest request_;
  const ChunkedPlan plan_;
  Executor& executor_;

  MemoryBudget::Reservation messages_, header_;
  Part query_, key_, value_;  // of the resident side
  Part state_, workspace_, gathered_;
  int64_t slot_bytes_ = 0;
  std::array<std::shared_ptr<ReservedBuffer>, kSlots> slots_;  // shared with the results being sent

  // State of the current step.
  StreamChunk chunk_;
  Plan chunk_plan_;
  Arguments arguments_;
  std::vector<Gather> gathers_;

  Mutex mutex_;
  std::vector<int> free_slots_ ABSL_GUARDED_BY(mutex_);
  WithSlot waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_ATTENTION_STREAM_H_
