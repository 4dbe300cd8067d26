#include "base/host_limits.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace rapt {
namespace {

namespace fs = std::filesystem;

// Returns the numbers of a file's first line, or none if any word is not a number ("max").
std::vector<int64_t> ReadNumbers(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  std::vector<int64_t> numbers;
  for (absl::string_view word : absl::StrSplit(line, ' ', absl::SkipWhitespace())) {
    int64_t number;
    if (!absl::SimpleAtoi(word, &number)) return {};
    numbers.push_back(number);
  }
  return numbers;
}

// Returns this process's cgroup path from /proc/self/cgroup: "0::/path" in version 2,
// "4:memory:/path" in version 1. Relative, so that it can be appended to a mount point.
std::optional<fs::path> OwnCgroup(const fs::path& root, absl::string_view controller) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (std::find(controllers.begin(), controllers.end(), controller) == controllers.end())
      continue;
    return fs::path(parts[2]).relative_path();
  }
  return std::nullopt;
}

// Calls `visit` for the directories below `mount` of the cgroup and its parents, each of which may
// set a limit.
void ForEachCgroup(const fs::path& root, const fs::path& mount, absl::string_view controller,
                   const std::function<void(const fs::path&)>& visit) {
  const std::optional<fs::path> own = OwnCgroup(root, controller);
  if (!own) return;
  for (fs::path path = *own; !path.empty(); path = path.parent_path()) visit(root / mount / path);
  visit(root / mount);
}

int64_t MemoryLimitBytes(const fs::path& root) {
  int64_t limit = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  const auto tighten = [&limit](const fs::path& path) {
    const std::vector<int64_t> numbers = ReadNumbers(path);
    if (!numbers.empty() && numbers[0] > 0) limit = std::min(limit, numbers[0]);
  };
  ForEachCgroup(root, "sys/fs/cgroup", "",
                [&](const fs::path& path) { tighten(path / "memory.max"); });
  ForEachCgroup(root, "sys/fs/cgroup/memory", "memory",
                [&](const fs::path& path) { tighten(path / "memory.limit_in_bytes"); });
  return limit;
}

int AffinityCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(CPU_COUNT(&set), 1);
}

// Returns the minimum of all quotas in cores, rounded up.
std::optional<int64_t> CpuQuota(const fs::path& root) {
  std::optional<int64_t> cores;
  const auto tighten = [&cores](int64_t quota, int64_t period) {
    if (quota <= 0 || period <= 0) return;
    const int64_t rounded_up = quota / period + (quota % period != 0);
    cores = std::min(cores.value_or(rounded_up), rounded_up);
  };
  ForEachCgroup(root, "sys/fs/cgroup", "", [&](const fs::path& path) {
    const std::vector<int64_t> numbers = ReadNumbers(path / "cpu.max");
    if (numbers.size() == 2) tighten(numbers[0], numbers[1]);
  });
  ForEachCgroup(root, "sys/fs/cgroup/cpu", "cpu", [&](const fs::path& path) {
    const std::vector<int64_t> quota = ReadNumbers(path / "cpu.cfs_quota_us");
    const std::vector<int64_t> period = ReadNumbers(path / "cpu.cfs_period_us");
    if (!quota.empty() && !period.empty()) tighten(quota[0], period[0]);
  });
  return cores;
}

}  // namespace

HostLimits ReadHostLimits(const fs::path& root) {
  HostLimits limits{.cores = AffinityCores(), .memory_bytes = MemoryLimitBytes(root)};
  const std::optional<int64_t> quota = CpuQuota(root);
  if (quota && *quota <= limits.cores) {
    limits.cores = static_cast<int>(*quota);
    limits.has_cpu_quota = true;
  }
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    constexpr rlim_t kMost = std::numeric_limits<int64_t>::max();  // RLIM_INFINITY is larger
    limits.descriptors = static_cast<int64_t>(std::min(files.rlim_cur, kMost));
  }
  return limits;
}

void RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace rapt
