// The regions that callers have registered, by name, for all protocols.
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

// A part of a region as a request names it.
struct SharedReference {
  std::string region;
  int64_t offset = 0;
  int64_t byte_size = 0;
};

// The bytes that a reference stands for, on the host or on a device. They stay there as long as the
// region is held, whoever unregisters it meanwhile.
struct SharedBytes {
  absl::Span<std::byte> bytes;
  DevicePart device;
  std::shared_ptr<const Region> region;
};

// Thread-safe. Names are for everyone: who may call the server may use every region that is
// registered there. No message names a key.
class SharedMemory {
 public:
  struct Options {
    bool allowed = false;
    std::string key_prefix;    // of the objects that may be mapped; empty: any
    OpenCudaMemory open_cuda;  // null: nobody here can
  };

  enum class Kind : uint8_t { kSystem, kCuda };

  // What a caller may know of a region.
  struct Description {
    std::string name;
    int64_t offset = 0;     // kSystem
    int64_t device_id = 0;  // kCuda
    int64_t byte_size = 0;
  };

  explicit SharedMemory(Options options) : options_(std::move(options)) {}

  bool allowed() const { return options_.allowed; }
  bool takes_cuda() const { return options_.allowed && options_.open_cuda != nullptr; }

  // Unimplemented where it is not allowed; InvalidArgument, NotFound or ResourceExhausted where
  // there is no such memory; AlreadyExists for a name in use.
  absl::Status RegisterSystem(const std::string& name, const std::string& key, uint64_t offset,
                              uint64_t byte_size);
  absl::Status RegisterCuda(const std::string& name, const std::string& raw_handle,
                            int64_t device_id, uint64_t byte_size);

  // The region called `name`, or with an empty name all of them. As Triton does, one that is not
  // there is unregistered already. Unimplemented where it is not allowed.
  absl::Status Unregister(Kind kind, const std::string& name);

  // Of the region called `name`, or with an empty name of all. NotFound, Unimplemented.
  absl::StatusOr<std::vector<Description>> Describe(Kind kind, const std::string& name) const;

  // NotFound for the region; InvalidArgument where the part is not within it, or the region is
  // broken; Unimplemented where shared memory is not allowed.
  absl::StatusOr<SharedBytes> Find(const SharedReference& reference) const;

 private:
  struct Entry {
    Kind kind;
    Description description;
    std::shared_ptr<const Region> region;
  };

  absl::Status CheckAllowed() const;
  absl::Status CheckKey(const std::string& key) const;
  absl::Status CheckNameIsFree(const std::string& name) const;
  absl::Status Add(Kind kind, Description description, std::shared_ptr<const Region> region);

  const Options options_;
  mutable Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// The status of requests that used a region which is no longer intact.
absl::Status BrokenRegion();

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_SHARED_MEMORY_H_
