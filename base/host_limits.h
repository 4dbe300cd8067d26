// The limits of this process: CPU and memory, from cgroups (version 1 or 2) and CPU affinity, and
// descriptors.
#ifndef RAPT_BASE_HOST_LIMITS_H_
#define RAPT_BASE_HOST_LIMITS_H_

#include <cstdint>
#include <filesystem>

namespace rapt {

struct HostLimits {
  int cores = 1;               // a fractional CPU quota is rounded up
  bool has_cpu_quota = false;  // of a cgroup, and it determines `cores`
  int64_t memory_bytes = 0;    // the minimum of physical memory and all cgroup limits; 0: unknown
  int64_t descriptors = 0;     // that may be open, the soft limit; 0: unknown
};

// Reads /proc and /sys below `root`. Ignores missing or malformed files. Never fails.
HostLimits ReadHostLimits(const std::filesystem::path& root = "/");

// Raises the soft limit of open descriptors to the hard one.
void RaiseDescriptorLimit();

}  // namespace rapt

#endif  // RAPT_BASE_HOST_LIMITS_H_
