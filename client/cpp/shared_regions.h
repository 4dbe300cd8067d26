// Memory that the client shares with a server on the same machine.
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

// Whether it is a loopback address or a Unix domain socket, of one server.
bool IsSameMachine(const std::string& address);

// A mapped object of POSIX shared memory. Has a name in the file system until Unlink().
// Thread-compatible.
class SharedRegion {
 public:
  // Null where the system refuses.
  static std::unique_ptr<SharedRegion> Make(int64_t bytes);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // "rapt-", and what nobody can guess: of the object, and of the region at the server.
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

// At the server that the connection leads to; afterwards the object has no name any more. A stop
// ends it.
grpc::Status Register(SharedRegion& region, const Connection& connection, const Deadline& deadline,
                      const std::stop_token& stop = {});
// Where that fails, the server is gone, and its mapping with it.
void Unregister(const SharedRegion& region, const Connection& connection, const Deadline& deadline);

// Regions that the server has registered, used again from call to call. Their objects lose their
// names as soon as the server has mapped them, so that nothing stays behind, whatever becomes of
// this process.
//
// Thread-safe. Unregisters what it has on destruction, for which it waits a second at most.
class SharedRegions {
 public:
  // `connections` outlive it.
  SharedRegions(const std::string& address, Connections& connections);
  ~SharedRegions();
  SharedRegions(const SharedRegions&) = delete;
  SharedRegions& operator=(const SharedRegions&) = delete;

  // One of at least `bytes`, for one call. Null where there is none to be had: the server is
  // elsewhere, does not allow it, or does not answer before the deadline, a stop or soon; so many
  // calls use some already, or a smaller one makes room for the calls to come. Once a server has
  // refused, it is not asked again.
  std::unique_ptr<SharedRegion> Take(int64_t bytes, const Deadline& deadline,
                                     const std::stop_token& stop);

  // After its call is over, at the server as well.
  void GiveBack(std::unique_ptr<SharedRegion> region);
  // After a call that may not be over at the server, or of which it does not know the region any
  // more. Does not wait for the server: unregisters it in the background.
  void Discard(std::unique_ptr<SharedRegion> region);

 private:
  class Unregistration;
  static constexpr int kMaxRegions = 8;

  std::unique_ptr<SharedRegion> TakeIdle(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool RegisterNow(SharedRegion& region, const Deadline& deadline, const std::stop_token& stop);
  void FreePlace();

  Connections& connections_;

  Mutex mutex_;
  CondVar no_regions_;
  bool is_offered_ ABSL_GUARDED_BY(mutex_);
  int regions_ ABSL_GUARDED_BY(mutex_) = 0;  // in use, idle and being unregistered
  std::vector<std::unique_ptr<SharedRegion>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_SHARED_REGIONS_H_
