// Requests whose work is not attention, but copies between messages and pages.
#ifndef RAPT_SERVER_CACHE_PREPARATION_H_
#define RAPT_SERVER_CACHE_PREPARATION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/request.h"

namespace rapt::cache {

// Returns a request that runs `prepare`, which reads or writes `bytes` and gets a workspace, on a
// compute thread, and computes nothing else.
Request MakePreparation(absl::AnyInvocable<absl::Status(absl::Span<std::byte> workspace)> prepare,
                        int64_t bytes, int64_t workspace_bytes = 0);

// Returns the bytes of a tensor in one piece; if they are in slices, a copy, which `copy` holds.
const std::byte* Contiguous(const InputBytes& bytes, std::vector<std::byte>& copy);

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_PREPARATION_H_
