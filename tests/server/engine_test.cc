#include "server/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "attention/positions/rotary_embedding.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/support/fake_device.h"
#include "tests/support/fake_device_memory.h"

namespace rapt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kThreads = 2;
constexpr int64_t kBudgetBytes = 64 << 20;

// A call with fp32 tensors, which it owns.
struct Call {
  Call(Shape q_shape, Shape kv_shape, uint32_t seed = 1) {
    call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, q_shape};
    call.inputs[Role::kK] = TensorSpec{DType::kFloat32, kv_shape};
    call.inputs[Role::kV] = TensorSpec{DType::kFloat32, kv_shape};
    std::mt19937 random(seed);
    q = Fill(q_shape, random);
    k = Fill(kv_shape, random);
    v = Fill(kv_shape, random);
  }

  static std::vector<float> Fill(const Shape& shape, std::mt19937& random) {
    int64_t size = 1;
    for (const int64_t axis : shape) size *= axis;
    std::vector<float> values(size);
    for (float& value : values) value = static_cast<float>(random() % 2001) / 1000 - 1;
    return values;
  }

  Request ToRequest() const {
    Request request;
    request.call = Resolve(call).value();
    request.inputs[Role::kQ] = Input(q);
    request.inputs[Role::kK] = Input(k);
    request.inputs[Role::kV] = Input(v);
    request.key_lengths = key_lengths;
    return request;
  }

  static InputBytes Input(const std::vector<float>& values) {
    return {Bytes(values), static_cast<int64_t>(values.size() * sizeof(float))};
  }

  static const std::byte* Bytes(const std::vector<float>& values) {
    return reinterpret_cast<const std::byte*>(values.data());
  }

  OperatorCall call;
  std::vector<float> q, k, v;
  std::vector<int64_t> key_lengths;
};

// The hand-computed example of the specification: Q = K = V = X.
Call HandComputed() {
  Call call({1, 1, 3, 4}, {1, 1, 3, 4});
  call.q = call.k = call.v = {1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0};
  return call;
}

std::vector<float> Floats(const OutputBuffer& output) {
  std::vector<float> values(output.bytes.size() / sizeof(float));
  std::memcpy(values.data(), output.bytes.data(), output.bytes.size());
  return values;
}

class EngineTest : public ::testing::Test {
 protected:
  // The result, and the thread that delivered it.
  struct Outcome {
    Result result;
    std::thread::id thread;
  };

  Outcome Run(Request request) {
    std::promise<Outcome> promise;
    engine_.Submit(std::move(request), [&promise](Result result) {
      promise.set_value({std::move(result), std::this_thread::get_id()});
    });
    return promise.get_future().get();
  }

  // The result of an engine with that backend.
  Result RunOn(const char* backend, Request request) {
    PlanOptions options = options_;
    options.backend = backend;
    Engine engine(options, gate_, pool_, executor_);
    std::promise<Result> promise;
    engine.Submit(std::move(request), [&](Result r) { promise.set_value(std::move(r)); });
    return promise.get_future().get();
  }

  SteadyClock clock_;
  Timer timer_{clock_};
  AdmissionGate gate_{
      {.budget_bytes = kBudgetBytes, .max_queued = 8, .max_queue_delay = std::chrono::hours(1)},
      timer_,
      clock_};
  BufferPool pool_{kBudgetBytes / 2, clock_};
  Executor executor_{kThreads, clock_};
  PlanOptions options_{.backend = "auto", .isa = "auto", .threads = kThreads};
  Engine engine_{options_, gate_, pool_, executor_};
};

// Memory for a response's encoding waits with that of the outputs, so that it is there in the end.
TEST_F(EngineTest, ReservesTheMemoryOfTheEncodingWithTheOutputs) {
  constexpr int64_t kBytes = 1 << 20;
  Request request = HandComputed().ToRequest();
  request.encoding_bytes = kBytes;
  Result result = Run(std::move(request)).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_GE(gate_.reserved_bytes(), kBytes);
  result.encoding_memory = nullptr;
  EXPECT_LT(gate_.reserved_bytes(), kBytes);
  result.outputs = {};
  EXPECT_EQ(gate_.reserved_bytes(), 0);
  request = HandComputed().ToRequest();
  request.encoding_bytes = kBudgetBytes;
  EXPECT_EQ(Run(std::move(request)).result.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, ComputesTheHandComputedExample) {
  const Outcome outcome = Run(HandComputed().ToRequest());
  ASSERT_TRUE(outcome.result.status.ok()) << outcome.result.status;
  const std::vector<float> want = {.8137f, .4935f, .5065f, .1863f, .4935f, .8137f,
                                   .1863f, .5065f, .7259f, .7259f, .2741f, .2741f};
  EXPECT_THAT(Floats(outcome.result.outputs[Role::kY]),
              ::testing::Pointwise(::testing::FloatNear(5e-5f), want));
}

TEST_F(EngineTest, NamesBackendAndPlan) {
  const Result result = Run(HandComputed().ToRequest()).result;
  ASSERT_NE(result.routing.backend, nullptr);
  EXPECT_EQ(result.routing.backend->name(), "cpu");
  EXPECT_EQ(result.routing.declined, nullptr);
  EXPECT_THAT(result.plan, StartsWith("cpu/"));
}

TEST_F(EngineTest, RunsDevicePlansOnTheLanes) {
  test::FakeDevice::Controls controls;
  std::thread::id ran_on;
  controls.on_run = [&] { ran_on = std::this_thread::get_id(); };
  cudnn::CudnnBackend device;
  const BackendSet backends({&device});
  device.Start(std::make_unique<test::FakeDevice>(controls, 2, 1 << 20), CpuBackend(), clock_, {});
  {
    Executor lanes(2, clock_);
    Engine engine({.backend = "cudnn", .threads = kThreads, .backends = &backends}, gate_, pool_,
                  executor_, &lanes);
    const Call call = HandComputed();
    std::promise<Outcome> promise;
    engine.Submit(call.ToRequest(), [&promise](Result result) {
      promise.set_value({std::move(result), std::this_thread::get_id()});
    });
    const Outcome outcome = promise.get_future().get();
    ASSERT_TRUE(outcome.result.status.ok()) << outcome.result.status;
    EXPECT_EQ(outcome.result.routing.backend->name(), "cudnn");
    EXPECT_NEAR(Floats(outcome.result.outputs[Role::kY])[0], .8137, 5e-5);
    EXPECT_EQ(outcome.thread, ran_on);
    EXPECT_NE(ran_on, std::this_thread::get_id()) << "although it is tiny";
    EXPECT_EQ(controls.runs, 1);
  }
}

TEST_F(EngineTest, WaitingRequestsShareOneDeviceRun) {
  test::FakeDevice::Controls controls;
  std::promise<void> running;
  std::promise<void> may_go_on;
  controls.on_run = [&] {
    if (controls.runs > 1) return;
    running.set_value();
    may_go_on.get_future().wait();
  };
  const Call calls[] = {HandComputed(), Call({1, 1, 5, 4}, {1, 1, 9, 4}),
                        Call({2, 1, 3, 4}, {2, 1, 70, 4}), Call({1, 1, 2, 4}, {1, 1, 1, 4})};
  cudnn::CudnnBackend device;
  const BackendSet backends({&device});
  device.Start(std::make_unique<test::FakeDevice>(controls, 1, 1 << 20), CpuBackend(), clock_, {});
  ASSERT_TRUE(device.Warm({Resolve(calls[0].call)->problem}).ok());
  while (device.warmth().compiling > 0) std::this_thread::yield();
  {
    Executor lanes(1, clock_);
    Engine engine({.backend = "cudnn", .threads = kThreads, .backends = &backends}, gate_, pool_,
                  executor_, &lanes);
    std::promise<Result> results[std::size(calls)];
    for (size_t n = 0; n < std::size(calls); ++n) {
      engine.Submit(calls[n].ToRequest(),
                    [&, n](Result result) { results[n].set_value(std::move(result)); });
      if (n == 0) running.get_future().wait();
    }
    may_go_on.set_value();
    for (size_t n = 0; n < std::size(calls); ++n) {
      const Result result = results[n].get_future().get();
      ASSERT_TRUE(result.status.ok()) << result.status;
      EXPECT_EQ(result.batch_size, n == 0 ? 1 : 3);
      const Result alone = Run(calls[n].ToRequest()).result;
      EXPECT_EQ(alone.routing.backend->name(), "cpu");
      EXPECT_THAT(
          Floats(result.outputs[Role::kY]),
          ::testing::Pointwise(::testing::FloatNear(1e-5f), Floats(alone.outputs[Role::kY])));
    }
    EXPECT_EQ(controls.runs, 2);
  }
}

TEST_F(EngineTest, PreparesTheDeviceForCallsThatFellBack) {
  test::FakeDevice::Controls controls;
  cudnn::CudnnBackend device;
  const BackendSet backends({&device});
  device.Start(std::make_unique<test::FakeDevice>(controls, 1, 1 << 20), CpuBackend(), clock_, {});
  {
    Executor lanes(1, clock_);
    Engine engine({.backend = "auto", .threads = kThreads, .backends = &backends}, gate_, pool_,
                  executor_, &lanes);
    const Call call = HandComputed();
    const auto run = [&] {
      std::promise<Result> promise;
      engine.Submit(call.ToRequest(), [&](Result result) { promise.set_value(std::move(result)); });
      return promise.get_future().get();
    };
    const Result first = run();
    EXPECT_EQ(first.routing.backend->name(), "cpu");
    EXPECT_TRUE(first.routing.declined_for_now);
    while (device.state().plans.ready == 0) std::this_thread::yield();
    EXPECT_EQ(run().routing.backend->name(), "cudnn");
  }
}

TEST_F(EngineTest, ReportsTheFallbackForTheDevice) {
  test::FakeDevice::Controls controls;
  cudnn::CudnnBackend device;
  const BackendSet backends({&device});
  device.Start(std::make_unique<test::FakeDevice>(controls, 2, 1 << 20), CpuBackend(), clock_, {});
  {
    Executor lanes(2, clock_);
    Engine engine({.backend = "cudnn", .threads = kThreads, .backends = &backends}, gate_, pool_,
                  executor_, &lanes);
    const auto names = [&engine](const Call& call) {
      std::promise<Result> promise;
      engine.Submit(call.ToRequest(),
                    [&promise](Result result) { promise.set_value(std::move(result)); });
      const Result result = promise.get_future().get();
      EXPECT_TRUE(result.status.ok()) << result.status;
      EXPECT_THAT(result.plan, StartsWith("cudnn"));
      return NamesOf(result.routing);
    };
    EXPECT_EQ(names(HandComputed()), "cudnn");
    Call with_nan = HandComputed();
    with_nan.v[0] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(names(with_nan), "cudnn+cpu");
    EXPECT_EQ(names(HandComputed()), "cudnn") << "the next call is unaffected";
    controls.failures = 1;
    EXPECT_EQ(names(HandComputed()), "cudnn+cpu");
    EXPECT_EQ(controls.failures, 0);
  }
}

TEST_F(EngineTest, RunsATinyRequestOnTheCallersThreadAndALargeOneElsewhere) {
  EXPECT_EQ(Run(HandComputed().ToRequest()).thread, std::this_thread::get_id());
  EXPECT_NE(Run(Call({1, 2, 200, 64}, {1, 2, 200, 64}).ToRequest()).thread,
            std::this_thread::get_id());
}

TEST_F(EngineTest, ReturnsTheSameBitsAsTheLibrary) {
  const Call call({2, 4, 150, 32}, {2, 2, 170, 32});
  const Outcome outcome = Run(call.ToRequest());
  ASSERT_TRUE(outcome.result.status.ok()) << outcome.result.status;

  const ResolvedCall resolved = Resolve(call.call).value();
  const Plan plan = MakePlan(resolved.problem, options_).value();
  Arguments arguments;
  arguments.inputs[Role::kQ] = resolved.Input(Role::kQ, Call::Bytes(call.q));
  arguments.inputs[Role::kK] = resolved.Input(Role::kK, Call::Bytes(call.k));
  arguments.inputs[Role::kV] = resolved.Input(Role::kV, Call::Bytes(call.v));
  std::vector<float> want(call.q.size());
  arguments.outputs[Role::kY] =
      resolved.Output(Role::kY, reinterpret_cast<std::byte*>(want.data()));
  AlignedBuffer workspace(plan.workspace_bytes());
  ThreadPool pool(kThreads);
  ASSERT_TRUE(::rapt::Run(plan, arguments, workspace.span(), pool).ok());
  EXPECT_EQ(Floats(outcome.result.outputs[Role::kY]), want);
}

TEST_F(EngineTest, ReturnsEveryRequestedOutput) {
  Call call = HandComputed();
  call.call.wants_lse = true;
  call.call.wants_present = true;
  call.call.score_output = ScoreOutput::kWeights;
  const Result result = Run(call.ToRequest()).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(Floats(result.outputs[Role::kPresentKey]), call.k);
  EXPECT_EQ(Floats(result.outputs[Role::kPresentValue]), call.v);
  const std::vector<float> weights = {.5065f, .1863f, .3072f, .1863f, .5065f,
                                      .3072f, .2741f, .2741f, .4519f};
  EXPECT_THAT(Floats(result.outputs[Role::kScores]),
              ::testing::Pointwise(::testing::FloatNear(1e-4f), weights));
  EXPECT_EQ(Floats(result.outputs[Role::kLse]).size(), 3u);
}

TEST_F(EngineTest, UnrequestedOutputsStayEmpty) {
  const Result result = Run(HandComputed().ToRequest()).result;
  for (const OutputBuffer* output :
       {&result.outputs[Role::kLse], &result.outputs[Role::kScores],
        &result.outputs[Role::kPresentKey], &result.outputs[Role::kPresentValue]}) {
    EXPECT_TRUE(output->bytes.empty());
    EXPECT_EQ(output->owner, nullptr);
  }
}

TEST_F(EngineTest, AnswersAnEmptyProblemWithAnEmptyOutput) {
  const Result result = Run(Call({0, 1, 3, 4}, {0, 1, 3, 4}).ToRequest()).result;
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(result.outputs[Role::kY].bytes.empty());
}

TEST_F(EngineTest, OutputsAreChargedUntilTheyAreDestroyed) {
  std::optional<Result> result = Run(Call({1, 2, 200, 64}, {1, 2, 200, 64}).ToRequest()).result;
  ASSERT_TRUE(result->status.ok()) << result->status;
  EXPECT_EQ(gate_.reserved_bytes(), BufferPool::SizeOfClass(1 * 2 * 200 * 64 * 4))
      << "only Y, the workspace is released";
  OutputBuffer copy = result->outputs[Role::kY];
  result.reset();
  EXPECT_EQ(gate_.reserved_bytes(), BufferPool::SizeOfClass(1 * 2 * 200 * 64 * 4))
      << "the copy shares the bytes";
  copy = {};
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, WritesOutputsToTheCallersMemoryWithoutCharge) {
  const Call call({1, 2, 200, 64}, {1, 2, 200, 64});
  const std::vector<float> want = Floats(Run(call.ToRequest()).result.outputs[Role::kY]);
  std::vector<float> y(want.size());
  Request request = call.ToRequest();
  request.places[Role::kY].bytes = {reinterpret_cast<std::byte*>(y.data()),
                                    y.size() * sizeof(float)};
  const Result result = Run(std::move(request)).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(y, want);
  EXPECT_EQ(result.outputs[Role::kY].bytes.data(), reinterpret_cast<const std::byte*>(y.data()));
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

// Q, K, V and the destination of Y, one after another in device memory.
struct CallOnDevice {
  explicit CallOnDevice(const Call& call)
      : bytes(static_cast<int64_t>(call.q.size() * sizeof(float))),
        memory(static_cast<size_t>(4 * bytes)) {
    for (const auto& values : {std::pair(0, &call.q), {1, &call.k}, {2, &call.v}}) {
      std::memcpy(memory.bytes.data() + values.first * bytes, Call::Bytes(*values.second), bytes);
    }
  }

  Request Move(Request request) const {
    request.inputs[Role::kQ] = InputBytes(DevicePart{&memory, 0}, bytes);
    request.inputs[Role::kK] = InputBytes(DevicePart{&memory, bytes}, bytes);
    request.inputs[Role::kV] = InputBytes(DevicePart{&memory, 2 * bytes}, bytes);
    request.places[Role::kY].device = {&memory, 3 * bytes};
    return request;
  }

  std::vector<float> y() const {
    return Floats({absl::MakeConstSpan(memory.bytes).subspan(3 * bytes), nullptr});
  }

  const int64_t bytes;
  test::FakeDeviceMemory memory;
};

TEST_F(EngineTest, CopiesTensorsFromAndToDeviceMemory) {
  // The smaller one would run inline without the copies.
  for (const Call& call : {HandComputed(), Call({1, 2, 200, 64}, {1, 2, 200, 64})}) {
    const std::vector<float> want = Floats(Run(call.ToRequest()).result.outputs[Role::kY]);
    const CallOnDevice on_device(call);
    const Outcome outcome = Run(on_device.Move(call.ToRequest()));
    ASSERT_TRUE(outcome.result.status.ok()) << outcome.result.status;
    EXPECT_EQ(on_device.y(), want);
    EXPECT_NE(outcome.thread, std::this_thread::get_id()) << "copying waits for the device";
  }
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, AMaskInDeviceMemoryIsCopied) {
  Call call = HandComputed();
  call.call.inputs[Role::kMask] = TensorSpec{DType::kBool, {3, 3}};
  test::FakeDeviceMemory memory(16);
  for (const int diagonal : {0, 4, 8}) memory.bytes[7 + diagonal] = std::byte{1};
  Request request = call.ToRequest();
  request.inputs[Role::kMask] = InputBytes(DevicePart{&memory, 7}, 9);
  const Result result = Run(std::move(request)).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(Floats(result.outputs[Role::kY]), call.v) << "each query sees its own key";
}

TEST_F(EngineTest, ADeviceFailureFailsTheRequest) {
  const Call call({1, 2, 200, 64}, {1, 2, 200, 64});
  CallOnDevice on_device(call);
  on_device.memory.fails_to_read = true;
  Result result = Run(on_device.Move(call.ToRequest())).result;
  EXPECT_EQ(result.status, absl::UnavailableError("told to fail reading"));
  on_device.memory.fails_to_read = false;
  on_device.memory.fails_to_write = true;
  result = Run(on_device.Move(call.ToRequest())).result;
  EXPECT_EQ(result.status, absl::UnavailableError("told to fail writing"));
  EXPECT_EQ(result.outputs[Role::kY].bytes.data(), nullptr);
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, AMaskInSharedMemoryIsCopiedOnce) {
  Call call = HandComputed();
  call.call.inputs[Role::kMask] = TensorSpec{DType::kBool, {3, 3}};
  const bool mask[9] = {true, false, false, false, true, false, false, false, true};
  Request request = call.ToRequest();
  request.inputs[Role::kMask] = InputBytes(reinterpret_cast<const std::byte*>(mask), 9);
  request.inputs[Role::kMask].is_shared = true;
  const int64_t own_bytes = BufferPool::SizeOfClass(4 * 3 * 4) + BufferPool::SizeOfClass(9);
  int64_t most_charged = 0;
  request.check_shared_memory = [&]() -> absl::Status {
    most_charged = std::max(most_charged, gate_.reserved_bytes());
    return absl::OkStatus();
  };
  const Result result = Run(std::move(request)).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(Floats(result.outputs[Role::kY]), call.v) << "each query sees its own key";
  EXPECT_GE(most_charged, own_bytes);
}

// Otherwise the caller could change positions between their check and their use.
TEST_F(EngineTest, PositionsInSharedMemoryAreCopiedBeforeTheyAreChecked) {
  const std::vector<float> x = {1, 2, 3, 4}, cosines = {1, 0}, sines = {0, 1};
  int64_t positions[] = {1, 0};
  RotaryEmbeddingCall call;
  call.inputs[kTokens] = TensorSpec{DType::kFloat32, {1, 1, 2, 2}};
  call.inputs[Role::kCosCache] = call.inputs[Role::kSinCache] = TensorSpec{DType::kFloat32, {2, 1}};
  call.inputs[Role::kPositionIds] = TensorSpec{DType::kInt64, {1, 2}};
  Request request;
  request.model = ModelId(kRotaryEmbedding);
  request.SetOperator(MakeRotaryEmbedding(call).value());
  const auto bytes = [](const auto& values) {
    return InputBytes(reinterpret_cast<const std::byte*>(std::data(values)),
                      static_cast<int64_t>(std::size(values) * sizeof(values[0])));
  };
  request.inputs[kTokens] = bytes(x);
  request.inputs[Role::kCosCache] = bytes(cosines);
  request.inputs[Role::kSinCache] = bytes(sines);
  request.inputs[Role::kPositionIds] = bytes(positions);
  request.inputs[Role::kPositionIds].is_shared = true;
  request.check_shared_memory = [&]() -> absl::Status {  // runs after the copy
    positions[0] = positions[1] = int64_t{1} << 40;
    return absl::OkStatus();
  };
  const Result result = Run(std::move(request)).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(Floats(result.outputs[Role::kY]), (std::vector<float>{-2, 1, 3, 4}));
}

TEST_F(EngineTest, FailsIfSharedMemoryIsRevoked) {
  for (const int64_t length : {3, 200}) {  // on this thread, and on a compute thread
    Request request = Call({1, 2, length, 64}, {1, 2, length, 64}).ToRequest();
    request.check_shared_memory = [] { return absl::InvalidArgumentError("gone"); };
    const Result result = Run(std::move(request)).result;
    EXPECT_EQ(result.status, absl::InvalidArgumentError("gone"));
    EXPECT_TRUE(result.outputs[Role::kY].bytes.empty());
    EXPECT_EQ(gate_.reserved_bytes(), 0);
  }
}

TEST_F(EngineTest, RejectsAScoreMatrixBeyondTheBudgetBeforeAllocatingIt) {
  constexpr int64_t kLength = 1 << 20;  // 4 MiB of Q and K each, 4 TiB of scores
  Call call({1, 1, kLength, 1}, {1, 1, kLength, 1});
  call.call.score_output = ScoreOutput::kWeights;
  const Result result = Run(call.ToRequest()).result;
  EXPECT_EQ(result.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result.status.message()),
              AllOf(HasSubstr("4398"), HasSubstr(std::to_string(kBudgetBytes))));
  EXPECT_TRUE(result.outputs[Role::kY].bytes.empty());
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, RejectsKeyLengthsOutOfRange) {
  Call call = HandComputed();
  call.call.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {1}};
  call.key_lengths = {4};
  const Result result = Run(call.ToRequest()).result;
  EXPECT_EQ(result.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status.message()), HasSubstr("nonpad_kv_seqlen[0] is 4"));
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, AbandonsACancelledRequest) {
  const Call call = HandComputed();
  std::atomic<bool> cancelled{true};
  Request request = call.ToRequest();
  request.cancelled = &cancelled;
  const Result result = Run(std::move(request)).result;
  EXPECT_EQ(result.status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(result.outputs[Role::kY].bytes.empty());
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, AbandonsARequestPastItsDeadline) {
  const Call call({1, 2, 200, 64}, {1, 2, 200, 64});
  Request request = call.ToRequest();
  request.deadline = clock_.Now();
  EXPECT_EQ(Run(std::move(request)).result.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, RejectsNewRequestsAfterStopAccepting) {
  engine_.StopAccepting();
  EXPECT_FALSE(engine_.accepting());
  const Result result = Run(HandComputed().ToRequest()).result;
  EXPECT_EQ(result.status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(EngineTest, KeepsTheOwnerOfTheInputsUntilDoneHasRun) {
  const Call call(Shape{1, 2, 200, 64}, Shape{1, 2, 200, 64});
  // Not a weak_ptr: ThreadSanitizer reports a race of libstdc++'s counts.
  const auto is_alive = std::make_shared<std::atomic<bool>>(true);
  Request request = call.ToRequest();
  request.owner =
      std::shared_ptr<const void>(&call, [is_alive](const void*) { *is_alive = false; });
  std::promise<bool> alive_in_done;
  engine_.Submit(std::move(request), [&](Result) { alive_in_done.set_value(*is_alive); });
  EXPECT_TRUE(alive_in_done.get_future().get());
}

TEST_F(EngineTest, AnswersManyRequestsAtOnce) {
  constexpr int kRequests = 64;
  const Call call({1, 2, 100, 32}, {1, 2, 100, 32});
  const std::vector<float> want = Floats(Run(call.ToRequest()).result.outputs[Role::kY]);
  std::vector<std::promise<Result>> results(kRequests);
  for (std::promise<Result>& result : results) {
    engine_.Submit(call.ToRequest(), [&result](Result r) { result.set_value(std::move(r)); });
  }
  for (std::promise<Result>& promise : results) {
    const Result result = promise.get_future().get();
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(Floats(result.outputs[Role::kY]), want);
  }
}

class EngineDiagnoseTest : public EngineTest {
 protected:
  absl::StatusOr<DiagnosisReport> Diagnose(Request request) {
    std::promise<absl::StatusOr<DiagnosisReport>> promise;
    engine_.Diagnose(std::move(request), [&promise](absl::StatusOr<DiagnosisReport> report) {
      promise.set_value(std::move(report));
    });
    return promise.get_future().get();
  }
};

TEST_F(EngineDiagnoseTest, ReportsAndReleasesItsMemory) {
  const absl::StatusOr<DiagnosisReport> report = Diagnose(HandComputed().ToRequest());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->raw_scores.count(), 9);
  EXPECT_NEAR(report->output.max, .8137, 5e-5);
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineDiagnoseTest, ChargesEachWorkersRowToTheBudget) {
  constexpr int64_t kKeys = 1000, kSize = 4;
  const int64_t workspace_bytes =
      BufferPool::SizeOfClass(kThreads * (kKeys + kSize) * int64_t{sizeof(double)});
  // One request may take 7/16 of the budget.
  const int64_t enough = workspace_bytes * 16 / 7 + 16;
  for (const int64_t budget_bytes : {enough, enough - 100}) {
    AdmissionGate gate({.budget_bytes = budget_bytes}, timer_, clock_);
    Engine engine(options_, gate, pool_, executor_);
    std::promise<absl::Status> promise;
    const Call call({1, 1, 3, kSize}, {1, 1, kKeys, kSize});
    engine.Diagnose(call.ToRequest(), [&promise](const absl::StatusOr<DiagnosisReport>& report) {
      promise.set_value(report.status());
    });
    const absl::Status status = promise.get_future().get();
    EXPECT_EQ(status.code(),
              budget_bytes == enough ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted)
        << status;
  }
}

TEST_F(EngineDiagnoseTest, RejectsInvalidData) {
  Call call({2, 1, 3, 4}, {2, 1, 5, 4});
  call.call.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {2}};
  call.key_lengths = {5, 6};
  const absl::Status status = Diagnose(call.ToRequest()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("nonpad_kv_seqlen[1] is 6"));
}

TEST_F(EngineDiagnoseTest, EndsOnDeadlineCancellationAndShutdown) {
  Request late = HandComputed().ToRequest();
  late.deadline = clock_.Now();
  EXPECT_EQ(Diagnose(std::move(late)).status().code(), absl::StatusCode::kDeadlineExceeded);

  const std::atomic<bool> given_up{true};
  Request cancelled = HandComputed().ToRequest();
  cancelled.cancelled = &given_up;
  EXPECT_EQ(Diagnose(std::move(cancelled)).status().code(), absl::StatusCode::kCancelled);

  engine_.StopAccepting();
  EXPECT_EQ(Diagnose(HandComputed().ToRequest()).status().code(), absl::StatusCode::kUnavailable);
}

// An input's bytes in slices of `slice_bytes`.
class SlicedInput {
 public:
  SlicedInput(const InputBytes& input, int64_t slice_bytes) : size_(input.size) {
    for (int64_t begin = 0; begin < size_; begin += slice_bytes) {
      const int64_t end = std::min(begin + slice_bytes, size_);
      slices_.push_back({input.data + begin, begin, end});
    }
  }
  InputBytes input() const { return {SlicedBytes{slices_, 0}, size_}; }

 private:
  int64_t size_;
  std::vector<ByteSlice> slices_;
};

TEST_F(EngineTest, TensorsInSlicesGiveTheSameBitsOnEveryBackend) {
  Call call({1, 4, 33, 16}, {1, 2, 70, 16});
  call.call.inputs[Role::kMask] = TensorSpec{DType::kFloat32, {33, 70}};
  std::mt19937 random(2);
  const std::vector<float> mask = Call::Fill({33, 70}, random);
  for (const char* backend : {"cpu", "reference"}) {
    Request whole = call.ToRequest();
    whole.inputs[Role::kMask] = Call::Input(mask);
    Request sliced = call.ToRequest();
    const SlicedInput q(whole.inputs[Role::kQ], 100), k(whole.inputs[Role::kK], 37),
        v(whole.inputs[Role::kV], 5), m(whole.inputs[Role::kMask], 11);
    sliced.inputs[Role::kQ] = q.input();
    sliced.inputs[Role::kK] = k.input();
    sliced.inputs[Role::kV] = v.input();
    sliced.inputs[Role::kMask] = m.input();
    const Result want = RunOn(backend, std::move(whole));
    const Result got = RunOn(backend, std::move(sliced));
    ASSERT_TRUE(want.status.ok() && got.status.ok()) << got.status;
    EXPECT_EQ(Floats(got.outputs[Role::kY]), Floats(want.outputs[Role::kY])) << backend;
  }
}

// The lse is strided to every backend, so that it is gathered.
TEST_F(EngineTest, TheBackwardPassReadsTensorsInSlicesOnEveryBackend) {
  Call call({1, 4, 33, 16}, {1, 2, 70, 16});
  OperatorCall& backward = call.call;
  backward.gradients = RoleSet();
  for (Role role : {Role::kDQ, Role::kDK, Role::kDV}) backward.gradients->Add(role);
  InputMap<std::vector<float>> values;
  std::mt19937 random(3);
  for (Role role : kBackwardInputs) {
    const bool is_lse = role == Role::kForwardLse || role == Role::kLseGradient;
    const Shape shape = is_lse ? Shape{1, 4, 33} : Shape{1, 4, 33, 16};
    backward.inputs[role] = TensorSpec{DType::kFloat32, shape};
    values[role] = Call::Fill(shape, random);
  }
  for (const char* backend : {"cpu", "reference"}) {
    Request whole = call.ToRequest();
    for (Role role : kBackwardInputs) whole.inputs[role] = Call::Input(values[role]);
    Request sliced = call.ToRequest();
    std::vector<std::unique_ptr<SlicedInput>> slices;
    for (Role role : InputTensorsOf(whole.call.problem)) {
      slices.push_back(std::make_unique<SlicedInput>(whole.inputs[role], 7 + slices.size()));
      sliced.inputs[role] = slices.back()->input();
    }
    const Result want = RunOn(backend, std::move(whole));
    const Result got = RunOn(backend, std::move(sliced));
    ASSERT_TRUE(want.status.ok() && got.status.ok()) << got.status;
    for (Role role : *backward.gradients) {
      EXPECT_EQ(Floats(got.outputs[role]), Floats(want.outputs[role])) << backend;
      EXPECT_FALSE(got.outputs[role].bytes.empty()) << backend;
    }
    EXPECT_TRUE(got.outputs[Role::kY].bytes.empty());
  }
}

TEST_F(EngineTest, ConvertsAMask) {
  Call call = HandComputed();
  call.call.inputs[Role::kMask] = TensorSpec{DType::kBool, {3, 3}};
  Request request = call.ToRequest();
  request.inputs[Role::kMask] = InputBytes(nullptr, 9);
  request.write_mask = [](absl::Span<std::byte> mask) {
    for (size_t n = 0; n < mask.size(); ++n) mask[n] = std::byte{n % 4 == 0};  // the diagonal
    return absl::OkStatus();
  };
  const Result result = Run(std::move(request)).result;
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(Floats(result.outputs[Role::kY]), call.v) << "each query sees its own key";
}

TEST_F(EngineTest, ReportsWhyAMaskCannotBeConverted) {
  Call call = HandComputed();
  call.call.inputs[Role::kMask] = TensorSpec{DType::kBool, {3, 3}};
  Request request = call.ToRequest();
  request.inputs[Role::kMask] = InputBytes(nullptr, 9);
  request.write_mask = [](absl::Span<std::byte>) { return absl::InvalidArgumentError("odd"); };
  const Result refused = Run(std::move(request)).result;
  EXPECT_EQ(refused.status, absl::InvalidArgumentError("odd"));
  EXPECT_TRUE(refused.outputs[Role::kY].bytes.empty());
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

TEST_F(EngineTest, WaitsForMemoryThenComputes) {
  auto all = gate_.AdmitNow({.bytes = gate_.LimitOf(AdmissionGate::Share::kCompute)});
  ASSERT_TRUE(all && all->ok());
  const Call call({1, 2, 400, 64},
                  {1, 2, 400, 64});  // too large for the part reserved for small requests
  Request request = call.ToRequest();
  std::promise<Result> promise;
  std::vector<MemoryBudget::Reservation> small;
  while (auto outcome = gate_.AdmitNow({.bytes = 10'000})) {
    small.push_back(std::move((*outcome)->reservation));
  }
  engine_.Submit(std::move(request), [&](Result r) { promise.set_value(std::move(r)); });
  EXPECT_EQ(gate_.waiting().depth, 1);
  all.reset();
  const Result result = promise.get_future().get();
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_GT(result.queue_time.count(), 0);
}

TEST_F(EngineTest, AMessageHoldsItsBytesUntilItIsReleased) {
  MessageReservation held;
  const std::atomic<bool> cancelled{false};
  engine_.AdmitMessage(1000, Instant::max(), cancelled, /*caller=*/nullptr,
                       [&](absl::StatusOr<MessageReservation> r) { held = *std::move(r); });
  EXPECT_EQ(gate_.reserved_bytes(), 1000);
  held = {};
  EXPECT_EQ(gate_.reserved_bytes(), 0);
}

}  // namespace
}  // namespace rapt
