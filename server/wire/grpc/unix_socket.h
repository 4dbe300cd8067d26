#ifndef RAPT_SERVER_WIRE_GRPC_UNIX_SOCKET_H_
#define RAPT_SERVER_WIRE_GRPC_UNIX_SOCKET_H_

#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"

namespace rapt {

// Prepares the binding of a Unix domain socket at `path`: removes the stale socket of a dead
// server. InvalidArgument if the path is too long, Unavailable if a server still listens there or
// the file is not a socket; neither is removed.
absl::Status MakeRoomForSocket(const std::string& path);

// Sets the mode of sockets bound during its lifetime. Changes the umask of the process, so use it
// at startup only.
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
