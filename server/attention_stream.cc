#include "server/attention_stream.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/backend.h"
#include "base/checked_math.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "server/rejection.h"

namespace rapt {
namespace {

int64_t Aligned(int64_t bytes) { return RoundUp(bytes, PooledBuffer::kAlignment); }

// Cannot overflow: Validate() has checked the products of the problem's axes.
int64_t QueryBytes(const Problem& p, int64_t rows) {
  return p.batch * p.query_heads * rows * p.head_size * SizeOf(p.dtype);
}
int64_t KeyBytes(const Problem& p, int64_t rows) {
  return p.batch * p.kv_heads * rows * p.head_size * SizeOf(p.dtype);
}
int64_t ValueBytes(const Problem& p, int64_t rows) {
  return p.batch * p.kv_heads * rows * p.value_head_size * SizeOf(p.dtype);
}
int64_t MaskBytes(const std::optional<MaskShape>& mask) {
  if (!mask) return 0;
  return mask->dims[0] * mask->dims[1] * mask->dims[2] * mask->dims[3] * SizeOf(mask->dtype);
}

// The sizes of a problem's outputs, which share one buffer.
struct OutputSizes {
  int64_t y = 0, lse = 0, scores = 0;

  int64_t lse_begin() const { return Aligned(y); }
  int64_t scores_begin() const { return lse_begin() + Aligned(lse); }
  int64_t total() const { return scores_begin() + scores; }
};

OutputSizes SizesOf(const Problem& p) {
  const int64_t rows = p.batch * p.query_heads * p.query_length;
  OutputSizes sizes;
  if (!p.folds) {
    sizes.y = rows * p.value_head_size * SizeOf(p.dtype);
    if (p.wants_lse) sizes.lse = rows * SizeOf(p.lse_dtype());
  }
  if (p.score_output) sizes.scores = rows * p.total_keys() * SizeOf(p.dtype);
  return sizes;
}

// The problem of finishing rows if keys stream; scores have been returned before.
Problem FinishedRows(const Problem& whole, int64_t count) {
  Problem rows = whole;
  rows.query_length = count;
  rows.score_output.reset();
  return rows;
}

void SetOutputs(const Problem& p, const std::byte* data, std::shared_ptr<const void> owner,
                StepResult& result) {
  const OutputSizes sizes = SizesOf(p);
  const auto output = [&](int64_t begin, int64_t bytes) {
    return OutputBuffer{{data + begin, static_cast<size_t>(bytes)}, owner};
  };
  result.outputs = p.folds ? StepResult::Outputs::kScores : StepResult::Outputs::kRows;
  result.y = output(0, sizes.y);
  result.lse = output(sizes.lse_begin(), sizes.lse);
  result.scores = output(sizes.scores_begin(), sizes.scores);
}

// Copies a chunk's rows to the resident tensors: one run per head, or per batch row if the layout
// stores its heads contiguously.
struct RowsToKeep {
  const InputBytes* source;
  std::byte* target;
  int64_t runs;
  int64_t row_bytes;
  int64_t length;  // total number of rows

  void CopyRun(int64_t run, RowRange rows) const {
    source->Copy(run * rows.count * row_bytes, rows.count * row_bytes,
                 target + (run * length + rows.begin) * row_bytes);
  }
};

}  // namespace

AttentionStream::AttentionStream(StreamRequest request, ChunkedPlan plan, Executor& executor)
    : request_(std::move(request)), plan_(std::move(plan)), executor_(executor) {
  const Problem& p = plan_.problem;
  if (plan_.keys_stream()) {
    query_.bytes = QueryBytes(p, p.query_length);
  } else {
    key_.bytes = KeyBytes(p, p.total_keys());
    value_.bytes = ValueBytes(p, p.total_keys());
  }
  state_.bytes = plan_.state_bytes;
  workspace_.bytes = plan_.workspace_bytes;
  gathered_.bytes = GatheredBytes();
  slot_bytes_ = SizesOf(plan_.full.problem).total();
  if (plan_.keys_stream()) {
    const Problem finished = FinishedRows(p, plan_.chunking.query_chunk);
    slot_bytes_ = std::max(slot_bytes_, SizesOf(finished).total());
  }
}

int64_t AttentionStream::HeaderBytes() const {
  auto bytes = static_cast<int64_t>(request_.key_lengths.size() * sizeof(int64_t));
  for (Role role : kInputTensors) bytes += static_cast<int64_t>(request_.tensors[role].size());
  return bytes;
}

// Mask and bias must be contiguous, and all inputs if the backend does not read slices.
int64_t AttentionStream::GatheredBytes() const {
  const Problem& chunk = plan_.full.problem;
  const int64_t bytes = Aligned(MaskBytes(chunk.mask)) + Aligned(MaskBytes(chunk.bias));
  if (plan_.full.routing.backend->Reads(Source::kSliced)) return bytes;
  if (!plan_.keys_stream()) return bytes + Aligned(QueryBytes(chunk, chunk.query_length));
  return bytes + Aligned(KeyBytes(chunk, chunk.key_length)) +
         Aligned(ValueBytes(chunk, chunk.key_length));
}

absl::StatusOr<int64_t> AttentionStream::NeededBytes() const {
  std::optional<int64_t> total = HeaderBytes();
  for (const int64_t bytes : {query_.bytes, key_.bytes, value_.bytes, state_.bytes,
                              workspace_.bytes, gathered_.bytes, slot_bytes_, slot_bytes_}) {
    if (total) total = CheckedAdd(*total, BufferPool::SizeOfClass(bytes));
  }
  if (total) return *total;
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                "the size of the stream's memory overflows 64 bits");
}

absl::Status AttentionStream::Allocate(BufferPool& pool, MemoryBudget::Reservation messages,
                                       MemoryBudget::Reservation reservation) {
  messages_ = std::move(messages);
  header_ = reservation.Split(HeaderBytes());
  for (Part* part : {&query_, &key_, &value_, &state_, &workspace_, &gathered_}) {
    RAPT_ASSIGN_OR_RETURN(part->buffer, AllocatePart(pool, part->bytes, reservation));
  }
  MutexLock lock(mutex_);
  for (int slot = 0; slot < kSlots; ++slot) {
    RAPT_ASSIGN_OR_RETURN(ReservedBuffer buffer, AllocatePart(pool, slot_bytes_, reservation));
    slots_[slot] = std::make_shared<ReservedBuffer>(std::move(buffer));
    free_slots_.push_back(slot);
  }
  if (plan_.keys_stream()) {
    arguments_.state = StateIn(plan_.problem, plan_.full.state_dtype, state_.data());
  }
  ResolvedCall whole;
  whole.problem = plan_.problem;
  for (Role role : kInputTensors) {
    const std::string& data = request_.tensors[role];
    if (data.empty()) continue;
    arguments_.inputs[role] = whole.Input(role, reinterpret_cast<const std::byte*>(data.data()));
  }
  return ValidateAlphas(plan_.problem, arguments_, *request_.names);
}

void AttentionStream::Keep(const StreamChunk& chunk, StepDone done) {
  chunk_ = chunk;
  const Problem& p = plan_.problem;
  const auto rows_of = [&](const InputBytes& source, const Part& part, int64_t heads,
                           int64_t length, int64_t size) {
    const int64_t row_bytes = size * SizeOf(p.dtype);
    return request_.layout == Layout::kBhsd
               ? RowsToKeep{&source, part.data(), p.batch * heads, row_bytes, length}
               : RowsToKeep{&source, part.data(), p.batch, heads * row_bytes, length};
  };
  std::vector<RowsToKeep> tensors;
  if (plan_.keys_stream()) {
    tensors = {rows_of(chunk_.query, query_, p.query_heads, p.query_length, p.head_size)};
  } else {
    tensors = {rows_of(chunk_.key, key_, p.kv_heads, p.total_keys(), p.head_size),
               rows_of(chunk_.value, value_, p.kv_heads, p.total_keys(), p.value_head_size)};
  }
  Job job;
  const int64_t runs = tensors[0].runs;
  const auto copies = static_cast<int64_t>(tensors.size()) * runs;
  // The running softmax of these rows is initialised by tasks, which can be cancelled and
  // interrupted.
  const int64_t heads = plan_.keys_stream() ? p.batch * p.query_heads : 0;
  job.stages = {copies + heads};
  job.run_task = [this, runs, copies, tensors = std::move(tensors)](int, int64_t task, int,
                                                                    const Checkpoint&) {
    if (task >= copies) return ClearRows(arguments_.state, chunk_.rows, task - copies);
    tensors[task / runs].CopyRun(task % runs, chunk_.rows);
  };
  Submit(std::move(job), {.rows = chunk_.rows}, std::move(done));
}

void AttentionStream::Fold(const StreamChunk& chunk, StepDone done) {
  chunk_ = chunk;
  const int64_t step = plan_.keys_stream() ? plan_.chunking.key_chunk : plan_.chunking.query_chunk;
  chunk_plan_ = plan_.PlanOf(chunk_.rows.begin / step);
  const Problem& p = chunk_plan_.problem;
  if (p.folds && !p.score_output) return RunFold(/*slot=*/-1, std::move(done));
  WhenSlotIsFree(
      [this, done = std::move(done)](int slot) mutable { RunFold(slot, std::move(done)); });
}

// Returns the view of a chunk's tensor. It is gathered at `gathered` if the backend cannot read its
// slices.
TensorView AttentionStream::ViewInput(TensorView view, const InputBytes& bytes, bool reads_slices,
                                      std::byte*& gathered) {
  if (!bytes.in_slices()) return view;
  if (reads_slices) {
    view.slices = &bytes.slices;
    return view;
  }
  gathers_.push_back({&bytes, gathered});
  view.data = gathered;
  gathered += Aligned(bytes.size);
  return view;
}

void AttentionStream::ViewChunk(const ResolvedCall& call) {
  const bool reads_slices = chunk_plan_.routing.backend->Reads(Source::kSliced);
  std::byte* gathered = gathered_.data();
  const auto view = [&](Role role, const InputBytes& bytes, const Part& kept, bool stays) {
    if (stays) return call.Input(role, kept.data());
    return ViewInput(call.Input(role, bytes.data), bytes, reads_slices, gathered);
  };
  const bool keys_stream = plan_.keys_stream();
  gathers_.clear();
  arguments_.inputs[Role::kQ] = view(Role::kQ, chunk_.query, query_, keys_stream);
  arguments_.inputs[Role::kK] = view(Role::kK, chunk_.key, key_, !keys_stream);
  arguments_.inputs[Role::kV] = view(Role::kV, chunk_.value, value_, !keys_stream);
  const auto view_mask = [&](Role role, const InputBytes& bytes) {
    arguments_.inputs[role] = ViewInput(call.Input(role, bytes.data), bytes, false, gathered);
  };
  if (call.problem.mask) view_mask(Role::kMask, chunk_.mask);
  if (call.problem.bias) view_mask(Role::kBias, chunk_.bias);
  arguments_.key_lengths = request_.key_lengths;
}

void AttentionStream::RunFold(int slot, StepDone done) {
  const Problem& p = chunk_plan_.problem;
  ResolvedCall call;
  call.problem = p;
  call.layout = request_.layout;
  ViewChunk(call);
  StepResult result{.rows = chunk_.rows, .flops = chunk_plan_.flops};
  if (slot >= 0) {
    const OutputSizes sizes = SizesOf(p);
    std::byte* const data = slots_[slot]->buffer.data();
    arguments_.outputs[Role::kY] = call.Output(Role::kY, data);
    arguments_.outputs[Role::kLse] = call.Output(Role::kLse, data + sizes.lse_begin());
    arguments_.outputs[Role::kScores] = call.Output(Role::kScores, data + sizes.scores_begin());
    SetOutputs(p, data, Share(slot), result);
  }
  Job job;
  if (!gathers_.empty()) job.stages.push_back(static_cast<int64_t>(gathers_.size()));
  const int first = static_cast<int>(job.stages.size());
  job.stages.insert(job.stages.end(), chunk_plan_.stages.begin(), chunk_plan_.stages.end());
  job.run_task = [this, first](int stage, int64_t task, int worker, const Checkpoint& checkpoint) {
    if (stage < first) {
      const Gather& gather = gathers_[task];
      return gather.source->Copy(0, gather.source->size, gather.target);
    }
    chunk_plan_.routing.backend->RunTask(chunk_plan_, arguments_, workspace_.data(), stage - first,
                                         task, worker, checkpoint);
  };
  job.task_cost = chunk_plan_.task_flops();
  Submit(std::move(job), std::move(result), std::move(done));
}

void AttentionStream::Finish(RowRange rows, StepDone done) {
  WhenSlotIsFree([this, rows, done = std::move(done)](int slot) mutable {
    RunFinish(rows, slot, std::move(done));
  });
}

void AttentionStream::RunFinish(RowRange rows, int slot, StepDone done) {
  ResolvedCall call;
  call.problem = FinishedRows(plan_.problem, rows.count);
  call.layout = request_.layout;
  std::byte* const data = slots_[slot]->buffer.data();
  const MutableTensorView output = call.Output(Role::kY, data);
  const MutableTensorView lse = call.Output(Role::kLse, data + SizesOf(call.problem).lse_begin());
  StepResult result{.rows = rows};
  SetOutputs(call.problem, data, Share(slot), result);
  Job job;
  job.stages = {call.problem.batch * call.problem.query_heads};
  job.run_task = [this, rows, output, lse](int, int64_t task, int, const Checkpoint&) {
    FinishRows(plan_.problem, arguments_, rows.begin, output, lse, task);
  };
  Submit(std::move(job), std::move(result), std::move(done));
}

void AttentionStream::Submit(Job job, StepResult result, StepDone done) {
  job.priority = request_.priority;
  job.deadline = request_.deadline;
  job.cancelled = request_.cancelled;
  job.done = [result = std::move(result), done = std::move(done)](const JobReport& report) mutable {
    result.status = report.status;
    result.queue_time = report.queue_time;
    result.compute_time = report.compute_time;
    done(std::move(result));
  };
  executor_.Submit(std::move(job));
}

void AttentionStream::WhenSlotIsFree(WithSlot run) {
  int slot;
  {
    MutexLock lock(mutex_);
    if (free_slots_.empty()) {
      waiting_ = std::move(run);
      return;
    }
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  run(slot);
}

// Runs on the network thread that has written the last of a response: submits at most one job.
void AttentionStream::ReturnSlot(int slot) {
  WithSlot run;
  {
    MutexLock lock(mutex_);
    if (waiting_ == nullptr) return free_slots_.push_back(slot);
    run = std::exchange(waiting_, nullptr);
  }
  run(slot);
}

std::shared_ptr<const void> AttentionStream::Share(int slot) {
  // A result may outlive the stream; its slot is then freed with the buffer.
  return {slots_[slot].get(),
          [buffer = slots_[slot], stream = weak_from_this(), slot](const void*) {
            if (const auto alive = stream.lock()) alive->ReturnSlot(slot);
          }};
}

}  // namespace rapt
