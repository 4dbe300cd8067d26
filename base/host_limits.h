// What this process was given of the machine: its share by cgroup (version 1 or 2) and affinity.
#ifndef RAPT_BASE_HOST_LIMITS_H_
#define RAPT_BASE_HOST_LIMITS_H_

#include <cstdint>
#include <filesystem>

namespace rapt {

struct HostLimits {
  int cores = 1;             // a fractional CPU quota counts as the next whole core
  int64_t memory_bytes = 0;  // the least of physical memory and every cgroup limit above us
};

// Reads /proc and /sys below `root`; a file that is missing or odd is no limit. Never fails.
HostLimits ReadHostLimits(const std::filesystem::path& root = "/");

}  // namespace rapt

#endif  // RAPT_BASE_HOST_LIMITS_H_
