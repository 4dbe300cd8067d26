#include "attention/attention.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "attention/data_checks.h"
#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/invalid.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

std::string NamesOf(const BackendSet& backends) {
  return absl::StrJoin(backends, ", ", [](std::string* out, const Backend* backend) {
    absl::StrAppend(out, std::string(backend->name()));
  });
}

absl::StatusOr<const Backend*> FindBackend(absl::string_view name, const BackendSet& backends) {
  for (const Backend* backend : backends) {
    if (backend->name() != name) continue;
    if (absl::Status status = backend->Available(); !status.ok()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "backend '", std::string(name), "' can't run here: ", std::string(status.message())));
    }
    return backend;
  }
  return Invalid("backend is '", std::string(name), "'; this build has auto, ", NamesOf(backends));
}

// Returns OK, or why the backend can't compute the problem under these options.
absl::Status CheckSupport(const Backend& backend, const Problem& problem,
                          const PlanOptions& options) {
  if (backend.lanes() > 0 && !options.has_lanes) {
    return absl::UnimplementedError(
        "its tasks wait for a device, and the caller provides no threads for that");
  }
  if (options.source != Source::kStrided && !backend.Reads(options.source)) {
    return absl::UnimplementedError(
        absl::StrCat("it does not read ", NameOf(options.source), " tensors"));
  }
  return backend.Supports(problem);
}

absl::StatusOr<Routing> ChooseBackend(const Problem& problem, const PlanOptions& options) {
  const std::string& name = options.backend;
  if (name != "auto") {
    RAPT_ASSIGN_OR_RETURN(const Backend* const backend, FindBackend(name, *options.backends));
    if (absl::Status reason = CheckSupport(*backend, problem, options); !reason.ok()) {
      return absl::UnimplementedError(
          absl::StrCat("backend '", name, "' can't compute this: ", std::string(reason.message())));
    }
    return Routing{.backend = backend};
  }
  Routing routing;
  for (const Backend* backend : *options.backends) {
    if (!backend->Available().ok()) continue;
    const bool supported = CheckSupport(*backend, problem, options).ok();
    const absl::Status preference = supported ? backend->Prefers(problem) : absl::OkStatus();
    if (supported && preference.ok()) {
      routing.backend = backend;
      return routing;
    }
    const bool for_now = preference.code() == absl::StatusCode::kUnavailable;
    if (routing.declined == nullptr && (!supported || for_now)) {
      routing.declined = backend;
      routing.declined_for_now = for_now;
    }
  }
  return absl::UnimplementedError("no backend can compute this");
}

// Returns OK if some backend knows the instruction set and has it on this machine.
absl::Status ValidateIsa(absl::string_view isa, const BackendSet& backends) {
  if (isa == "auto") return absl::OkStatus();
  std::string known = "auto";
  for (const Backend* backend : backends) {
    for (const InstructionSet& set : backend->instruction_sets()) {
      if (set.name == isa) {
        if (set.available) return absl::OkStatus();
        return absl::FailedPreconditionError(
            absl::StrCat("this machine lacks the instruction set '", std::string(isa), "'"));
      }
      absl::StrAppend(&known, ", ", std::string(set.name));
    }
  }
  return Invalid("isa is '", std::string(isa), "'; it must be one of ", known);
}

}  // namespace

std::string ChooseIsa(const Backend& backend, absl::string_view wanted) {
  for (const InstructionSet& set : backend.instruction_sets()) {
    if (wanted == "auto" ? set.available : set.name == wanted) return std::string(set.name);
  }
  return "";
}

absl::Status Validate(const PlanOptions& options) {
  if (options.threads < 1) {
    return Invalid("threads is ", options.threads, "; it must be at least 1");
  }
  if (options.backend != "auto") {
    RAPT_RETURN_IF_ERROR(FindBackend(options.backend, *options.backends).status());
  }
  return ValidateIsa(options.isa, *options.backends);
}

absl::StatusOr<Plan> MakePlan(const Problem& problem, const PlanOptions& options) {
  RAPT_RETURN_IF_ERROR(Validate(options));
  RAPT_RETURN_IF_ERROR(Validate(problem));
  RAPT_ASSIGN_OR_RETURN(const Routing routing, ChooseBackend(problem, options));
  const Backend& backend = *routing.backend;
  Plan plan;
  plan.problem = problem;
  plan.routing = routing;
  plan.isa = ChooseIsa(backend, options.isa);
  plan.threads = backend.lanes() > 0 ? backend.lanes() : options.threads;
  if (!problem.empty() || problem.wants_present || problem.backward) backend.PlanTasks(plan);
  return plan;
}

namespace {

// Returns whether the device computes the operator. If it only cannot, `routing` says so.
bool TakesOperator(const Backend& device, const TensorOperator& op, const PlanOptions& options,
                   Routing& routing) {
  const bool is_named = options.backend == device.name();
  if (!is_named && options.backend != "auto") return false;
  if (device.lanes() == 0 || !options.has_lanes || !device.Available().ok()) return false;
  const std::optional<absl::Status> support = op.SupportedBy(device);
  if (!support) return false;
  const bool asks = support->ok() && !is_named;
  const absl::Status preference = asks ? op.PreferredBy(device) : absl::OkStatus();
  if (support->ok() && preference.ok()) return true;
  const bool for_now = preference.code() == absl::StatusCode::kUnavailable;
  if (routing.declined == nullptr && (!support->ok() || for_now)) {
    routing.declined = &device;
    routing.declined_for_now = for_now;
  }
  return false;
}

Routing ChooseBackend(const TensorOperator& op, const PlanOptions& options) {
  Routing routing;
  const BackendSet& backends = *options.backends;
  for (const Backend* backend : backends) {
    if (!TakesOperator(*backend, op, options, routing)) continue;
    routing.backend = backend;
    return routing;
  }
  const auto find = [&](auto matches) {
    return std::find_if(backends.begin(), backends.end(), [&](const Backend* backend) {
      return backend->lanes() == 0 && matches(*backend);
    });
  };
  auto chosen = find([&](const Backend& backend) { return backend.name() == options.backend; });
  if (chosen == backends.end()) {
    chosen = find([](const Backend& backend) { return !backend.instruction_sets().empty(); });
  }
  RAPT_CHECK(chosen != backends.end(), "one backend has the CPU's instruction sets");
  routing.backend = *chosen;
  return routing;
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const TensorOperator& op, const PlanOptions& options) {
  RAPT_RETURN_IF_ERROR(Validate(options));
  Plan plan;
  plan.problem.dtype = op.outputs()[Role::kY]->dtype;
  plan.routing = ChooseBackend(op, options);
  const Backend& backend = *plan.routing.backend;
  plan.isa = ChooseIsa(backend, options.isa);
  plan.threads = backend.lanes() > 0 ? backend.lanes() : options.threads;
  op.PlanTasks(plan);
  return plan;
}

namespace {

// Below this, distributing the tasks costs more than it gains: the calling thread runs all of them.
constexpr double kMinParallelFlops = 5e5;

absl::Status ValidateSources(const Backend& backend, const Problem& problem, const Arguments& a) {
  for (Role role : InputTensorsOf(problem)) {
    if (!a.inputs[role].has_elements()) continue;
    const Source source = a.inputs[role].source();
    if (source == Source::kStrided || backend.Reads(source)) continue;
    return Invalid(InfoOf(role).onnx, " is ", NameOf(source), "; backend '", backend.name(),
                   "' does not read ", NameOf(source), " tensors");
  }
  return absl::OkStatus();
}

absl::Status CheckAllData(const Problem& problem, const Arguments& arguments, bool serial,
                          ThreadPool& pool) {
  if (serial) return CheckData(problem, arguments);
  const int64_t tasks = DataChecks(problem);
  if (tasks == 0) return absl::OkStatus();
  Mutex mutex;
  absl::Status error;
  int64_t first = tasks;  // of the tasks that found an error
  pool.ParallelFor(tasks, [&](int64_t task, int) {
    absl::Status status = CheckData(problem, arguments, task);
    if (status.ok()) return;
    MutexLock lock(mutex);
    if (task >= first) return;
    first = task;
    error = std::move(status);
  });
  return error;
}

absl::Status ValidateResources(const Plan& plan, absl::Span<std::byte> workspace,
                               const ThreadPool& pool) {
  if (static_cast<int64_t>(workspace.size()) < plan.workspace_bytes()) {
    return Invalid("workspace has ", workspace.size(), " bytes; the plan needs ",
                   plan.workspace_bytes());
  }
  if (reinterpret_cast<uintptr_t>(workspace.data()) % AlignedBuffer::kAlignment != 0) {
    return Invalid("workspace is not aligned to 64 bytes");
  }
  if (pool.workers() > plan.threads) {
    return Invalid("the pool has ", pool.workers(), " workers; the plan allows ", plan.threads);
  }
  return absl::OkStatus();
}

// Runs all tasks by `runner`, a backend or an operator.
template <typename Runner>
void RunStages(const Runner& runner, const Plan& plan, const Arguments& arguments,
               absl::Span<std::byte> workspace, bool serial, ThreadPool& pool) {
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const auto run_task = [&](int64_t task, int worker) {
      runner.RunTask(plan, arguments, workspace.data(), static_cast<int>(stage), task, worker,
                     /*checkpoint=*/{});
    };
    if (serial) {
      for (int64_t task = 0; task < plan.stages[stage]; ++task) run_task(task, 0);
    } else {
      pool.ParallelFor(plan.stages[stage], run_task);
    }
  }
}

}  // namespace

absl::Status Run(const Plan& plan, const Arguments& arguments, absl::Span<std::byte> workspace,
                 ThreadPool& pool) {
  RAPT_RETURN_IF_ERROR(Validate(plan.problem, arguments));
  const Backend& backend = *plan.routing.backend;
  RAPT_RETURN_IF_ERROR(ValidateSources(backend, plan.problem, arguments));
  RAPT_RETURN_IF_ERROR(ValidateResources(plan, workspace, pool));
  const bool serial = plan.flops < kMinParallelFlops && backend.lanes() == 0;
  RAPT_RETURN_IF_ERROR(CheckAllData(plan.problem, arguments, serial, pool));
  RunStages(backend, plan, arguments, workspace, serial, pool);
  return absl::OkStatus();
}

absl::Status Run(const TensorOperator& op, const Plan& plan, const Arguments& arguments,
                 absl::Span<std::byte> workspace, ThreadPool& pool) {
  RAPT_RETURN_IF_ERROR(ValidateResources(plan, workspace, pool));
  RAPT_RETURN_IF_ERROR(op.CheckData(arguments));
  const bool serial = plan.flops < kMinParallelFlops && plan.routing.backend->lanes() == 0;
  RunStages(op, plan, arguments, workspace, serial, pool);
  return absl::OkStatus();
}

}  // namespace rapt
