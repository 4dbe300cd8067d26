#ifndef RAPT_SERVER_WIRE_GRPC_UNIX_SOCKET_H_
#define RAPT_SERVER_WIRE_GRPC_UNIX_SOCKET_H_

#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"

namespace rapt {

// Makes sure that a Unix domain socket can be bound at `path`: a socket that a server left behind
// is removed. InvalidArgument where the path is too long for one, Unavailable where a server still
// answers there, or something else is in the way, which stays.
absl::Status MakeRoomForSocket(const std::string& path);

// What sockets may be used by that are bound while it lives. For start-up only: it is the whole
// process's.
class ScopedFileMode {
 public:
  explicit ScopedFileMode(int mode) : previous_(umask(~static_cast<mode_t>(mode) & 0777)) {}
  ~ScopedFileMode() { umask(previous_); }
  ScopedFileMode(const ScopedFileMode&) = delete;
  ScopedFileMode& operator=(const ScopedFileMode&) = delete;

 private:
  const mode_t previous_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_UNIX_SOCKET_H_
