#include "server/engine.h"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "server/attention/attention.h"
#include "server/attention/backend.h"
#include "server/base/check.h"
#include "server/base/checked_math.h"

namespace rapt {
namespace {

// Below this a problem costs some tens of microseconds, about as much as waking a thread for it.
constexpr double kInlineFlops = 1e6;
// Few flops can still mean many bytes: zeros where no key is visible, the past copied to the
// present.
constexpr int64_t kInlineOutputBytes = 256 * 1024;

// One output of a call: how large it is, where it goes, how the kernels see it.
struct OutputSlot {
  const TensorSpec& spec;
  bool wanted;
  OutputBuffer& buffer;
  MutableTensorView& view;
  MutableTensorView (ResolvedCall::*view_of)(std::byte*) const;
  int64_t bytes = 0;
};

// What the outputs need altogether; nothing where that overflows.
std::optional<int64_t> MeasureOutputs(absl::Span<OutputSlot> slots) {
  std::optional<int64_t> total = 0;
  for (OutputSlot& slot : slots) {
    if (!slot.wanted) continue;
    slot.bytes = ByteSize("output", slot.spec).value();  // Resolve() has checked it
    if (total) total = CheckedAdd(*total, slot.bytes);
  }
  return total;
}

absl::StatusOr<std::shared_ptr<ReservedBuffer>> AllocateShared(
    MemoryBudget::Reservation reservation) {
  absl::StatusOr<ReservedBuffer> allocated = Allocate(std::move(reservation));
  if (!allocated.ok()) return allocated.status();
  return std::make_shared<ReservedBuffer>(*std::move(allocated));
}

absl::Status AllocateOutput(const ResolvedCall& call, MemoryBudget::Reservation reservation,
                            OutputSlot& slot) {
  absl::StatusOr<std::shared_ptr<ReservedBuffer>> owner = AllocateShared(std::move(reservation));
  if (!owner.ok()) return owner.status();
  slot.view = (call.*slot.view_of)((*owner)->buffer.data());
  slot.buffer.bytes = (*owner)->buffer.span();
  slot.buffer.owner = *std::move(owner);
  return absl::OkStatus();
}

Arguments ViewInputs(const ResolvedCall& call, const Inputs& inputs) {
  Arguments arguments;
  arguments.query = call.Query(inputs.query);
  arguments.key = call.Key(inputs.key);
  arguments.value = call.Value(inputs.value);
  if (call.problem.mask) arguments.mask = call.Mask(inputs.mask);
  if (inputs.past_key != nullptr) arguments.past_key = call.PastKey(inputs.past_key);
  if (inputs.past_value != nullptr) arguments.past_value = call.PastValue(inputs.past_value);
  arguments.key_lengths = inputs.key_lengths;
  return arguments;
}

// A job that ends when its request does; its tasks and its done are still to be said.
Job JobFor(const Request& request) {
  Job job;
  job.deadline = request.deadline;
  job.cancelled = request.cancelled;
  return job;
}

bool IsTiny(const Plan& plan, int64_t output_bytes) {
  return plan.flops <= kInlineFlops && output_bytes <= kInlineOutputBytes;
}

}  // namespace

// A request from Submit() to its done.
struct Engine::Flight {
  void Finish(const JobReport& report) {
    workspace = {};  // back to the budget before the caller has its answer
    result.status = report.status;
    result.queue_time = report.queue_time;
    result.compute_time = report.compute_time;
    if (!result.status.ok()) {
      for (OutputBuffer* output :
           {&result.y, &result.lse, &result.scores, &result.present_key, &result.present_value}) {
        *output = {};
      }
    }
    done(std::move(result));
  }

  std::array<OutputSlot, 5> OutputSlots() {
    const ResolvedCall& call = request.call;
    const Problem& p = call.problem;
    return {{
        {call.y, true, result.y, arguments.output, &ResolvedCall::Output},
        {call.lse, p.wants_lse, result.lse, arguments.lse, &ResolvedCall::Lse},
        {call.scores, p.score_output.has_value(), result.scores, arguments.scores,
         &ResolvedCall::Scores},
        {call.present_key, p.wants_present, result.present_key, arguments.present_key,
         &ResolvedCall::PresentKey},
        {call.present_value, p.wants_present, result.present_value, arguments.present_value,
         &ResolvedCall::PresentValue},
    }};
  }

  Request request;
  Done done;
  Result result;
  Plan plan;
  Arguments arguments;
  int64_t output_bytes = 0;
  ReservedBuffer workspace;
};

// A request from Diagnose() to its done.
struct Engine::Examination {
  std::byte* WorkerWorkspace(int worker) {
    return workspace.buffer.data() + worker * diagnosis->worker_workspace_bytes();
  }

  Request request;
  DiagnosisDone done;
  Arguments arguments;
  std::optional<Diagnosis> diagnosis;
  ReservedBuffer workspace;
};

Engine::Engine(PlanOptions options, MemoryBudget& budget, Executor& executor)
    : options_(std::move(options)), budget_(budget), executor_(executor) {
  RAPT_CHECK(options_.threads == executor_.threads(), "plans are for the executor's threads");
}

void Engine::Submit(Request request, Done done) {
  auto flight = std::make_unique<Flight>();
  flight->request = std::move(request);
  flight->done = std::move(done);
  absl::Status status = Prepare(*flight);
  if (!status.ok()) return flight->Finish({.status = std::move(status)});

  const bool tiny = IsTiny(flight->plan, flight->output_bytes);
  Job job = JobFor(flight->request);
  job.stages = flight->plan.stages;
  job.run_task = [&flight = *flight](int stage, int64_t task, int worker) {
    flight.plan.backend->RunTask(flight.plan, flight.arguments, flight.workspace.buffer.data(),
                                 stage, task, worker);
  };
  job.done = [flight = std::move(flight)](const JobReport& report) { flight->Finish(report); };
  if (tiny) {
    executor_.RunInline(std::move(job));
  } else {
    executor_.Submit(std::move(job));
  }
}

void Engine::Diagnose(Request request, DiagnosisDone done) {
  auto examination = std::make_unique<Examination>();
  examination->request = std::move(request);
  examination->done = std::move(done);
  absl::Status status = Prepare(*examination);
  if (!status.ok()) return examination->done(std::move(status));

  Job job = JobFor(examination->request);
  job.stages = {examination->diagnosis->tasks()};
  job.run_task = [&examination = *examination](int, int64_t task, int worker) {
    examination.diagnosis->RunTask(task, examination.WorkerWorkspace(worker));
  };
  job.done = [this, examination = std::move(examination)](const JobReport& report) {
    examination->workspace = {};  // back to the budget before the caller has its answer
    if (!report.status.ok()) return examination->done(report.status);
    examination->done(examination->diagnosis->Finish(options_));
  };
  executor_.Submit(std::move(job));
}

absl::StatusOr<InputBuffer> Engine::AllocateInput(int64_t bytes) {
  absl::StatusOr<MemoryBudget::Reservation> reservation = budget_.Reserve(bytes);
  if (!reservation.ok()) return reservation.status();
  absl::StatusOr<std::shared_ptr<ReservedBuffer>> owner = AllocateShared(*std::move(reservation));
  if (!owner.ok()) return owner.status();
  return InputBuffer{(*owner)->buffer.span(), *owner};
}

absl::Status Engine::CheckAccepting() const {
  if (accepting()) return absl::OkStatus();
  return absl::UnavailableError("the server is draining and takes no new requests");
}

absl::Status Engine::Prepare(Flight& flight) {
  if (absl::Status status = CheckAccepting(); !status.ok()) return status;
  const ResolvedCall& call = flight.request.call;
  absl::StatusOr<Plan> plan = MakePlan(call.problem, options_);
  if (!plan.ok()) return plan.status();
  flight.plan = *std::move(plan);
  Result& result = flight.result;
  result.backend = std::string(flight.plan.backend->name());
  result.plan = flight.plan.Describe();

  flight.arguments = ViewInputs(call, flight.request.inputs);
  if (absl::Status status = Allocate(flight); !status.ok()) return status;
  return Validate(call.problem, flight.arguments, *call.names);
}

absl::Status Engine::Allocate(Flight& flight) {
  std::array<OutputSlot, 5> slots = flight.OutputSlots();
  const std::optional<int64_t> output_bytes = MeasureOutputs(absl::MakeSpan(slots));
  const std::optional<int64_t> needed_bytes =
      output_bytes ? CheckedAdd(*output_bytes, flight.plan.workspace_bytes()) : std::nullopt;
  if (!needed_bytes) return absl::ResourceExhaustedError("the outputs' size overflows 64 bits");
  flight.output_bytes = *output_bytes;

  absl::StatusOr<MemoryBudget::Reservation> reservation = budget_.Reserve(*needed_bytes);
  if (!reservation.ok()) return reservation.status();
  for (OutputSlot& slot : slots) {
    if (!slot.wanted) continue;
    absl::Status status = AllocateOutput(flight.request.call, reservation->Split(slot.bytes), slot);
    if (!status.ok()) return status;
  }
  absl::StatusOr<ReservedBuffer> workspace = ::rapt::Allocate(*std::move(reservation));
  if (!workspace.ok()) return workspace.status();
  flight.workspace = *std::move(workspace);
  return absl::OkStatus();
}

absl::Status Engine::Prepare(Examination& examination) {
  if (absl::Status status = CheckAccepting(); !status.ok()) return status;
  const ResolvedCall& call = examination.request.call;
  examination.arguments = ViewInputs(call, examination.request.inputs);
  absl::Status status = ValidateInputs(call.problem, examination.arguments, *call.names);
  if (!status.ok()) return status;
  Diagnosis& diagnosis =
      examination.diagnosis.emplace(call.problem, examination.arguments, *call.names);
  absl::StatusOr<MemoryBudget::Reservation> reservation =
      budget_.Reserve(executor_.threads() * diagnosis.worker_workspace_bytes());
  if (!reservation.ok()) return reservation.status();
  absl::StatusOr<ReservedBuffer> workspace = ::rapt::Allocate(*std::move(reservation));
  if (!workspace.ok()) return workspace.status();
  examination.workspace = *std::move(workspace);
  return absl::OkStatus();
}

}  // namespace rapt
