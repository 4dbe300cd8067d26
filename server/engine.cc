#include "server/engine.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/data_checks.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/mutex.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "server/rejection.h"

namespace rapt {
namespace {

class ReservedEncoding final : public EncodingMemory {
 public:
  explicit ReservedEncoding(MemoryBudget::Reservation reservation)
      : reservation_(std::move(reservation)) {}

  void Release(int64_t bytes) override { reservation_.Split(bytes); }

 private:
  MemoryBudget::Reservation reservation_;
};

// Below this a problem costs some tens of microseconds, about as much as waking a thread for it.
constexpr double kInlineFlops = 1e6;
// Few flops can still mean many bytes: zeros where no key is visible, the past copied to the
// present, a mask that is gathered.
constexpr int64_t kInlineBytes = 256 * 1024;

// An input that is copied to contiguous memory before the computation.
struct Gather {
  const InputBytes& source;
  TensorView& view;
  bool is_converted = false;  // by Request::write_mask
  ReservedBuffer copy = {};
  absl::Status status = absl::OkStatus();
};

// An output that is copied to a device after the computation.
struct Delivery {
  absl::Span<const std::byte> bytes;
  DevicePart target;
  absl::Status status = absl::OkStatus();
};

Arguments ViewInputs(const Request& request) {
  Arguments arguments;
  for (Role role : InputTensorsOf(request.call.problem)) {
    const InputBytes& bytes = request.inputs[role];
    TensorView& view = arguments.inputs[role];
    view = request.call.Input(role, bytes.data);
    if (bytes.in_slices()) view.slices = &bytes.slices;
  }
  arguments.key_lengths = request.key_lengths;
  if (request.tensor_operator == nullptr) return arguments;
  for (Slot slot : kAllInputs) arguments.inputs[slot].data = request.inputs[slot].data;
  return arguments;
}

// Adds the size of a buffer of `bytes`; nullopt on overflow.
void AddBuffer(std::optional<int64_t>& total, int64_t bytes) {
  if (total) total = CheckedAdd(*total, BufferPool::SizeOfClass(bytes));
}

}  // namespace

// A submitted request until `done` is called.
class Engine::PendingCall {
 public:
  explicit PendingCall(Request&& request) : request_(std::move(request)) {
    arguments_ = ViewInputs(request_);
  }
  virtual ~PendingCall() = default;

  AdmissionGate::MemoryRequest ToMemoryRequest() const {
    return {.share = AdmissionGate::Share::kCompute,
            .bytes = needed_bytes_,
            .priority = request_.priority,
            .deadline = request_.deadline,
            .cancelled = request_.cancelled,
            .caller = request_.caller};
  }

  void SetWaited(std::chrono::nanoseconds waited) { waited_ = waited; }

  // Allocates the admitted memory and validates the inputs' data.
  virtual absl::Status Allocate(BufferPool& pool, MemoryBudget::Reservation reservation) = 0;
  virtual void Run(std::unique_ptr<PendingCall> self, Executor& executor, bool may_run_inline) = 0;
  virtual void Refuse(absl::Status status) = 0;
  virtual bool WaitsForDevice() const { return false; }

 protected:
  const ResolvedCall& call() const { return request_.call; }

  void PlanGathers(bool backend_reads_slices) {
    const SlotSet copied = CopiedInputs();
    for (Role role : kAllInputs) {
      const InputBytes& source = request_.inputs[role];
      const bool is_copied = copied.contains(role);
      const bool is_converted = role == Role::kMask && request_.write_mask;
      if (is_converted || source.on_device() || (is_copied && source.is_shared) ||
          (source.in_slices() && (is_copied || !backend_reads_slices))) {
        gathers_.push_back({source, arguments_.inputs[role], is_converted});
      }
    }
  }

  bool GathersFromDevice() const {
    return std::any_of(gathers_.begin(), gathers_.end(),
                       [](const Gather& gather) { return gather.source.on_device(); });
  }

  void AddGathersTo(std::optional<int64_t>& total) const {
    for (const Gather& gather : gathers_) AddBuffer(total, gather.source.size);
  }

  // Allocates the copies, which RunGather() fills.
  absl::Status AllocateGathers(BufferPool& pool, MemoryBudget::Reservation& reservation) {
    for (Gather& gather : gathers_) {
      RAPT_ASSIGN_OR_RETURN(gather.copy, AllocatePart(pool, gather.source.size, reservation));
      gather.view.data = gather.copy.buffer.data();
      gather.view.slices = nullptr;
    }
    return absl::OkStatus();
  }

  absl::Status AllocatePreparation(BufferPool& pool, MemoryBudget::Reservation& reservation) {
    if (request_.preparation_bytes == 0) return absl::OkStatus();
    RAPT_ASSIGN_OR_RETURN(preparation_,
                          AllocatePart(pool, request_.preparation_bytes, reservation));
    return absl::OkStatus();
  }

  absl::Status SetNeeded(std::optional<int64_t> bytes) {
    if (!bytes) {
      return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                    "the size of the outputs overflows 64 bits");
    }
    needed_bytes_ = *bytes;
    return absl::OkStatus();
  }

  // Returns a job with the request's deadline and cancellation: the gathers, the checks of the
  // inputs' numbers, the preparation, then `stages` of `run_task`.
  template <typename Stages, typename RunTask>
  Job MakeJob(const Stages& stages, RunTask run_task) {
    Job job;
    job.priority = request_.priority;
    job.deadline = request_.deadline;
    job.cancelled = request_.cancelled;
    const int gathers = gathers_.empty() ? 0 : 1;
    if (gathers > 0) job.stages.push_back(static_cast<int64_t>(gathers_.size()));
    const int64_t checks = CountChecks();
    if (checks > 0) job.stages.push_back(checks);
    const int preparation = static_cast<int>(job.stages.size());
    if (request_.prepare) job.stages.push_back(1);
    const int first = static_cast<int>(job.stages.size());
    job.stages.insert(job.stages.end(), stages.begin(), stages.end());
    job.run_task = [this, gathers, preparation, first, run_task](
                       int stage, int64_t task, int worker, const Checkpoint& checkpoint) {
      if (stage < gathers) return RunGather(gathers_[task]);
      if (inputs_failed_ || !CheckSharedMemory().ok()) return;
      if (stage < preparation) {
        RunCheck(task);
      } else if (stage < first) {
        NoteInputs(request_.prepare(preparation_.buffer.span()));
        preparation_ = {};
      } else {
        run_task(stage - first, task, worker, checkpoint);
      }
    };
    return job;
  }

  absl::Status StatusOf(const JobReport& report) const {
    absl::Status status = report.status;
    status.Update(CheckSharedMemory());
    for (const Gather& gather : gathers_) status.Update(gather.status);
    MutexLock lock(check_mutex_);
    status.Update(check_status_);
    return status;
  }

  absl::Status CheckSharedMemory() const {
    return request_.check_shared_memory ? request_.check_shared_memory() : absl::OkStatus();
  }

  void ReleaseGathers() { gathers_.clear(); }

  Request request_;
  Arguments arguments_;
  int64_t needed_bytes_ = 0;
  std::chrono::nanoseconds waited_{0};

 private:
  void RunGather(Gather& gather) {
    const absl::Span<std::byte> copy = gather.copy.buffer.span();
    gather.status = gather.is_converted ? request_.write_mask(copy)
                                        : gather.source.Fetch(0, gather.source.size, copy.data());
    if (!gather.status.ok()) inputs_failed_ = true;
  }

  SlotSet CopiedInputs() const {
    if (request_.tensor_operator != nullptr) return request_.tensor_operator->copied_inputs();
    static const SlotSet kOfAttention = [] {
      SlotSet copied;
      for (Role role : kAllInputs) copied.Add(role, InfoOf(role).source == Source::kStrided);
      return copied;
    }();
    return kOfAttention;
  }

  int64_t CountChecks() const {
    if (request_.tensor_operator == nullptr) return DataChecks(call().problem);
    return request_.tensor_operator->checks_data() ? 1 : 0;
  }

  // Numbers are checked where they are used, as the caller may write to shared memory at any time.
  void RunCheck(int64_t task) {
    NoteInputs(request_.tensor_operator == nullptr
                   ? CheckData(call().problem, arguments_, task, *call().names)
                   : request_.tensor_operator->CheckData(arguments_));
  }

  // After an error no further task runs.
  void NoteInputs(const absl::Status& status) {
    if (status.ok()) return;
    MutexLock lock(check_mutex_);
    check_status_.Update(status);
    inputs_failed_ = true;
  }

  std::vector<Gather> gathers_;
  ReservedBuffer preparation_;
  std::atomic<bool> inputs_failed_{false};
  mutable Mutex check_mutex_;
  absl::Status check_status_ ABSL_GUARDED_BY(check_mutex_);
};

// A request from Submit() until `done` is called.
class Engine::PendingAttention final : public Engine::PendingCall {
 public:
  PendingAttention(Request&& request, Done done)
      : PendingCall(std::move(request)), done_(std::move(done)) {}

  absl::Status MakePlan(const PlanOptions& options) {
    const bool is_attention = request_.tensor_operator == nullptr;
    RAPT_ASSIGN_OR_RETURN(plan_, is_attention
                                     ? ::rapt::MakePlan(call().problem, options)
                                     : ::rapt::MakePlan(*request_.tensor_operator, options));
    const Routing& routing = plan_.routing;
    if (routing.declined_for_now) {
      is_attention ? routing.declined->Prepare(plan_.problem)
                   : request_.tensor_operator->PrepareOn(*routing.declined);
    }
    arguments_.piece_fallback = &piece_fallback_;
    result_.routing = routing;
    result_.plan = plan_.Describe();
    result_.flops = plan_.flops;
    PlanGathers(is_attention && routing.backend->Reads(Source::kSliced));

    std::optional<int64_t> needed_bytes = 0;
    for (Slot slot : request_.Outputs()) {
      if (IsInCallersMemory(slot)) {
        callers_bytes_ += BytesOf(slot);  // of existing memory, so no overflow
      } else {
        AddBuffer(needed_bytes, BytesOf(slot));
      }
    }
    AddBuffer(needed_bytes, plan_.workspace_bytes());
    if (request_.preparation_bytes > 0) AddBuffer(needed_bytes, request_.preparation_bytes);
    if (needed_bytes) needed_bytes = CheckedAdd(*needed_bytes, request_.encoding_bytes);
    AddGathersTo(needed_bytes);
    return SetNeeded(needed_bytes);
  }

  absl::Status Allocate(BufferPool& pool, MemoryBudget::Reservation reservation) override {
    RAPT_RETURN_IF_ERROR(AllocatePreparation(pool, reservation));
    if (request_.encoding_bytes > 0) {
      result_.encoding_memory =
          std::make_shared<ReservedEncoding>(reservation.Split(request_.encoding_bytes));
    }
    for (Slot slot : request_.Outputs()) {
      const OutputPlace& place = request_.places[slot];
      OutputBuffer& output = result_.outputs[slot];
      if (IsInCallersMemory(slot)) {
        arguments_.outputs[slot] = ViewOf(slot, place.bytes.data());
        output = {place.bytes, nullptr};
        continue;
      }
      RAPT_ASSIGN_OR_RETURN(ReservedBuffer taken, AllocatePart(pool, BytesOf(slot), reservation));
      auto owner = std::make_shared<ReservedBuffer>(std::move(taken));
      arguments_.outputs[slot] = ViewOf(slot, owner->buffer.data());
      if (place.device.memory != nullptr) {
        deliveries_.push_back({owner->buffer.span(), place.device});
      }
      output = {owner->buffer.span(), std::move(owner)};
    }
    RAPT_ASSIGN_OR_RETURN(workspace_, AllocatePart(pool, plan_.workspace_bytes(), reservation));
    RAPT_RETURN_IF_ERROR(AllocateGathers(pool, reservation));
    if (request_.tensor_operator != nullptr) return absl::OkStatus();
    return Validate(call().problem, arguments_, *call().names);
  }

  void Run(std::unique_ptr<PendingCall> self, Executor& executor, bool may_run_inline) override {
    auto stages = plan_.stages;
    if (!deliveries_.empty()) stages.push_back(static_cast<int64_t>(deliveries_.size()));
    Job job =
        MakeJob(stages, [this](int stage, int64_t task, int worker, const Checkpoint& checkpoint) {
          if (stage == static_cast<int>(plan_.stages.size())) return Deliver(deliveries_[task]);
          RunPlanTask(stage, task, worker, checkpoint);
        });
    job.task_cost = plan_.task_flops();
    const BatchGroup* const group = plan_.batch_group();
    if (group != nullptr && IsSingleTask(job)) job.batch_group = MakeBatchGroup(*group);
    job.done = [this, self = std::move(self)](const JobReport& report) {
      result_.ended_in = Stage::kCompute;
      Finish(report);
    };
    if (may_run_inline && IsTiny()) {
      executor.RunInline(std::move(job));
    } else {
      executor.Submit(std::move(job));
    }
  }

  void Refuse(absl::Status status) override { Finish({.status = std::move(status)}); }
  bool WaitsForDevice() const override { return plan_.routing.backend->lanes() > 0; }

 private:
  void RunPlanTask(int stage, int64_t task, int worker, const Checkpoint& checkpoint) {
    std::byte* const workspace = workspace_.buffer.data();
    if (request_.tensor_operator != nullptr) {
      return request_.tensor_operator->RunTask(plan_, arguments_, workspace, stage, task, worker,
                                               checkpoint);
    }
    plan_.routing.backend->RunTask(plan_, arguments_, workspace, stage, task, worker, checkpoint);
  }

  // Copies before or after the computation are tasks, too.
  static bool IsSingleTask(const Job& job) {
    return job.stages.size() == 1 && job.stages.front() == 1;
  }

  JobBatchGroup MakeBatchGroup(const BatchGroup& group) {
    return {.name = absl::StrCat(plan_.routing.backend->name(), " ", group.key),
            .batch_cost = group.cost,
            .run_batch = RunBatch,
            .member = this};
  }

  // Skips members whose shared memory was revoked; they fail when run individually.
  static void RunBatch(absl::Span<BatchMember> batch, int worker) {
    std::vector<BatchMember*> valid;
    std::vector<Backend::BatchMember> members;
    for (BatchMember& member : batch) {
      const PendingAttention& attention = *static_cast<const PendingAttention*>(member.job);
      if (!attention.CheckSharedMemory().ok()) continue;
      valid.push_back(&member);
      members.push_back({&attention.plan_, &attention.arguments_});
    }
    if (members.size() < 2) return;
    members.front().plan->routing.backend->RunBatch(absl::MakeSpan(members), worker);
    for (size_t n = 0; n < members.size(); ++n) valid[n]->done = members[n].done;
  }

  static void Deliver(Delivery& delivery) {
    delivery.status = delivery.target.memory->Write(delivery.target.offset, delivery.bytes);
  }

  // A copy waits for the device, which must not block the thread that submits the request.
  bool IsTiny() const {
    if (GathersFromDevice() || !deliveries_.empty() || request_.leaves_thread) return false;
    const int64_t workspace_bytes = BufferPool::SizeOfClass(plan_.workspace_bytes());
    return plan_.flops <= kInlineFlops &&
           needed_bytes_ - workspace_bytes + callers_bytes_ + request_.prepared_bytes <=
               kInlineBytes;
  }

  // An operator other than attention knows the axes.
  MutableTensorView ViewOf(Slot slot, std::byte* data) const {
    if (request_.tensor_operator == nullptr) return call().Output(slot.role(), data);
    return {data, call().outputs[slot].dtype};
  }

  // Returns whether the output is written to memory of the caller.
  bool IsInCallersMemory(Slot slot) const { return request_.places[slot].bytes.data() != nullptr; }
  int64_t BytesOf(Slot slot) const {
    return ByteSize("output", call().outputs[slot]).value();  // Resolve() has checked it
  }

  void Finish(const JobReport& report) {
    workspace_ = {};  // released before the caller receives the response
    result_.status = StatusOf(report);
    ReleaseGathers();
    for (const Delivery& delivery : deliveries_) result_.status.Update(delivery.status);
    result_.queue_time = waited_ + report.queue_time;
    result_.compute_time = report.compute_time;
    result_.routing.piece_fallback = piece_fallback_;
    if (result_.status.ok()) result_.batch_size = report.batch_size;
    if (!result_.status.ok()) {
      result_.outputs = {};
      result_.encoding_memory = nullptr;
    }
    done_(std::move(result_));
  }

  Done done_;
  Result result_;
  Plan plan_;
  std::atomic<const Backend*> piece_fallback_{nullptr};
  ReservedBuffer workspace_;
  std::vector<Delivery> deliveries_;
  int64_t callers_bytes_ = 0;  // of outputs in the caller's memory
};

// A request from Diagnose() until `done` is called.
class Engine::PendingDiagnosis final : public Engine::PendingCall {
 public:
  PendingDiagnosis(Request&& request, const PlanOptions& options, int workers, DiagnosisDone done)
      : PendingCall(std::move(request)),
        options_(options),
        workers_(workers),
        done_(std::move(done)) {}

  absl::Status Measure() {
    PlanGathers(/*backend_reads_slices=*/false);
    std::optional<int64_t> needed_bytes = 0;
    AddBuffer(needed_bytes, WorkspaceBytes());
    AddGathersTo(needed_bytes);
    return SetNeeded(needed_bytes);
  }

  absl::Status Allocate(BufferPool& pool, MemoryBudget::Reservation reservation) override {
    RAPT_ASSIGN_OR_RETURN(workspace_, AllocatePart(pool, WorkspaceBytes(), reservation));
    RAPT_RETURN_IF_ERROR(AllocateGathers(pool, reservation));
    absl::Status status = ValidateInputs(call().problem, arguments_, *call().names);
    if (status.ok()) {
      diagnosis_.emplace(call().problem, arguments_, workers_, *call().names);
    }
    return status;
  }

  void Run(std::unique_ptr<PendingCall> self, Executor& executor, bool) override {
    Job job = MakeJob(diagnosis_->stages(), [this](int stage, int64_t task, int worker,
                                                   const Checkpoint& checkpoint) {
      diagnosis_->RunTask(stage, task, worker, workspace_.buffer.data(), checkpoint);
    });
    job.done = [this, self = std::move(self)](const JobReport& report) { Finish(report); };
    executor.Submit(std::move(job));
  }

  void Refuse(absl::Status status) override { done_(std::move(status)); }

 private:
  int64_t WorkspaceBytes() const { return Diagnosis::WorkspaceBytes(call().problem, workers_); }

  void Finish(const JobReport& report) {
    workspace_ = {};  // released before the caller receives the response
    absl::Status status = StatusOf(report);
    if (!status.ok()) return done_(std::move(status));
    DiagnosisReport diagnosis = diagnosis_->Finish(options_);
    ReleaseGathers();
    done_(std::move(diagnosis));
  }

  const PlanOptions& options_;
  const int workers_;
  DiagnosisDone done_;
  std::optional<Diagnosis> diagnosis_;
  ReservedBuffer workspace_;
};

namespace {

PlanOptions WithLanes(PlanOptions options, bool has_lanes) {
  options.has_lanes = has_lanes;
  return options;
}

}  // namespace

Engine::Engine(PlanOptions options, AdmissionGate& gate, BufferPool& pool, Executor& executor,
               Executor* lanes)
    : options_(WithLanes(std::move(options), lanes != nullptr)),
      gate_(gate),
      pool_(pool),
      executor_(executor),
      lanes_(lanes) {
  RAPT_CHECK(options_.threads == executor_.threads(),
             "the plan options must have the executor's number of threads");
}

void Engine::AdmitMessage(int64_t bytes, Instant deadline, const std::atomic<bool>& cancelled,
                          std::shared_ptr<CallerMemory> caller, MessageAdmitted admitted) {
  if (absl::Status status = CheckAccepting(); !status.ok()) return admitted(std::move(status));
  if (bytes == 0) return admitted(MessageReservation());
  AdmitNextMessage(bytes, deadline, cancelled, std::move(caller), std::move(admitted));
}

void Engine::AdmitNextMessage(int64_t bytes, Instant deadline, const std::atomic<bool>& cancelled,
                              std::shared_ptr<CallerMemory> caller, MessageAdmitted admitted) {
  const AdmissionGate::MemoryRequest memory = {.share = AdmissionGate::Share::kReceive,
                                               .bytes = bytes,
                                               .deadline = deadline,
                                               .cancelled = &cancelled,
                                               .caller = std::move(caller)};
  auto on_result = [admitted = std::move(admitted)](AdmissionGate::Result result) mutable {
    if (!result.ok()) return admitted(result.status());
    admitted(std::move(result->reservation));
  };
  AdmitOrQueue(memory, std::move(on_result));
}

template <typename Callback>
void Engine::AdmitOrQueue(const AdmissionGate::MemoryRequest& memory, Callback callback) {
  if (auto result = gate_.AdmitNow(memory)) return callback(*std::move(result));
  gate_.Queue(memory, std::move(callback));
}

void Engine::Submit(Request&& request, Done done) {
  absl::Status status = CheckAccepting(request);
  auto attention = std::make_unique<PendingAttention>(std::move(request), std::move(done));
  if (status.ok()) status = attention->MakePlan(options_);
  if (!status.ok()) return attention->Refuse(std::move(status));
  Admit(std::move(attention));
}

void Engine::Diagnose(Request request, DiagnosisDone done) {
  absl::Status status = CheckAccepting(request);
  auto diagnosis = std::make_unique<PendingDiagnosis>(std::move(request), options_,
                                                      executor_.threads(), std::move(done));
  if (status.ok()) status = diagnosis->Measure();
  if (!status.ok()) return diagnosis->Refuse(std::move(status));
  Admit(std::move(diagnosis));
}

void Engine::Admit(std::unique_ptr<PendingCall> pending) {
  const AdmissionGate::MemoryRequest memory = pending->ToMemoryRequest();
  if (auto result = gate_.AdmitNow(memory)) {
    return Start(std::move(pending), *std::move(result), /*at_once=*/true);
  }
  gate_.Queue(memory, [this, pending = std::move(pending)](AdmissionGate::Result result) mutable {
    Start(std::move(pending), std::move(result), /*at_once=*/false);
  });
}

void Engine::Start(std::unique_ptr<PendingCall> pending, AdmissionGate::Result result,
                   bool at_once) {
  if (!result.ok()) return pending->Refuse(result.status());
  pending->SetWaited(result->waited);
  absl::Status status = pending->Allocate(pool_, std::move(result->reservation));
  if (!status.ok()) return pending->Refuse(std::move(status));
  PendingCall& started = *pending;
  // Even a tiny request must wait for a device on a lane's thread.
  if (started.WaitsForDevice()) return started.Run(std::move(pending), *lanes_, false);
  // Alarms on the timer's thread must be short, so nothing is computed there.
  started.Run(std::move(pending), executor_, /*may_run_inline=*/at_once);
}

absl::StatusOr<std::shared_ptr<AttentionStream>> Engine::PlanStream(StreamRequest request) {
  RAPT_RETURN_IF_ERROR(CheckAccepting());
  const FieldNames& names = *request.names;
  // All chunks of a stream run on the compute threads.
  RAPT_ASSIGN_OR_RETURN(ChunkedPlan plan, MakeChunkedPlan(request.problem, request.chunking,
                                                          WithLanes(options_, false), names));
  RAPT_RETURN_IF_ERROR(ValidateKeyLengths(request.problem, request.key_lengths, names));
  return std::make_shared<AttentionStream>(std::move(request), std::move(plan), executor_);
}

void Engine::AdmitStream(std::shared_ptr<AttentionStream> stream, int64_t message_bytes,
                         StreamAdmitted admitted) {
  const absl::StatusOr<int64_t> needed_bytes = stream->NeededBytes();
  if (!needed_bytes.ok()) return admitted(needed_bytes.status());
  const StreamRequest& request = stream->request();
  const AdmissionGate::MemoryRequest memory = {.share = AdmissionGate::Share::kCompute,
                                               .bytes = *needed_bytes,
                                               .priority = request.priority,
                                               .deadline = request.deadline,
                                               .cancelled = request.cancelled,
                                               .caller = request.caller};
  AdmitMessage(
      message_bytes, request.deadline, *request.cancelled, request.caller,
      [this, memory, stream = std::move(stream),
       admitted = std::move(admitted)](absl::StatusOr<MessageReservation> messages) mutable {
        if (!messages.ok()) return admitted(messages.status());
        AdmitOrQueue(memory, [this, stream = std::move(stream), messages = *std::move(messages),
                              admitted =
                                  std::move(admitted)](AdmissionGate::Result result) mutable {
          if (!result.ok()) return admitted(result.status());
          admitted(stream->Allocate(pool_, std::move(messages), std::move(result->reservation)));
        });
      });
}

absl::Status Engine::CheckAccepting() const {
  if (accepting()) return absl::OkStatus();
  return Reject(Rejection::kDraining, absl::StatusCode::kUnavailable,
                "the server is draining and accepts no new requests");
}

absl::Status Engine::CheckAccepting(const Request& request) const {
  return request.is_accepted ? absl::OkStatus() : CheckAccepting();
}

}  // namespace rapt
