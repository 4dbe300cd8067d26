// The backend's behavior if the device is slow, fails, recovers or is not worth using. Results
// are covered by attention_cudnn_conformance_test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <initializer_list>
#include <latch>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "attention/cudnn/pieces.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_device.h"
#include "tests/support/run_attention.h"

namespace rapt::cudnn {
namespace {

using test::FakeDevice;
using ::testing::HasSubstr;

constexpr int kLanes = 2;

Problem Small() {
  return {.dtype = DType::kFloat32,
          .batch = 4,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 9,
          .key_length = 17,
          .head_size = 8,
          .value_head_size = 8,
          .causal = true,
          .wants_lse = true};
}

// The backend on a fake device.
class CudnnBackendTest : public ::testing::Test {
 protected:
  void Start(int64_t arena_bytes = 1 << 20, BackendOptions options = {}) {
    backend_.Start(std::make_unique<FakeDevice>(controls_, kLanes, arena_bytes), CpuBackend(),
                   clock_, std::move(options));
  }

  PlanOptions On(const std::string& backend) const {
    return {.backend = backend, .backends = &backends_};
  }

  PlanOptions WithLanes(int threads = 1) const {
    PlanOptions options = On("cudnn");
    options.threads = threads;
    options.has_lanes = true;
    return options;
  }

  void ExpectCorrectResult(const Problem& problem, const std::string& backend = "cudnn") {
    test::Rng rng(5);
    const test::Inputs inputs = test::RandomInputs(problem, rng);
    const auto outputs = test::RunAttention(problem, inputs, On(backend));
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_TRUE(test::Matches(problem, *outputs, test::Attend(problem, inputs)));
  }

  // Runs the problem with this number in V.
  void RunWith(const Problem& problem, double number) {
    test::Rng rng(5);
    test::Inputs inputs = test::RandomInputs(problem, rng);
    inputs.value.Set(0, 0, 0, 0, number);
    const auto outputs = test::RunAttention(problem, inputs, On("cudnn"));
    ASSERT_TRUE(outputs.ok()) << outputs.status();
  }

  absl::StatusOr<Plan> Auto(const Problem& problem) {
    return MakePlan(problem, {.threads = 3, .has_lanes = true, .backends = &backends_});
  }

  // Waits until the kernels are compiled; before, "auto" chooses the next backend.
  void WaitForPlans(const Problem& problem) { ExpectCorrectResult(problem); }

  // Kernels are compiled in the order of requests, and no test uses these, so they are ready last.
  void WaitForAllPlans() {
    Problem last = Small();
    last.kv_heads = last.query_heads;
    WaitForPlans(last);
  }

  FakeDevice::Controls controls_;
  test::FakeClock clock_;
  CudnnBackend backend_;
  const BackendSet backends_{{&backend_}};
};

TEST_F(CudnnBackendTest, CannotBeChosenWithoutADevice) {
  const auto plan = MakePlan(Small(), WithLanes());
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*Auto(Small())).routing.backend->name(), "cpu");
  EXPECT_EQ((*Auto(Small())).routing.declined, nullptr) << "an absent device is no fallback";
  backend_.Start(absl::FailedPreconditionError("there is no libcudnn.so.9"), CpuBackend(), clock_,
                 {});
  EXPECT_THAT(std::string(MakePlan(Small(), On("cudnn")).status().message()),
              HasSubstr("there is no libcudnn.so.9"));
}

TEST_F(CudnnBackendTest, IsNotChosenWithoutLaneThreads) {
  Start();
  const absl::StatusOr<Plan> plan = MakePlan(Small(), On("cudnn"));
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("wait for a device"));
}

TEST_F(CudnnBackendTest, PlansForItsLanes) {
  Start();
  const absl::StatusOr<Plan> plan = MakePlan(Small(), WithLanes(7));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->threads, kLanes);
  EXPECT_GT(plan->flops, 0);
}

TEST_F(CudnnBackendTest, UsesTheCpuWhileKernelsCompile) {
  Start();
  const absl::StatusOr<Plan> before = Auto(Small());
  ASSERT_TRUE(before.ok());
  EXPECT_EQ(before->routing.backend->name(), "cpu");
  ASSERT_NE(before->routing.declined, nullptr);
  EXPECT_EQ(before->routing.declined->name(), "cudnn");
  EXPECT_TRUE(before->routing.declined_for_now);
  EXPECT_EQ(backend_.state().plans.compiling, 0) << "planning alone compiles nothing";
  before->routing.declined->Prepare(Small());
  EXPECT_GT(backend_.state().plans.compiling + backend_.state().plans.ready, 0);
  WaitForPlans(Small());
  const absl::StatusOr<Plan> after = Auto(Small());
  EXPECT_EQ(after->routing.backend->name(), "cudnn");
  EXPECT_EQ(after->routing.declined, nullptr);
}

TEST_F(CudnnBackendTest, DividesGradientsByHeadsAndNotFurther) {
  Problem problem = Small();
  problem.dtype = DType::kBFloat16;
  problem.wants_lse = false;
  problem.backward = Backward{.has_forward = true};
  problem.backward->gradients.Add(Role::kDQ);
  Start(/*arena_bytes=*/64 << 10);
  const absl::StatusOr<Plan> plan = MakePlan(problem, WithLanes());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->stages, ::testing::ElementsAre(8)) << "4 batch rows of 2 heads";
  EXPECT_EQ(plan->backend_plan->batch_group(), nullptr);
  problem.query_length = 200;
  const absl::Status status = MakePlan(problem, WithLanes()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the gradients of a single head need more than the 57344 bytes"));
}

TEST_F(CudnnBackendTest, WarmsKernelsBeforeTheFirstRequest) {
  std::latch may_compile(1);
  controls_.on_compile = [&] { may_compile.wait(); };
  Start();
  Problem decode = Small();
  decode.query_length = 1;
  ASSERT_TRUE(backend_.Warm({Small(), decode, Small()}).ok());
  EXPECT_EQ(backend_.warmth().compiling, 2 * 3) << "alone, and in batches of two sizes";
  EXPECT_EQ(Auto(Small())->routing.backend->name(), "cpu");
  may_compile.count_down();
  WaitForPlans(Small());
  WaitForPlans(decode);
  WaitForAllPlans();
  EXPECT_EQ(backend_.warmth().compiling, 0);
  EXPECT_EQ(backend_.warmth().ready, 2 * 3);
  EXPECT_EQ(Auto(decode)->routing.backend->name(), "cudnn");
}

TEST_F(CudnnBackendTest, WarmsAllLengthsThatRoundUpToAShape) {
  Start();
  Problem problem = Small();
  problem.query_length = problem.key_length = 24;
  problem.softcap = 3;  // is never batched
  ASSERT_TRUE(backend_.Warm({problem}).ok());
  for (int64_t length = 17; length <= 24; ++length) {
    problem.query_length = problem.key_length = length;
    ExpectCorrectResult(problem);
  }
  EXPECT_EQ(controls_.compilations, 2) << "for full and for shorter lengths";
}

TEST_F(CudnnBackendTest, WarmsThePiecesOfARequest) {
  Start(/*arena_bytes=*/24 << 10);
  Problem problem = Small();
  problem.batch = 5;  // the last piece is smaller
  ASSERT_TRUE(backend_.Warm({problem}).ok());
  const int64_t kinds = backend_.warmth().compiling + backend_.warmth().ready;
  EXPECT_GT(kinds, 1);
  ExpectCorrectResult(problem);
  EXPECT_EQ(controls_.compilations, kinds) << "the request needed more kernels";
}

TEST_F(CudnnBackendTest, WarmsNothingIfAShapeIsNotSupported) {
  Start();
  Problem problem = Small();
  problem.dtype = DType::kFloat64;
  const absl::Status status = backend_.Warm({Small(), problem});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(), "shape 2: cuDNN does not support FP64");
}

TEST_F(CudnnBackendTest, CountsWarmShapesThatTheDeviceRejects) {
  Start();
  controls_.declines = true;
  Problem problem = Small();
  problem.softcap = 3;  // is never batched
  ASSERT_TRUE(backend_.Warm({problem}).ok());
  ExpectCorrectResult(problem);
  EXPECT_EQ(backend_.warmth().declined, 1);
}

TEST_F(CudnnBackendTest, LeavesSmallProblemsToTheCpu) {
  Start(1 << 20, {.min_flops = 1e9});
  WaitForPlans(Small());
  const absl::StatusOr<Plan> plan = Auto(Small());
  EXPECT_EQ(plan->routing.backend->name(), "cpu");
  EXPECT_EQ(plan->routing.declined, nullptr) << "this does not count as a fallback";
}

TEST_F(CudnnBackendTest, RejectsProblemsThatDoNotFitALane) {
  Start(/*arena_bytes=*/4096);
  const absl::Status status = backend_.Supports(Small());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("3584 bytes of a device lane"));
  EXPECT_EQ(Auto(Small())->routing.backend->name(), "cpu");
}

TEST_F(CudnnBackendTest, SplitsARequestIntoPiecesThatFitALane) {
  Start(/*arena_bytes=*/24 << 10);
  ExpectCorrectResult(Small());
  EXPECT_GT(controls_.runs, 1);
}

// One head exceeds kSmallArena.
Problem Long() {
  Problem problem = Small();
  problem.batch = 2;
  problem.query_length = 150;
  problem.key_length = 170;
  return problem;
}
constexpr int64_t kSmallArena = 16 << 10;

TEST_F(CudnnBackendTest, StreamsTheKeysOfAHeadThatExceedsALane) {
  const std::pair<const char*, void (*)(Problem&)> cases[] = {
      {"causal", [](Problem&) {}},
      {"all keys", [](Problem& p) { p.causal = false; }},
      {"bottom right", [](Problem& p) { p.alignment = Alignment::kBottomRight; }},
      {"a window",
       [](Problem& p) {
         p.left_window = 40;
         p.causal = false;
         p.right_window = 7;
       }},
      {"a past", [](Problem& p) { p.past_length = 45; }},
      {"a past and present",
       [](Problem& p) {
         p.past_length = 100;
         p.wants_present = true;
       }},
      {"key lengths",
       [](Problem& p) {
         p.has_key_lengths = true;
         p.causal = false;
       }},
      {"one query",
       [](Problem& p) {
         p.query_length = 1;
         p.key_length = 900;
         p.causal = false;
       }},
      {"a key length and a window for one query",
       [](Problem& p) {
         p.query_length = 1;
         p.key_length = 900;
         p.has_key_lengths = true;
         p.alignment = Alignment::kBottomRight;
         p.left_window = 600;
       }},
      {"few keys",
       [](Problem& p) {
         p.key_length = 3;
         p.query_length = 400;
       }},
      {"a softcap", [](Problem& p) { p.softcap = 3; }},
      {"FP16 without lse",
       [](Problem& p) {
         p.dtype = DType::kFloat16;
         p.query_length = 300;
         p.wants_lse = false;
       }},
      {"a mask",
       [](Problem& p) {
         p.mask = MaskShape{DType::kFloat16, {2, 4, 150, 170}};
       }},
      {"one bool mask",
       [](Problem& p) {
         p.mask = MaskShape{DType::kBool, {1, 1, 150, 170}};
       }},
      {"a mask of columns",
       [](Problem& p) {
         p.mask = MaskShape{DType::kBool, {2, 1, 1, 170}};
       }},
      {"a mask of rows",
       [](Problem& p) {
         p.mask = MaskShape{DType::kFloat16, {1, 4, 150, 1}};
       }},
      {"a mask of fewer keys, past ones too",
       [](Problem& p) {
         p.past_length = 60;
         p.mask = MaskShape{DType::kFloat16, {1, 1, 150, 145}};
       }},
  };
  for (const auto& [name, change] : cases) {
    SCOPED_TRACE(name);
    controls_.runs = 0;
    controls_.most_bytes = 0;
    Start(kSmallArena);
    Problem problem = Long();
    change(problem);
    ASSERT_TRUE(backend_.Supports(problem).ok()) << backend_.Supports(problem);
    ExpectCorrectResult(problem);
    EXPECT_GT(controls_.runs, problem.batch * problem.kv_heads) << "no head was split";
    EXPECT_LE(controls_.most_bytes, kSmallArena);
    backend_.Stop();
  }
}

TEST_F(CudnnBackendTest, MergesPiecesThatTheCpuComputesAfterAFailure) {
  constexpr int kBefore = 9;
  Start(kSmallArena);
  controls_.on_run = [&] {
    if (controls_.runs == kBefore) controls_.failures = 1;
  };
  ExpectCorrectResult(Long());
  EXPECT_GE(controls_.runs, kBefore);
  EXPECT_LT(controls_.runs, kBefore + kLanes) << "the device is in backoff";
  EXPECT_EQ(controls_.failures, 0);
}

TEST_F(CudnnBackendTest, SplitsACausalHeadIntoFewKindsOfPieces) {
  Start(kSmallArena);
  Problem problem = Long();
  problem.query_length = problem.key_length = 512;
  ExpectCorrectResult(problem);
  EXPECT_GT(controls_.runs, 100);
  EXPECT_EQ(controls_.compilations, 2) << "on the diagonal and below it";
}

TEST_F(CudnnBackendTest, RejectsSplitsThatCannotBeMerged) {
  Start(kSmallArena);
  const auto reason = [this](const Problem& problem) {
    const absl::Status status = backend_.Supports(problem);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    return std::string(status.message());
  };
  Problem problem = Long();
  problem.has_key_lengths = true;
  problem.alignment = Alignment::kOnnx;
  EXPECT_THAT(reason(problem), HasSubstr("section of a problem whose diagonal"));
  problem = Long();
  problem.mask = MaskShape{DType::kFloat32, {1, 1, 150, 170}};
  EXPECT_THAT(reason(problem), HasSubstr("mask of type FP32"));
}

TEST_F(CudnnBackendTest, RunsPiecesOnAllLanesAtOnce) {
  Start(/*arena_bytes=*/24 << 10);
  // Each waits for the other: a single lane would hang.
  std::latch both(kLanes);
  std::atomic<int> first{kLanes};
  controls_.on_run = [&] {
    if (first-- > 0) both.arrive_and_wait();
  };
  ExpectCorrectResult(Small());
}

TEST_F(CudnnBackendTest, ReportsLanesMemoryPlansAndHealth) {
  EXPECT_EQ(backend_.state().lanes, 0) << "there is no device";
  EXPECT_FALSE(backend_.state().healthy);
  Start(/*arena_bytes=*/24 << 10);
  CudnnBackend::State at_once;
  std::latch both(kLanes);
  std::atomic<int> first{kLanes};
  controls_.on_run = [&] {
    const int left = first--;
    if (left <= 0) return;
    both.arrive_and_wait();  // both lanes have a piece
    if (left == 1) at_once = backend_.state();
  };
  ExpectCorrectResult(Small());
  EXPECT_GE(at_once.busy_lanes, 1) << "the other may be done";
  EXPECT_GT(at_once.used_memory_bytes, 0);
  EXPECT_LE(at_once.used_memory_bytes, at_once.memory_bytes);
  const CudnnBackend::State after = backend_.state();
  EXPECT_TRUE(after.healthy);
  EXPECT_EQ(after.lanes, kLanes);
  EXPECT_EQ(after.busy_lanes, 0);
  EXPECT_EQ(after.memory_bytes, kLanes * (24 << 10));
  EXPECT_EQ(after.used_memory_bytes, 0);
  EXPECT_EQ(after.plans.ready, controls_.compilations);
  EXPECT_EQ(after.plans.compiling, 0);
  controls_.failures = 1;
  ExpectCorrectResult(Small());
  EXPECT_FALSE(backend_.state().healthy);
  EXPECT_EQ(backend_.state().busy_lanes, 0);
  EXPECT_EQ(backend_.state().used_memory_bytes, 0);
}

TEST_F(CudnnBackendTest, FallsBackToTheCpuIfTheDeviceFails) {
  Start();
  controls_.failures = 1;
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.runs, 1);
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.runs, 1) << "the device is in backoff";
  const absl::StatusOr<Plan> plan = Auto(Small());
  EXPECT_EQ(plan->routing.backend->name(), "cpu");
  EXPECT_TRUE(plan->routing.declined_for_now);
}

TEST_F(CudnnBackendTest, MeasuringSharesNoLaneWithRunningRequests) {
  Start(64 << 10);
  ASSERT_TRUE(backend_.Warm({}).ok());
  std::atomic<bool> measured{false};
  std::thread measuring([&] {
    EXPECT_TRUE(backend_.Measure(1, [] { return true; }).ok());
    measured = true;
  });
  while (!measured) ExpectCorrectResult(Small());
  measuring.join();
  for (const int64_t pieces : backend_.state().fallback_pieces) EXPECT_EQ(pieces, 0);
}

TEST_F(CudnnBackendTest, RetriesTheDeviceAfterABackoff) {
  Start();
  controls_.failures = 1;
  ExpectCorrectResult(Small());
  clock_.Advance(DeviceHealth::kFirstBackoff);
  EXPECT_EQ(Auto(Small())->routing.backend->name(), "cudnn");
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.restarts, 1);
  EXPECT_EQ(controls_.runs, 2);
}

TEST_F(CudnnBackendTest, BacksOffLongerAfterEachFailure) {
  Start();
  controls_.failures = 1;
  controls_.failing_restarts = 100;
  ExpectCorrectResult(Small());
  std::chrono::nanoseconds pause = DeviceHealth::kFirstBackoff;
  for (int restarts = 1; restarts < 10; ++restarts) {
    clock_.Advance(pause - std::chrono::milliseconds(1));
    ExpectCorrectResult(Small());
    EXPECT_EQ(controls_.restarts, restarts - 1) << "too early";
    clock_.Advance(std::chrono::milliseconds(1));
    ExpectCorrectResult(Small());
    EXPECT_EQ(controls_.restarts, restarts);
    pause = std::min<std::chrono::nanoseconds>(2 * pause, DeviceHealth::kMaxBackoff);
  }
  EXPECT_EQ(controls_.runs, 1);
}

TEST_F(CudnnBackendTest, ResetsTheBackoffAfterASuccess) {
  Start();
  for (int n = 0; n < 3; ++n) {
    controls_.failures = 1;
    ExpectCorrectResult(Small());
    clock_.Advance(DeviceHealth::kFirstBackoff);
    ExpectCorrectResult(Small());
    EXPECT_EQ(controls_.restarts, n + 1);
  }
}

TEST_F(CudnnBackendTest, KeepsTheBackoffIfTheDeviceWasNotUsed) {
  Start();
  controls_.failures = 1;
  ExpectCorrectResult(Small());
  clock_.Advance(DeviceHealth::kFirstBackoff);
  RunWith(Small(), std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(controls_.restarts, 1);
  EXPECT_EQ(controls_.runs, 1) << "a NaN stays on the host";
  controls_.failures = 1;
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.runs, 2);
  clock_.Advance(DeviceHealth::kFirstBackoff);
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.runs, 2) << "the backoff has doubled";
  clock_.Advance(DeviceHealth::kFirstBackoff);
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.runs, 3);
}

TEST_F(CudnnBackendTest, FallsBackToTheCpuIfCudnnRejectsTheGraph) {
  Start();
  controls_.declines = true;
  ExpectCorrectResult(Small());
  EXPECT_EQ(controls_.runs, 0);
  const absl::StatusOr<Plan> plan = Auto(Small());
  EXPECT_EQ(plan->routing.backend->name(), "cpu");
}

// Few of the 300 keys in each batch row are valid.
Problem Unequal() {
  Problem problem = Small();
  problem.batch = 6;
  problem.key_length = 300;
  problem.has_key_lengths = true;
  problem.alignment = Alignment::kOnnx;
  return problem;
}

test::Inputs UnequalInputs(const Problem& problem) {
  test::Rng rng(5);
  test::Inputs inputs = test::RandomInputs(problem, rng);
  inputs.key_lengths = {3, 0, 290, 17, 1, 90};
  return inputs;
}

TEST_F(CudnnBackendTest, SendsOnlyTheTokensOfUnequalBatchRows) {
  const std::pair<const char*, void (*)(Problem&)> cases[] = {
      {"all keys", [](Problem& p) { p.causal = false; }},
      {"causal", [](Problem&) {}},
      {"more queries", [](Problem& p) { p.query_length = 100; }},
      {"top left",
       [](Problem& p) {
         p.causal = false;
         p.left_window = 6;
         p.alignment = Alignment::kTopLeft;
       }},
      {"a window",
       [](Problem& p) {
         p.left_window = 20;
         p.causal = false;
         p.right_window = 7;
       }},
      {"a past",
       [](Problem& p) {
         p.causal = false;
         p.past_length = 2;
         p.wants_present = true;
       }},
      {"one query", [](Problem& p) { p.query_length = 1; }},
      {"one query with a window",
       [](Problem& p) {
         p.query_length = 1;
         p.left_window = 6;
       }},
      {"head sizes that are padded",
       [](Problem& p) {
         p.head_size = 7;
         p.value_head_size = 20;
       }},
      {"BF16", [](Problem& p) { p.dtype = DType::kBFloat16; }},
  };
  for (const auto& [name, change] : cases) {
    SCOPED_TRACE(name);
    Start();
    Problem problem = Unequal();
    change(problem);
    const test::Inputs inputs = UnequalInputs(problem);
    const auto expected = test::Attend(problem, inputs);
    const auto bytes_sent = [&] {
      controls_.most_bytes = 0;
      const auto outputs = test::RunAttention(problem, inputs, On("cudnn"));
      EXPECT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_TRUE(test::Matches(problem, *outputs, expected));
      return controls_.most_bytes.load();
    };
    const int64_t padded = bytes_sent();
    WaitForAllPlans();
    EXPECT_LT(bytes_sent(), padded * 3 / 4);
    backend_.Stop();
  }
}

TEST_F(CudnnBackendTest, SendsPaddingIfItIsSmall) {
  Start();
  Problem problem = Unequal();
  test::Inputs inputs = UnequalInputs(problem);
  inputs.key_lengths = {300, 290, 300, 250, 300, 300};
  ASSERT_TRUE(test::RunAttention(problem, inputs, On("cudnn")).ok());
  EXPECT_EQ(controls_.compilations, 1);
}

// A decode step of `batch` sequences.
Problem Decode(int64_t batch, int64_t keys) {
  Problem problem = Small();
  problem.batch = batch;
  problem.query_length = 1;
  problem.key_length = keys;
  problem.causal = false;
  return problem;
}

// Requests that are batched on one lane.
class CudnnBatchTest : public CudnnBackendTest {
 protected:
  void Wait(const Problem& problem) {
    test::Rng rng(inputs_.size());
    problems_.push_back(problem);
    inputs_.push_back(test::RandomInputs(problem, rng));
  }

  // Checks each result and returns the number of runs on the device.
  int RunsOfAll() {
    const int before = controls_.runs;
    const std::vector<test::Outputs> outputs = test::RunBatched(problems_, inputs_, On("cudnn"));
    for (size_t n = 0; n < problems_.size(); ++n) {
      EXPECT_TRUE(test::Matches(problems_[n], outputs[n], test::Attend(problems_[n], inputs_[n])))
          << n << " " << test::ToText(problems_[n]);
    }
    return controls_.runs - before;
  }

  // Until the batch's kernels are compiled, each request runs alone.
  void WaitForBatchKernels() {
    EXPECT_EQ(RunsOfAll(), static_cast<int>(problems_.size()));
    WaitForAllPlans();
  }

  std::vector<Problem> problems_;
  std::vector<test::Inputs> inputs_;
};

TEST_F(CudnnBatchTest, RunsOnceItsKernelsAreCompiled) {
  Start();
  Wait(Decode(1, 100));
  Wait(Decode(2, 7));
  Wait(Decode(1, 300));
  WaitForBatchKernels();
  EXPECT_EQ(RunsOfAll(), 1);
  EXPECT_LE(controls_.most_bytes, 1 << 20);
}

TEST_F(CudnnBatchTest, MixesLengthsIncludingRowsWithoutKeys) {
  Start();
  Problem lengths = Small();
  lengths.causal = false;
  lengths.has_key_lengths = true;
  for (int n = 0; n < 4; ++n) {
    lengths.query_length = 2 + 3 * n;
    lengths.key_length = 30 - 7 * n;
    Wait(lengths);
    inputs_.back().key_lengths = {0, n, 9, 1};
  }
  WaitForBatchKernels();
  EXPECT_EQ(RunsOfAll(), 1);
}

TEST_F(CudnnBatchTest, RequestsDoNotAffectEachOther) {
  Start();
  for (int n = 0; n < 3; ++n) Wait(Decode(2, 10 + n));
  WaitForBatchKernels();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  inputs_[1].value.Set(0, 0, 3, 2, nan);
  inputs_[1].key.Set(1, 1, 0, 5, infinity);
  EXPECT_EQ(RunsOfAll(), 1);
  EXPECT_THAT(backend_.state().fallback_pieces, ::testing::ElementsAre(0, 1, 0, 0))
      << "the CPU computes only the request with the NaN";
  for (test::Inputs& inputs : inputs_) inputs.query.Set(0, 0, 0, 0, nan);
  EXPECT_EQ(RunsOfAll(), 0);
}

TEST_F(CudnnBatchTest, FallsBackToTheCpuIfTheDeviceFails) {
  Start();
  for (int n = 0; n < 3; ++n) Wait(Decode(2, 10 + n));
  WaitForBatchKernels();
  controls_.failures = 1;
  EXPECT_EQ(RunsOfAll(), 1);
  EXPECT_EQ(RunsOfAll(), 0) << "the device is in backoff";
  EXPECT_EQ(backend_.state().used_memory_bytes, 0);
  clock_.Advance(DeviceHealth::kFirstBackoff);
  EXPECT_EQ(RunsOfAll(), 1);
}

TEST_F(CudnnBatchTest, RunsOneByOneIfTheBatchExceedsALane) {
  constexpr int64_t kArena = 24 << 10;
  Start(kArena);
  // Small, except for the padded lse of a batch.
  Problem problem = Small();
  problem.dtype = DType::kFloat16;
  problem.batch = 1;
  problem.query_heads = 12;
  problem.query_length = 2;
  problem.key_length = 2;
  problem.causal = false;
  for (int n = 0; n < 4; ++n) Wait(problem);
  EXPECT_LE(MakePlan(problem, WithLanes())->batch_group()->cost, 0.5);
  WaitForBatchKernels();
  EXPECT_EQ(RunsOfAll(), 4);
  EXPECT_LE(controls_.most_bytes, kArena);
}

TEST_F(CudnnBatchTest, NeedsOnlyWarmKernels) {
  Start();
  Problem causal = Small();
  causal.key_length = causal.query_length;
  const Problem shapes[] = {Decode(1, 200), causal};
  ASSERT_TRUE(backend_.Warm(shapes).ok());
  WaitForAllPlans();
  const int compiled = controls_.compilations;
  for (const Problem& shape : shapes) {
    for (const int count : {2, 3, 5, 9}) {
      problems_.clear();
      inputs_.clear();
      for (int n = 0; n < count; ++n) Wait(shape);
      EXPECT_EQ(RunsOfAll(), 1) << count;
    }
  }
  EXPECT_EQ(controls_.compilations, compiled);
}

TEST_F(CudnnBatchTest, RequestsDifferOnlyInLengths) {
  Start();
  const auto batch_group = [this](const Problem& problem) {
    const auto plan = MakePlan(problem, WithLanes());
    return plan->batch_group() == nullptr ? "" : plan->batch_group()->key;
  };
  const Problem problem = Decode(2, 100);
  EXPECT_NE(batch_group(problem), "");
  for (auto change : std::initializer_list<void (*)(Problem&)>{
           [](Problem& p) { p.batch = 5; }, [](Problem& p) { p.key_length = 5; },
           [](Problem& p) { p.past_length = 50; }, [](Problem& p) { p.has_key_lengths = true; },
           [](Problem& p) { p.left_window = 3; }, [](Problem& p) { p.wants_lse = false; }}) {
    Problem other = problem;
    change(other);
    EXPECT_EQ(batch_group(other), batch_group(problem)) << test::ToText(other);
  }
  for (auto change : std::initializer_list<void (*)(Problem&)>{
           [](Problem& p) { p.dtype = DType::kFloat16; }, [](Problem& p) { p.query_heads = 8; },
           [](Problem& p) { p.kv_heads = 4; }, [](Problem& p) { p.head_size = 16; },
           [](Problem& p) { p.value_head_size = 16; }, [](Problem& p) { p.scale = 2; },
           [](Problem& p) { p.query_length = 9; }}) {
    Problem other = problem;
    change(other);
    EXPECT_NE(batch_group(other), batch_group(problem)) << test::ToText(other);
  }
  for (auto change : std::initializer_list<void (*)(Problem&)>{
           [](Problem& p) { p.softcap = 3; }, [](Problem& p) { p.wants_present = true; },
           [](Problem& p) { p.batch = 33; }, [](Problem& p) { p.key_length = 3000; },
           [](Problem& p) {
             p.mask = MaskShape{DType::kBool, {1, 1, 1, 100}};
           }}) {
    Problem other = problem;
    change(other);
    EXPECT_EQ(batch_group(other), "") << test::ToText(other);
  }
}

TEST_F(CudnnBackendTest, SendsNoNonFiniteNumbers) {
  Start();
  const Problem problem = Small();
  test::Rng rng(5);
  test::Inputs inputs = test::RandomInputs(problem, rng);
  // Only the last query sees this key.
  inputs.value.Set(0, 0, problem.query_length - 1, 0, std::numeric_limits<double>::quiet_NaN());
  const auto outputs = test::RunAttention(problem, inputs, On("cudnn"));
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  EXPECT_TRUE(test::Matches(problem, *outputs, test::Attend(problem, inputs)));
  EXPECT_EQ(controls_.runs, 0);
}

TEST_F(CudnnBackendTest, CountsThePiecesOfTheCpuByReason) {
  Start(/*arena_bytes=*/24 << 10);
  const auto fallback_pieces = [this] { return backend_.state().fallback_pieces; };
  const auto of_reason = [&](FallbackReason reason) {
    return fallback_pieces()[static_cast<size_t>(reason)];
  };
  ExpectCorrectResult(Small());
  const int pieces = controls_.runs;
  ASSERT_GT(pieces, 1);
  EXPECT_THAT(fallback_pieces(), ::testing::Each(0));

  RunWith(Small(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(of_reason(FallbackReason::kNumbers), 1) << "the other pieces have finite numbers";

  controls_.failures = 1;
  ExpectCorrectResult(Small());
  EXPECT_GE(of_reason(FallbackReason::kDevice), 1);
  ExpectCorrectResult(Small());
  EXPECT_GE(of_reason(FallbackReason::kDevice), 1 + pieces) << "the device is in backoff";

  clock_.Advance(DeviceHealth::kFirstBackoff);
  controls_.workspace_bytes = 24 << 10;
  Problem problem = Small();
  problem.softcap = 3;  // needs its own kernels
  ExpectCorrectResult(problem);
  EXPECT_EQ(of_reason(FallbackReason::kMemory), pieces);
  controls_.declines = true;
  problem.softcap = 4;
  ExpectCorrectResult(problem);
  EXPECT_EQ(of_reason(FallbackReason::kKernels), pieces);
}

TEST_F(CudnnBackendTest, SendsMasksOfTheLowestFloat) {
  Start();
  Problem problem = Small();
  problem.mask = MaskShape{DType::kFloat32, {1, 1, 9, 17}};
  test::Rng rng(5);
  test::Inputs inputs = test::RandomInputs(problem, rng);
  const double lowest = -test::MaxOf(DType::kFloat32);
  for (int64_t i = 0; i < 9; ++i) {
    for (int64_t j = 1; j < 17; ++j) inputs.mask->Set(0, 0, i, j, lowest);
    inputs.mask->Set(0, 0, i, 0, 0.5);
  }
  const auto check = [&](int runs) {
    const auto outputs = test::RunAttention(problem, inputs, On("cudnn"));
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_TRUE(test::Matches(problem, *outputs, test::Attend(problem, inputs)));
    EXPECT_EQ(controls_.runs, runs);
  };
  check(1);
  // Now row 3 sees only the lowest float: equal weights, which the device would not compute.
  inputs.mask->Set(0, 0, 3, 0, lowest);
  check(1);
}

TEST(CudnnPiecesTest, CoverTheProblemOnce) {
  for (int64_t batch : {1, 2, 5}) {
    for (int64_t kv_heads : {1, 3, 8}) {
      for (int64_t arena : {8 << 10, 40 << 10, 1 << 20}) {
        Problem p = Small();
        p.batch = batch;
        p.kv_heads = kv_heads;
        p.query_heads = 2 * kv_heads;
        const Partition partition = MakePartition(p, arena, kLanes);
        ASSERT_GT(partition.batch, 0);
        std::vector<int> covered(batch * kv_heads);
        ASSERT_FALSE(partition.splits_heads());
        for (int64_t n = 0; n < partition.task_count(p); ++n) {
          const Piece piece = partition.piece(p, n, 0);
          EXPECT_LE(LayOut(GraphOf(ProblemOf(p, piece))).end, arena);
          EXPECT_GT(piece.batch * piece.kv_heads, 0);
          for (int64_t b = 0; b < piece.batch; ++b) {
            for (int64_t h = 0; h < piece.kv_heads; ++h) {
              ++covered[(piece.first_batch + b) * kv_heads + piece.first_kv_head + h];
            }
          }
        }
        EXPECT_THAT(covered, ::testing::Each(1));
      }
    }
  }
}

TEST(CudnnPiecesTest, CoverEveryPairOfAHeadOnce) {
  for (int64_t past : {0, 50}) {
    Problem p = Long();
    p.past_length = past;
    const Partition partition = MakePartition(p, kSmallArena, kLanes);
    ASSERT_TRUE(partition.splits_heads());
    const int64_t keys = p.total_keys();
    std::vector<int> covered(p.batch * p.kv_heads * p.query_length * keys);
    for (int64_t task = 0; task < partition.task_count(p); ++task) {
      for (int64_t n = 0; n < partition.pieces_per_task(p); ++n) {
        const Piece piece = partition.piece(p, task, n);
        const Problem part = ProblemOf(p, piece);
        EXPECT_LE(CropOf(part).empty() ? 0 : LayOut(GraphOf(part)).end, kSmallArena);
        EXPECT_EQ(piece.batch * piece.kv_heads, 1);
        EXPECT_TRUE(piece.keys.begin >= past || piece.keys.begin + piece.keys.count <= past);
        const int64_t head = piece.first_batch * p.kv_heads + piece.first_kv_head;
        for (int64_t i = 0; i < piece.queries.count; ++i) {
          const int64_t row = head * p.query_length + piece.queries.begin + i;
          for (int64_t j = 0; j < piece.keys.count; ++j)
            ++covered[row * keys + piece.keys.begin + j];
        }
      }
    }
    EXPECT_THAT(covered, ::testing::Each(1));
  }
}

}  // namespace
}  // namespace rapt::cudnn
