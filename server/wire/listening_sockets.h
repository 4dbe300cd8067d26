// Listening sockets.
#ifndef RAPT_SERVER_WIRE_LISTENING_SOCKETS_H_
#define RAPT_SERVER_WIRE_LISTENING_SOCKETS_H_

#include <netdb.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/descriptor.h"

namespace rapt {

// Non-blocking; one for each address of a host name, all on one port.
struct ListeningSockets {
  std::vector<Descriptor> descriptors;
  int port = 0;
};

// Binds and listens. `address` is "host:port", an IPv6 host in brackets; port 0 chooses a free
// port. 0.0.0.0 means all addresses of both families. Accepted connections inherit TCP_NODELAY.
// Unavailable if the address can't be bound.
absl::StatusOr<ListeningSockets> ListenOn(const std::string& address);

// Binds all addresses of the list to one port and listens, except on those of families that this
// machine lacks. Port 0 chooses a port that is free on all of them. Returns no sockets on failure.
ListeningSockets ListenOnAll(const addrinfo* addresses);

// Returns a listening Unix domain socket with this file mode, non-blocking. Removes the stale
// socket of a dead server first. InvalidArgument if the path is too long; Unavailable if a server
// still listens there or the file is not a socket, which are not removed, or if it can't be bound.
// Changes the umask of the process temporarily, so use it at startup only.
absl::StatusOr<Descriptor> ListenOnUnix(const std::string& path, int mode);

// Returns whether accept() failed with this errno because the process or the system lacks
// descriptors or memory: a retry fails until some are free.
bool IsShortage(int accept_error);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_LISTENING_SOCKETS_H_
