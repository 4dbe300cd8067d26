#include "base/host_limits.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace rapt {
namespace {

namespace fs = std::filesystem;

// A root directory with files like those of /proc and /sys.
class HostLimitsTest : public ::testing::Test {
 protected:
  HostLimitsTest() {
    std::string pattern = (fs::temp_directory_path() / "host_limits_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~HostLimitsTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  fs::path root_;
};

TEST_F(HostLimitsTest, WithoutLimitsReportsTheMachine) {
  const HostLimits limits = ReadHostLimits(root_);
  EXPECT_GE(limits.cores, 1);
  EXPECT_GT(limits.memory_bytes, 1 << 20);
}

TEST_F(HostLimitsTest, ReadsVersion2FromOurGroupAndItsParents) {
  Write("proc/self/cgroup", "0::/pod/container\n");
  Write("sys/fs/cgroup/pod/container/memory.max", "max\n");
  Write("sys/fs/cgroup/pod/memory.max", "1000000\n");
  Write("sys/fs/cgroup/memory.max", "2000000\n");
  Write("sys/fs/cgroup/pod/container/cpu.max", "50000 100000\n");
  const HostLimits limits = ReadHostLimits(root_);
  EXPECT_EQ(limits.memory_bytes, 1000000);
  EXPECT_EQ(limits.cores, 1) << "half a core is rounded up";
  EXPECT_TRUE(limits.has_cpu_quota);
}

TEST_F(HostLimitsTest, ReadsVersion1) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n");
  Write("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "3000000\n");
  Write("sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "100000\n");
  Write("sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000\n");
  const HostLimits limits = ReadHostLimits(root_);
  EXPECT_EQ(limits.memory_bytes, 3000000);
  EXPECT_EQ(limits.cores, 1);
  EXPECT_TRUE(limits.has_cpu_quota);
}

TEST_F(HostLimitsTest, ReadsTheRootIfOurGroupIsNotMounted) {
  Write("proc/self/cgroup", "4:memory:/docker/1\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
  EXPECT_EQ(ReadHostLimits(root_).memory_bytes, 4000000);
}

TEST_F(HostLimitsTest, NoQuotaIsNoLimit) {
  const HostLimits machine = ReadHostLimits(root_);
  Write("proc/self/cgroup", "5:cpu:/\n0::/\n");
  Write("sys/fs/cgroup/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(ReadHostLimits(root_).cores, machine.cores);
  EXPECT_FALSE(ReadHostLimits(root_).has_cpu_quota);
}

TEST_F(HostLimitsTest, AQuotaAboveTheMachineIsNoLimit) {
  const HostLimits machine = ReadHostLimits(root_);
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/cpu.max", "99999900000 100000\n");
  EXPECT_EQ(ReadHostLimits(root_).cores, machine.cores);
  EXPECT_FALSE(ReadHostLimits(root_).has_cpu_quota);
}

TEST_F(HostLimitsTest, IgnoresMalformedFiles) {
  const HostLimits machine = ReadHostLimits(root_);
  Write("proc/self/cgroup", "nonsense\n0::/\n");
  Write("sys/fs/cgroup/memory.max", "99999999999999999999999999\n");
  Write("sys/fs/cgroup/cpu.max", "100 0\n");
  const HostLimits limits = ReadHostLimits(root_);
  EXPECT_EQ(limits.memory_bytes, machine.memory_bytes);
  EXPECT_EQ(limits.cores, machine.cores);
}

}  // namespace
}  // namespace rapt
