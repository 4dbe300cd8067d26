#include "attention/cudnn/plan_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/fake_device.h"

namespace rapt::cudnn {
namespace {

using test::FakeDevice;

SdpaGraph GraphOfLength(int64_t length) {
  return GraphOf({.dtype = DType::kBFloat16,
                  .batch = 1,
                  .query_heads = 1,
                  .kv_heads = 1,
                  .query_length = length,
                  .key_length = length,
                  .head_size = 8,
                  .value_head_size = 8});
}

class PlanCacheTest : public ::testing::Test {
 protected:
  PlanCacheTest() { std::filesystem::create_directory(directory_); }
  ~PlanCacheTest() override { std::filesystem::remove_all(directory_); }

  const std::string directory_ =
      ::testing::TempDir() + ::testing::UnitTest::GetInstance()->current_test_info()->name();
  FakeDevice::Controls controls_;
  FakeDevice device_{controls_, 1, 1 << 20};
};

TEST_F(PlanCacheTest, CompilesOnceForAllRequests) {
  std::latch may_compile(1);
  controls_.on_compile = [&] { may_compile.wait(); };
  PlanCache cache(device_, "");
  EXPECT_TRUE(absl::IsUnavailable(cache.Find(GraphOfLength(64)).status()));
  std::vector<std::thread> callers;
  for (int n = 0; n < 4; ++n) {
    callers.emplace_back([&] { EXPECT_TRUE(cache.Get(GraphOfLength(64)).ok()); });
  }
  may_compile.count_down();
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(cache.Find(GraphOfLength(64)).ok());
  EXPECT_EQ(controls_.compilations, 1);
}

TEST_F(PlanCacheTest, RemembersUnsupportedGraphs) {
  controls_.declines = true;
  PlanCache cache(device_, "");
  EXPECT_TRUE(absl::IsUnimplemented(cache.Get(GraphOfLength(64)).status()));
  EXPECT_TRUE(absl::IsUnimplemented(cache.Find(GraphOfLength(64)).status()));
  EXPECT_EQ(controls_.compilations, 1);
}

TEST_F(PlanCacheTest, ReadsPlansWrittenByAnotherServer) {
  const auto get = [&](int64_t length) {
    PlanCache cache(device_, directory_);
    const auto plan = cache.Get(GraphOfLength(length));
    const std::string key = GraphOfLength(length).Key();
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ((*plan)->bytes, std::vector<uint8_t>(key.begin(), key.end()));
  };
  get(64);
  get(64);
  EXPECT_EQ(controls_.compilations, 1);
  get(128);
  EXPECT_EQ(controls_.compilations, 2);
}

TEST_F(PlanCacheTest, RecompilesDamagedPlans) {
  { EXPECT_TRUE(PlanCache(device_, directory_).Get(GraphOfLength(64)).ok()); }
  for (const auto& file : std::filesystem::directory_iterator(directory_)) {
    std::filesystem::resize_file(file.path(), file.file_size() - 1);
  }
  { EXPECT_TRUE(PlanCache(device_, directory_).Get(GraphOfLength(64)).ok()); }
  EXPECT_EQ(controls_.compilations, 2);
}

TEST_F(PlanCacheTest, WorksWithoutTheDirectory) {
  PlanCache cache(device_, directory_ + "/absent");
  EXPECT_TRUE(cache.Get(GraphOfLength(64)).ok());
}

TEST_F(PlanCacheTest, PeeksWithoutCompiling) {
  PlanCache cache(device_, "");
  EXPECT_TRUE(absl::IsUnavailable(cache.Peek(GraphOfLength(64)).status()));
  EXPECT_EQ(cache.Count().compiling, 0);
  EXPECT_TRUE(cache.Get(GraphOfLength(64)).ok());
  EXPECT_TRUE(cache.Peek(GraphOfLength(64)).ok());
  EXPECT_EQ(controls_.compilations, 1);
}

TEST_F(PlanCacheTest, EvictsTheLeastRecentlyUsed) {
  PlanCache cache(device_, "", {.plans = 2, .waiting = 2});
  for (const int64_t length : {64, 128, 64, 192})
    EXPECT_TRUE(cache.Get(GraphOfLength(length)).ok());
  EXPECT_EQ(controls_.compilations, 3);
  EXPECT_EQ(cache.Count().ready, 2);
  EXPECT_TRUE(cache.Peek(GraphOfLength(64)).ok());
  EXPECT_TRUE(cache.Peek(GraphOfLength(192)).ok());
  EXPECT_TRUE(cache.Get(GraphOfLength(128)).ok());
  EXPECT_EQ(controls_.compilations, 4);
}

TEST_F(PlanCacheTest, NeverEvictsPinnedPlans) {
  PlanCache cache(device_, "", {.plans = 2, .waiting = 2});
  for (const int64_t length : {64, 128, 192}) cache.Pin(GraphOfLength(length));
  for (const int64_t length : {256, 320, 64, 128, 192, 256, 320}) {
    EXPECT_TRUE(cache.Get(GraphOfLength(length)).ok());
  }
  EXPECT_EQ(controls_.compilations, 5);
}

TEST_F(PlanCacheTest, BoundsTheCompileQueue) {
  std::latch compiling(1), may_compile(1);
  controls_.on_compile = [&] {
    if (controls_.compilations == 1) compiling.count_down();
    may_compile.wait();
  };
  PlanCache cache(device_, "", {.plans = 8, .waiting = 1});
  const auto find = [&](int64_t length) {
    EXPECT_TRUE(absl::IsUnavailable(cache.Find(GraphOfLength(length)).status()));
    return cache.Count().compiling;
  };
  EXPECT_EQ(find(64), 1);
  compiling.wait();
  EXPECT_EQ(find(128), 2) << "one is compiled and one waits";
  EXPECT_EQ(find(192), 2);
  may_compile.count_down();
  EXPECT_TRUE(cache.Get(GraphOfLength(192)).ok());
  EXPECT_EQ(controls_.compilations, 3);
}

TEST_F(PlanCacheTest, DestructionWakesWaitingCalls) {
  std::latch compiling(1), may_compile(1);
  controls_.on_compile = [&] {
    if (controls_.compilations == 1) compiling.count_down();
    may_compile.wait();
  };
  PlanCache cache(device_, "");
  EXPECT_TRUE(absl::IsUnavailable(cache.Find(GraphOfLength(64)).status()));
  EXPECT_TRUE(absl::IsUnavailable(cache.Find(GraphOfLength(128)).status()));
  compiling.wait();
  may_compile.count_down();
}

}  // namespace
}  // namespace rapt::cudnn
