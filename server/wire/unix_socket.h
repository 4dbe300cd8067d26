#ifndef RAPT_SERVER_WIRE_UNIX_SOCKET_H_
#define RAPT_SERVER_WIRE_UNIX_SOCKET_H_

#include <string>

#include "absl/status/statusor.h"
#include "base/descriptor.h"

namespace rapt {

// Returns a listening Unix domain socket with this file mode, non-blocking. Removes the stale
// socket of a dead server first. InvalidArgument if the path is too long; Unavailable if a server
// still listens there or the file is not a socket, which are not removed, or if it can't be bound.
// Changes the umask of the process temporarily, so use it at startup only.
absl::StatusOr<Descriptor> ListenOnUnix(const std::string& path, int mode);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_UNIX_SOCKET_H_
