// Shared memory between the client and a server on the same machine.
#ifndef RAPT_CLIENT_CPP_SHARED_REGIONS_H_
#define RAPT_CLIENT_CPP_SHARED_REGIONS_H_

#include <grpcpp/support/status.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"

namespace rapt::client {

// Returns true for a loopback address or a Unix domain socket of a single server.
bool IsSameMachine(const std::string& address);

// A mapped POSIX shared memory object. It has a name in the file system until Unlink().
// Thread-compatible.
class SharedRegion {
 public:
  // Returns nullptr if the system refuses.
  static std::unique_ptr<SharedRegion> Make(int64_t bytes);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // "rapt-" and a random suffix that can't be guessed. Names both the object and the server's
  // region.
  const std::string& name() const { return name_; }
  absl::Span<std::byte> bytes() const { return bytes_; }
  void Unlink();

 private:
  SharedRegion(std::string name, absl::Span<std::byte> bytes)
      : name_(std::move(name)), bytes_(bytes) {}

  const std::string name_;
  const absl::Span<std::byte> bytes_;
  bool is_linked_ = true;
};

// Registers the region with the server, then unlinks the object. `stop` cancels the call.
grpc::Status Register(SharedRegion& region, const Connection& connection, const Deadline& deadline,
                      const std::stop_token& stop = {});
// Ignores failures: if the server is gone, so is its mapping.
void Unregister(const SharedRegion& region, const Connection& connection, const Deadline& deadline);

// A pool of regions registered with the server and reused from call to call. An object is unlinked
// as soon as the server has mapped it, so nothing is left behind if this process crashes.
//
// Thread-safe. The destructor unregisters all regions and waits at most a second for that.
class SharedRegions {
 public:
  // REQUIRES: `connections` outlives this object.
  SharedRegions(const std::string& address, Connections& connections);
  ~SharedRegions();
  SharedRegions(const SharedRegions&) = delete;
  SharedRegions& operator=(const SharedRegions&) = delete;

  // Returns a region of at least `bytes` for one call. Returns nullptr if the server is on another
  // machine, does not allow shared memory or does not respond in time, if all regions are in use,
  // or if a smaller idle region has to be evicted first. After a refusal, the server is not
  // asked again.
  std::unique_ptr<SharedRegion> Take(int64_t bytes, const Deadline& deadline,
                                     const std::stop_token& stop);

  // REQUIRES: the call has finished at the server too.
  void Return(std::unique_ptr<SharedRegion> region);
  // For a call that may still run at the server, or a region that the server no longer knows.
  // Unregisters the region in the background, without waiting.
  void Discard(std::unique_ptr<SharedRegion> region);

 private:
  class Unregistration;
  static constexpr int kMaxRegions = 8;

  std::unique_ptr<SharedRegion> TakeIdle(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool RegisterNow(SharedRegion& region, const Deadline& deadline, const std::stop_token& stop);
  void ReleaseSlot();

  Connections& connections_;

  Mutex mutex_;
  CondVar no_regions_;
  bool is_available_ ABSL_GUARDED_BY(mutex_);
  int regions_ ABSL_GUARDED_BY(mutex_) = 0;  // in use, idle and being unregistered
  std::vector<std::unique_ptr<SharedRegion>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_SHARED_REGIONS_H_
