// Requests whose work is not attention, but copies between messages and pages.
#ifndef RAPT_SERVER_CACHE_PREPARATION_H_
#define RAPT_SERVER_CACHE_PREPARATION_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/request.h"

namespace rapt::cache {

// Returns a request that runs `prepare`, which reads or writes `bytes` and gets a workspace, on a
// compute thread, and computes nothing else.
Request MakePreparation(absl::AnyInvocable<absl::Status(absl::Span<std::byte> workspace)> prepare,
                        int64_t bytes, int64_t workspace_bytes = 0);

// Returns the bytes of `workspace` that Gather() takes: none if the bytes are in one piece, and not
// in shared memory, as they are read twice.
int64_t GatheredBytes(const InputBytes& bytes);
// Returns the bytes in one piece, or a copy at the beginning of `workspace`, which it removes from
// there. Returns an error if a device fails.
absl::StatusOr<const std::byte*> Gather(const InputBytes& bytes, absl::Span<std::byte>& workspace);

// Takes bytes from the beginning of `workspace`. REQUIRES: it has as many.
std::byte* TakeFrom(absl::Span<std::byte>& workspace, int64_t bytes);

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_PREPARATION_H_
