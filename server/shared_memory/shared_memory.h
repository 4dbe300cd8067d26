// The registry of shared memory regions by name, for all protocols.
#ifndef RAPT_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_
#define RAPT_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "server/shared_memory/region.h"

namespace rapt {

// A part of a region as named by a request.
struct SharedReference {
  std::string region;
  int64_t offset = 0;
  int64_t byte_size = 0;
};

// The bytes of a reference, on the host or on a device. They stay valid while `region` is held,
// even if it is unregistered meanwhile.
struct SharedBytes {
  absl::Span<std::byte> bytes;
  DevicePart device;
  std::shared_ptr<const Region> region;
};

// Thread-safe. Names are global: every caller may use every registered region. No error message
// contains a key.
class SharedMemory {
 public:
  struct Options {
    bool allowed = false;
    std::string key_prefix;    // required of the objects' keys; empty: any key
    OpenCudaMemory open_cuda;  // null: not supported
  };

  enum class Kind : uint8_t { kSystem, kCuda };

  // The most regions of both kinds together. Each takes a mapping, and a part of a list of all.
  static constexpr size_t kMaxRegions = 1024;

  // The description of a region for callers.
  struct Description {
    std::string name;
    int64_t offset = 0;     // kSystem
    int64_t device_id = 0;  // kCuda
    int64_t byte_size = 0;
  };

  explicit SharedMemory(Options options) : options_(std::move(options)) {}

  bool allowed() const { return options_.allowed; }
  bool takes_cuda() const { return options_.allowed && options_.open_cuda != nullptr; }

  // Both return Unimplemented if shared memory is not allowed; InvalidArgument, NotFound or
  // ResourceExhausted if the memory cannot be mapped; AlreadyExists for a name in use;
  // ResourceExhausted beyond kMaxRegions.
  absl::Status RegisterSystem(const std::string& name, const std::string& key, uint64_t offset,
                              uint64_t byte_size);
  absl::Status RegisterCuda(const std::string& name, const std::string& raw_handle,
                            int64_t device_id, uint64_t byte_size);

  // Unregisters the region called `name`, or all if empty. As in Triton, unregistering an unknown
  // region succeeds. Returns Unimplemented if shared memory is not allowed.
  absl::Status Unregister(Kind kind, const std::string& name);

  // Describes the region called `name`, or all if empty. Returns NotFound or Unimplemented.
  absl::StatusOr<std::vector<Description>> Describe(Kind kind, const std::string& name) const;

  // Returns NotFound for an unknown region; InvalidArgument if the part is not within the region or
  // the region is truncated; Unimplemented if shared memory is not allowed.
  absl::StatusOr<SharedBytes> Find(const SharedReference& reference) const;

 private:
  struct Entry {
    Kind kind;
    Description description;
    std::shared_ptr<const Region> region;
  };

  absl::Status CheckAllowed() const;
  absl::Status CheckKey(const std::string& key) const;
  absl::Status CheckPlace(const std::string& name) const;
  absl::Status CheckPlaceLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Add(Kind kind, Description description, std::shared_ptr<const Region> region);

  const Options options_;
  mutable Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// Returns the status of requests that used a region which is no longer intact.
absl::Status BrokenRegion();

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_
