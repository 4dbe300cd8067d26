// The interface of a backend. To add one: a folder next to this file and a line in backends.cc.
#ifndef RAPT_ATTENTION_BACKEND_H_
#define RAPT_ATTENTION_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/checkpoint.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "base/check.h"

namespace rapt {

class RaggedDevice;

struct InstructionSet {
  absl::string_view name;  // a value of --isa
  bool available = false;  // on this machine
};

// Thread-safe: a backend is stateless or guards its state; one instance serves the process.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual absl::string_view name() const = 0;

  // Returns OK, or why this backend can't run on this machine.
  virtual absl::Status Available() const { return absl::OkStatus(); }

  // Best first. Empty for a backend without a choice of instruction sets.
  virtual absl::Span<const InstructionSet> instruction_sets() const { return {}; }

  // Returns whether inputs may be of this source. If not, the caller gathers them first. Every
  // backend reads strided tensors.
  virtual bool Reads(Source source) const { return source == Source::kStrided; }

  // Returns the number of tasks that may wait for a device at the same time. They run on dedicated
  // threads, worker n on lane n, and plans are made for that many threads. 0: tasks compute on the
  // CPU.
  virtual int lanes() const { return 0; }

  // Returns OK, or the reason why not. REQUIRES: `problem` is valid.
  virtual absl::Status Supports(const Problem& problem) const = 0;

  // Returns OK, or why "auto" should choose the next backend. Unavailable if the reason is
  // temporary; such calls count as fallbacks. REQUIRES: the problem is supported.
  virtual absl::Status Prefers(const Problem&) const { return absl::OkStatus(); }

  // Returns what computes ragged attention by copies of pages on this backend's device; null if
  // nothing does.
  virtual const RaggedDevice* ragged() const { return nullptr; }

  // Called when a problem fell back to the next backend for a temporary reason. Starts what similar
  // problems will need, such as compiling kernels. Does not block.
  virtual void Prepare(const Problem&) const {}

  // Fills stages, workspace and backend_plan of a plan whose problem, isa and threads are set. The
  // problem is valid and supported; if it is empty(), it may still have present outputs.
  virtual void PlanTasks(Plan& plan) const = 0;

  // Runs one task of a stage. `workspace` has plan.workspace_bytes() bytes, aligned to 64 and
  // uninitialized before the first stage. `worker`, in [0, plan.threads), selects the caller's part
  // of it. A task longer than a few milliseconds calls the checkpoint at least once per
  // millisecond. REQUIRES: no two calls at the same time have the same worker.
  virtual void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                       int stage, int64_t task, int worker, const Checkpoint& checkpoint) const = 0;

  // One of the plans that a joined run computes.
  struct BatchMember {
    const Plan* plan;
    const Arguments* arguments;
    bool done = false;  // false: not computed; the caller calls RunTask() instead
  };
  // Computes the tasks of several plans in one run on `worker`, as far as it can. Members do not
  // affect each other's results, which equal those of RunTask() up to rounding. REQUIRES: at least
  // two members, of one batch group, with a total cost of at most 1.
  virtual void RunBatch(absl::Span<BatchMember> /*members*/, int /*worker*/) const {
    RAPT_CHECK(false, "this backend's plans have no batch group");
  }
};

// Backends in the order in which "auto" tries them: devices, CPU, reference. Immutable.
class BackendSet {
 public:
  // REQUIRES: the devices' backends outlive this.
  explicit BackendSet(absl::Span<const Backend* const> devices = {});

  auto begin() const { return backends_.begin(); }
  auto end() const { return backends_.end(); }
  size_t size() const { return backends_.size(); }
  const Backend* operator[](size_t n) const { return backends_[n]; }

 private:
  std::vector<const Backend*> backends_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_BACKEND_H_
