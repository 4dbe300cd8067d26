// Tests which problems are offloaded to a device. The speeds of device and CPU are known: each run
// advances a fake clock by its modelled time.
#include "attention/cudnn/cost_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_device.h"

namespace rapt::cudnn {
namespace {

using test::FakeDevice;
using ::testing::HasSubstr;

constexpr int kLanes = 2;
constexpr int kThreads = 3;

struct Speeds {
  double run_seconds = 0;
  double bytes_per_second = 1;
  CostModel::PerType flops_per_second{};  // FP32, FP16, BF16
};
constexpr Speeds kDevice = {30e-6, 10e9, {20e12, 400e12, 400e12}};
constexpr Speeds kCpu = {0, 25e9, {0.6e12, 0.8e12, 1.2e12}};

size_t IndexOf(DType dtype) { return static_cast<size_t>(dtype); }

double FlopsOf(const SdpaGraph& g) {
  const int64_t keys = g.left_bound && g.right_bound
                           ? std::min(g.key_length, *g.left_bound + *g.right_bound)
                           : g.key_length;
  return 2.0 * static_cast<double>(g.batch * g.query_heads * g.query_length * keys *
                                   (g.head_size + g.value_head_size));
}

void Pass(test::FakeClock& clock, double seconds) {
  clock.Advance(std::chrono::nanoseconds(std::llround(seconds * 1e9)));
}

// Plans like the CPU backend; a task takes the time of the model.
class ModelledCpu final : public Backend {
 public:
  explicit ModelledCpu(test::FakeClock& clock) : clock_(clock) {}

  absl::string_view name() const override { return "modelled"; }
  absl::Status Supports(const Problem& problem) const override {
    return CpuBackend().Supports(problem);
  }
  void PlanTasks(Plan& plan) const override {
    plan.isa = "portable";
    CpuBackend().PlanTasks(plan);
    plan.stages = {1};
  }
  void RunTask(const Plan& plan, const Arguments&, std::byte*, int, int64_t, int,
               const Checkpoint&) const override {
    Pass(clock_, std::max(MovedBytes(plan.problem) / kCpu.bytes_per_second,
                          plan.flops / kCpu.flops_per_second[IndexOf(plan.problem.dtype)]));
  }

 private:
  test::FakeClock& clock_;
};

Problem Prefill(DType dtype, int64_t heads, int64_t length, int64_t head_size = 128) {
  return {.dtype = dtype,
          .batch = 1,
          .query_heads = heads,
          .kv_heads = heads,
          .query_length = length,
          .key_length = length,
          .head_size = head_size,
          .value_head_size = head_size};
}

Problem Decode(DType dtype, int64_t batch, int64_t keys) {
  Problem problem = Prefill(dtype, 4, keys);
  problem.batch = batch;
  problem.query_length = 1;
  return problem;
}

class MeasuredBackendTest : public ::testing::Test {
 protected:
  MeasuredBackendTest() {
    controls_.computes = false;
    controls_.on_graph = [this](const SdpaGraph& graph, const ArenaLayout& layout) {
      Pass(clock_, kDevice.run_seconds +
                       static_cast<double>(layout.end) / kDevice.bytes_per_second +
                       FlopsOf(graph) / kDevice.flops_per_second[IndexOf(graph.dtype)]);
    };
    backend_.Start(std::make_unique<FakeDevice>(controls_, kLanes, 16 << 20), cpu_, clock_,
                   {.min_flops = std::nullopt});
  }
  ~MeasuredBackendTest() override { backend_.Stop(); }

  absl::Status Measure() {
    return backend_.Measure(kThreads, [] { return true; });
  }

  // Returns the time by the fake clock.
  double SecondsOn(const Backend& backend, const Problem& problem, ThreadPool& pool) {
    Plan plan;
    plan.problem = problem;
    plan.routing.backend = &backend;
    plan.threads = pool.workers();
    backend.PlanTasks(plan);
    return SecondsOf(plan, pool, clock_, [] { return true; }).value();
  }

  bool Sends(const Problem& problem) {
    // Kernels that are not compiled yet are tested elsewhere.
    return backend_.Prefers(problem).code() != absl::StatusCode::kOutOfRange;
  }

  test::FakeClock clock_;
  FakeDevice::Controls controls_;
  const ModelledCpu cpu_{clock_};
  CudnnBackend backend_;
};

TEST_F(MeasuredBackendTest, OffloadsWhatTheDeviceComputesFaster) {
  ASSERT_TRUE(Measure().ok());
  ThreadPool lanes(kLanes), cores(kThreads);
  int sent = 0, kept = 0;
  const auto check = [&](const Problem& problem, const std::string& what) {
    const double device = SecondsOn(backend_, problem, lanes);
    const double cpu = SecondsOn(cpu_, problem, cores);
    const auto estimate = backend_.EstimateOf(problem).value();
    EXPECT_NEAR(estimate.device / device, 1, 0.1) << what;
    EXPECT_NEAR(estimate.fallback / cpu, 1, 0.01) << what;
    if (std::abs(std::log(device / cpu)) < 0.1) return;  // too close to call
    EXPECT_EQ(Sends(problem), device < cpu) << what << ": " << device << " s, CPU " << cpu << " s";
    ++(device < cpu ? sent : kept);
  };
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t heads : {1, 8}) {
      for (int64_t length = 32; length <= 1024; length *= 2) {
        check(Prefill(dtype, heads, length),
              absl::StrCat(NameOf(dtype), " ", heads, " heads, ", length));
      }
    }
    for (const int64_t keys : {256, 4096}) {
      const Problem problem = Decode(dtype, 2, keys);
      check(problem, absl::StrCat(NameOf(dtype), " decoding ", keys));
      EXPECT_FALSE(Sends(problem)) << "limited by memory bandwidth";
    }
  }
  EXPECT_GT(sent, 8);
  EXPECT_GT(kept, 8);
}

TEST_F(MeasuredBackendTest, MeasuresTheActualSpeeds) {
  const auto model = MeasureDevice(
      DeviceSamples(4096, kLanes),
      [&](const Problem& p) -> absl::StatusOr<double> {
        const double flops = FlopsOf(GraphOf(p));
        return kDevice.run_seconds + MovedBytes(p) / kDevice.bytes_per_second +
               flops / kDevice.flops_per_second[IndexOf(p.dtype)];
      },
      [](const Problem& p) {
        return Work{p.dtype, FlopsOf(GraphOf(p)), MovedBytes(p), p.batch, p.batch};
      });
  ASSERT_TRUE(model.ok());
  const auto near = [](double got, double want) { EXPECT_NEAR(got / want, 1, 0.2); };
  near(model->run_seconds, kDevice.run_seconds);
  near(model->lane_bytes_per_second, kDevice.bytes_per_second);
  near(model->bytes_per_second, kDevice.bytes_per_second);
  for (size_t n = 0; n < CostModel::kTypes; ++n) {
    near(model->flops_per_second[n], kDevice.flops_per_second[n]);
  }
}

TEST_F(MeasuredBackendTest, UsesAThresholdOfOperationsUntilMeasured) {
  const auto reason = [&](const Problem& problem) {
    return std::string(backend_.Prefers(problem).message());
  };
  const Problem large = Prefill(DType::kBFloat16, 8, 1024);
  EXPECT_TRUE(backend_.measures());
  EXPECT_FALSE(backend_.EstimateOf(large).has_value());
  EXPECT_THAT(reason(large), HasSubstr("below the GPU offload threshold of 1e+10"));
  ASSERT_TRUE(Measure().ok());
  EXPECT_TRUE(Sends(large));
  EXPECT_THAT(reason(Prefill(DType::kBFloat16, 1, 32)), HasSubstr("estimated to take"));
}

TEST_F(MeasuredBackendTest, CompilesKernelsBeforeMeasuring) {
  ASSERT_TRUE(backend_.Warm({}).ok());
  ASSERT_TRUE(Measure().ok());
  const PlanCache::Counts warmth = backend_.warmth();
  EXPECT_EQ(warmth.ready, 4);
  EXPECT_EQ(warmth.compiling + warmth.declined, 0);
  EXPECT_EQ(controls_.compilations, 4);
}

TEST_F(MeasuredBackendTest, IsCancelledAtOnce) {
  int asked = 0;
  const absl::Status status = backend_.Measure(kThreads, [&asked] { return ++asked < 3; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(controls_.runs, 2);
}

TEST_F(MeasuredBackendTest, FailsIfAFallbackComputes) {
  controls_.failures = 1;
  EXPECT_EQ(Measure().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(backend_.EstimateOf(Prefill(DType::kFloat32, 1, 64)).has_value());
}

TEST(CostModelTest, DeviceTimesAddUp) {
  const CostModel::Device device{.run_seconds = 1,
                                 .lane_bytes_per_second = 10,
                                 .bytes_per_second = 30,
                                 .flops_per_second = {100, 200, 400}};
  EXPECT_DOUBLE_EQ(device.Seconds({DType::kFloat32, 200, 20, 1, 1}), 1 + 2 + 2);
  EXPECT_DOUBLE_EQ(device.Seconds({DType::kBFloat16, 400, 60, 2, 2}), 1 + 3 + 1);
  EXPECT_DOUBLE_EQ(device.Seconds({DType::kFloat16, 200, 60, 8, 4}), 2 + 2 + 1)
      << "four lanes are limited by the bus";
}

TEST(CostModelTest, CpuTimeIsTheMaximum) {
  const CostModel::Cpu cpu{.bytes_per_second = 10, .flops_per_second = {100, 200, 400}};
  EXPECT_DOUBLE_EQ(cpu.Seconds({DType::kFloat32, 200, 10}), 2);
  EXPECT_DOUBLE_EQ(cpu.Seconds({DType::kBFloat16, 200, 10}), 1);
}

TEST(CostModelTest, PastKeysAndMasksCountAsMovedBytes) {
  Problem problem = Prefill(DType::kBFloat16, 2, 8);
  EXPECT_EQ(MovedBytes(problem), 4 * 2 * 8 * 128 * 2);
  problem.past_length = 8;
  EXPECT_EQ(MovedBytes(problem), 6 * 2 * 8 * 128 * 2);
  problem.mask = MaskShape{DType::kFloat32, {1, 1, 8, 16}};
  EXPECT_EQ(MovedBytes(problem), 6 * 2 * 8 * 128 * 2 + 8 * 16 * 4);
}

}  // namespace
}  // namespace rapt::cudnn
