// Requests computed by one run, on a fake backend.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/backend.h"
#include "server/engine.h"
#include "tests/support/fake_device_memory.h"

namespace rapt {
namespace {

class Grouped final : public BackendPlan {
 public:
  explicit Grouped(const Problem& p) : group_{absl::StrCat("D ", p.value_head_size), .25} {}
  const BatchGroup* batch_group() const override { return &group_; }

 private:
  const BatchGroup group_;
};

// Computes attention over a single key, whose value is the result. Can block its first run.
class OneKeyBackend final : public Backend {
 public:
  absl::string_view name() const override { return "one_key"; }
  int lanes() const override { return 1; }
  absl::Status Supports(const Problem&) const override { return absl::OkStatus(); }

  void PlanTasks(Plan& plan) const override {
    plan.stages = {1};
    plan.backend_plan = std::make_shared<Grouped>(plan.problem);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte*, int, int64_t, int,
               const Checkpoint&) const override {
    BatchMember member = {&plan, &arguments};
    RunBatch(absl::MakeSpan(&member, 1), 0);
  }

  void RunBatch(absl::Span<BatchMember> members, int) const override {
    Note(members);
    for (BatchMember& member : members) member.done = true;
  }

  // Makes the next run wait for Release().
  void Hold() {
    running_ = {};
    released_ = {};
    holds_ = true;
  }
  void WaitUntilRunning() { running_.get_future().wait(); }
  void Release() { released_.set_value(); }

  // Returns the number of requests of each run, in order.
  std::vector<size_t> TakeRuns() { return std::exchange(runs_, {}); }

 private:
  void Note(absl::Span<const BatchMember> members) const {
    if (holds_.exchange(false)) {
      running_.set_value();
      released_.get_future().wait();
    }
    runs_.push_back(members.size());
    for (const BatchMember& member : members) {
      EXPECT_EQ(member.plan->batch_group()->key, members.front().plan->batch_group()->key);
      std::memcpy(member.arguments->outputs[Role::kY].data, member.arguments->inputs[Role::kV].data,
                  static_cast<size_t>(member.plan->problem.value_head_size) * sizeof(float));
    }
  }

  mutable std::atomic<bool> holds_{false};
  mutable std::promise<void> running_;
  mutable std::promise<void> released_;
  mutable std::vector<size_t> runs_;  // written by the only lane, read while it is idle
};

// A query, a key and a value that consist of one number.
struct OneKeyCall {
  OneKeyCall(int64_t head_size, float number)
      : values(static_cast<size_t>(head_size), number), shape({1, 1, 1, head_size}) {}

  Request ToRequest() const {
    OperatorCall call;
    for (Role role : {Role::kQ, Role::kK, Role::kV}) {
      call.inputs[role] = TensorSpec{DType::kFloat32, shape};
    }
    Request request;
    request.call = Resolve(call).value();
    request.inputs[Role::kQ] = request.inputs[Role::kK] =
        request.inputs[Role::kV] = {reinterpret_cast<const std::byte*>(values.data()),
                                    static_cast<int64_t>(values.size() * sizeof(float))};
    return request;
  }

  std::vector<float> values;
  Shape shape;
};

class EngineBatchTest : public ::testing::Test {
 protected:
  EngineBatchTest() {
    backend_.Hold();
    Submit(holder_.ToRequest());
    backend_.WaitUntilRunning();
  }

  // Submitted requests wait for the only lane until Results() is called.
  void Submit(Request request) {
    std::promise<Result>& promise = promises_.emplace_back();
    engine_.Submit(std::move(request),
                   [&promise](Result result) { promise.set_value(std::move(result)); });
  }

  // Returns the results in order of submission.
  std::vector<Result> Results() {
    backend_.Release();
    std::vector<Result> results;
    for (std::promise<Result>& promise : promises_) {
      results.push_back(promise.get_future().get());
    }
    EXPECT_TRUE(results.front().status.ok());
    EXPECT_EQ(results.front().batch_size, 1) << "the request that occupied the lane";
    results.erase(results.begin());
    return results;
  }

  static float FirstOf(const OutputBuffer& output) {
    float first;
    std::memcpy(&first, output.bytes.data(), sizeof(first));
    return first;
  }

  std::deque<std::promise<Result>> promises_;
  const OneKeyCall holder_{4, 0};  // occupies the lane
  std::deque<OneKeyCall> calls_;   // a deque for stable addresses
  OneKeyBackend backend_;
  const BackendSet backends_{{&backend_}};
  SteadyClock clock_;
  Timer timer_{clock_};
  AdmissionGate gate_{{.budget_bytes = 64 << 20}, timer_, clock_};
  BufferPool pool_{32 << 20, clock_};
  Executor executor_{1, clock_};
  Executor lanes_{1, clock_};
  Engine engine_{{.backend = "one_key", .threads = 1, .backends = &backends_},
                 gate_,
                 pool_,
                 executor_,
                 &lanes_};
};

using Runs = std::vector<size_t>;

TEST_F(EngineBatchTest, WaitingRequestsAreComputedByOneRun) {
  for (const float number : {1, 2, 3}) {
    Submit(calls_.emplace_back(4, number).ToRequest());
    Submit(calls_.emplace_back(8, -number).ToRequest());
  }
  const std::vector<Result> results = Results();
  for (size_t n = 0; n < results.size(); ++n) {
    ASSERT_TRUE(results[n].status.ok()) << results[n].status;
    EXPECT_EQ(results[n].batch_size, 3);
    EXPECT_EQ(FirstOf(results[n].outputs[Role::kY]), calls_[n].values[0]) << "its own result";
  }
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 3, 3})) << "by head size";
}

TEST_F(EngineBatchTest, ABatchRespectsTheCapacityOfARun) {
  for (int n = 0; n < 5; ++n) Submit(calls_.emplace_back(4, n).ToRequest());
  for (const Result& result : Results()) EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 4, 1}));
}

TEST_F(EngineBatchTest, MoreUrgentRequestsAreComputedFirst) {
  Submit(calls_.emplace_back(8, 1).ToRequest());
  for (int n = 0; n < 2; ++n) {
    Request request = calls_.emplace_back(4, n).ToRequest();
    request.priority = 1;
    Submit(std::move(request));
  }
  for (const Result& result : Results()) EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 2, 1}));
}

TEST_F(EngineBatchTest, RequestsThatCopyTensorsRunAlone) {
  constexpr int64_t kBytes = 4 * sizeof(float);
  const test::FakeDeviceMemory device(2 * kBytes);
  Request gathers = calls_.emplace_back(4, 1).ToRequest();
  gathers.inputs[Role::kV] = InputBytes(DevicePart{&device, 0}, kBytes);
  Submit(std::move(gathers));
  Request delivers = calls_.emplace_back(4, 2).ToRequest();
  delivers.places[Role::kY].device = {&device, kBytes};
  Submit(std::move(delivers));
  Submit(calls_.emplace_back(4, 3).ToRequest());
  for (const Result& result : Results()) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.batch_size, 1);
  }
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 1, 1, 1}));
}

TEST_F(EngineBatchTest, SkipsAMemberWhoseSharedMemoryWasRevoked) {
  for (int n = 0; n < 3; ++n) {
    Request request = calls_.emplace_back(4, n).ToRequest();
    if (n == 1) request.check_shared_memory = [] { return absl::InvalidArgumentError("gone"); };
    Submit(std::move(request));
  }
  const std::vector<Result> results = Results();
  EXPECT_TRUE(results[0].status.ok());
  EXPECT_EQ(results[1].status, absl::InvalidArgumentError("gone"));
  EXPECT_EQ(results[1].batch_size, 0);
  EXPECT_TRUE(results[2].status.ok());
  EXPECT_EQ(FirstOf(results[2].outputs[Role::kY]), 2);
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 2}));
}

TEST_F(EngineBatchTest, TheOnlyMemberWithValidMemoryRunsAlone) {
  for (int n = 0; n < 2; ++n) {
    Request request = calls_.emplace_back(4, n).ToRequest();
    if (n == 0) request.check_shared_memory = [] { return absl::InvalidArgumentError("gone"); };
    Submit(std::move(request));
  }
  const std::vector<Result> results = Results();
  EXPECT_EQ(results[0].status, absl::InvalidArgumentError("gone"));
  EXPECT_EQ(FirstOf(results[1].outputs[Role::kY]), 1);
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 1}));
}

TEST_F(EngineBatchTest, ACancelledMemberDoesNotAffectTheOthers) {
  std::atomic<bool> cancelled{false};
  for (int n = 0; n < 3; ++n) {
    Request request = calls_.emplace_back(4, n).ToRequest();
    if (n == 1) request.cancelled = &cancelled;
    Submit(std::move(request));
  }
  cancelled = true;
  const std::vector<Result> results = Results();
  EXPECT_EQ(results[1].status.code(), absl::StatusCode::kCancelled);
  for (const int n : {0, 2}) EXPECT_EQ(results[n].batch_size, 2);
  EXPECT_EQ(backend_.TakeRuns(), (Runs{1, 2}));
}

}  // namespace
}  // namespace rapt
