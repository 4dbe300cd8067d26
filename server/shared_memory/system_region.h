#ifndef RAPT_SERVER_SHARED_MEMORY_SYSTEM_REGION_H_
#define RAPT_SERVER_SHARED_MEMORY_SYSTEM_REGION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/shared_memory/region.h"

namespace rapt {

// Maps bytes [offset, offset + byte_size) of the POSIX shared memory object `key` for reading and
// writing. Returns NotFound if the server cannot open it; InvalidArgument if it is shorter;
// ResourceExhausted if there are too many regions or mmap() fails. No error message contains the
// key.
absl::StatusOr<std::shared_ptr<const Region>> OpenSystemRegion(const std::string& key,
                                                               int64_t offset, int64_t byte_size);

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_SYSTEM_REGION_H_
