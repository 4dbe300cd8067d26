#ifndef RAPT_SERVER_SHARED_MEMORY_SYSTEM_REGION_H_
#define RAPT_SERVER_SHARED_MEMORY_SYSTEM_REGION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/shared_memory/region.h"

namespace rapt {

// Maps bytes [offset, offset + byte_size) of the POSIX shared memory object `key`, for reading and
// writing. NotFound where there is none that we may open; InvalidArgument where it is not that
// long; ResourceExhausted where there are too many regions or the system refuses. No message names
// the key.
absl::StatusOr<std::shared_ptr<const Region>> OpenSystemRegion(const std::string& key,
                                                               int64_t offset, int64_t byte_size);

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_SYSTEM_REGION_H_
