// Runs one problem on one backend and checks for stray writes: the workspace has exactly the size
// that the plan requires and is filled with NaN, and every output lies between guards.
#ifndef RAPT_TESTS_SUPPORT_RUN_ATTENTION_H_
#define RAPT_TESTS_SUPPORT_RUN_ATTENTION_H_

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/attention.h"
#include "tests/support/oracle.h"
#include "tests/support/tensor.h"

namespace rapt::test {

// The backends of Targets(): the built-in ones, and a device if the binary is linked with a file
// that adds one, such as fake_device_target.cc.
const BackendSet& TargetBackends();

// Where a problem can run on this machine.
struct Target {
  std::string backend;
  std::string isa;  // "auto" if the backend has only one

  PlanOptions Options(int threads = 1) const {
    return {.backend = backend, .isa = isa, .threads = threads, .backends = &TargetBackends()};
  }

  std::string Name() const { return isa == "auto" ? backend : backend + "/" + isa; }

  // Whether features and numbers of a problem decide if tiles of bf16 or the kernel of AVX-512
  // compute a task, whose results differ by rounding.
  bool MayUseTiles(DType dtype) const {
    return isa == "amx" || (isa == "avx512_bf16" && dtype == DType::kBFloat16);
  }
};

// Every available backend with every available instruction set of it.
const std::vector<Target>& Targets();

// The instruction sets that this build supports and this machine lacks: "cpu/avx512".
std::vector<std::string> MissingTargets();

// Returns the fields that differ from their defaults, on one line.
std::string ToText(const Problem& problem);

// How the tensors of a problem lie in memory.
struct Arrangement {
  Storage query = Storage::kRowMajor;
  Storage key_value = Storage::kRowMajor;
  Storage past = Storage::kRowMajor;
  Storage mask = Storage::kRowMajor;
  Storage output = Storage::kRowMajor;
};

// Uniform in [-magnitude, magnitude]; two thirds of a bool mask are true, float masks are in [-2,
// 2] with some -inf; key lengths are in [0, Sk]; sinks are in [-4, 4].
Inputs RandomInputs(const Problem& problem, Rng& rng, const Arrangement& arrangement = {},
                    double magnitude = 2);

struct Outputs {
  Tensor output;
  std::optional<Tensor> lse;
  std::optional<Tensor> scores;
  std::optional<Tensor> present_key;
  std::optional<Tensor> present_value;
  std::string plan;
};

// Returns the outputs, or the error of MakePlan or Run. The CPU computes problems that a device
// declines. An overwritten guard or gap is a test failure. The pool has `workers` workers, by
// default as many as the plan has threads. `change` may replace the views of the inputs.
absl::StatusOr<Outputs> RunAttention(const Problem& problem, const Inputs& inputs,
                                     const PlanOptions& options,
                                     Storage output_storage = Storage::kRowMajor,
                                     std::optional<int> workers = std::nullopt,
                                     const std::function<void(Arguments&)>& change = {});

// Succeeds if all outputs are equal to the bit.
::testing::AssertionResult SameBits(const Outputs& a, const Outputs& b);

// Runs both problems on every target and expects outputs that are equal to the bit. Where tiles may
// be used, Y may differ by rounding.
void ExpectSameOutputs(const Problem& a, const Inputs& inputs_a, const Problem& b,
                       const Inputs& inputs_b);

// Returns the outputs of each problem in order. Plans of one batch group run batched on worker 0,
// up to the capacity of a batch; the others run alone.
std::vector<Outputs> RunBatched(absl::Span<const Problem> problems, absl::Span<const Inputs> inputs,
                                const PlanOptions& options);

// Compares the outputs with the oracle, within the tolerances of the problem's type.
::testing::AssertionResult Matches(const Problem& problem, const Outputs& outputs,
                                   const Expected& expected);

// Runs the problem on every target that supports it and compares with the oracle.
void ExpectConforms(const Problem& problem, const Inputs& inputs, int threads = 1,
                    Storage output_storage = Storage::kRowMajor);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RUN_ATTENTION_H_
