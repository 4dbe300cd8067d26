#include "server/wire/grpc/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/descriptor.h"

namespace rapt {
namespace {

// Connects to the socket. Returns 0 or an errno.
int TryToConnect(const sockaddr_un& name) {
  const Descriptor descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (descriptor.get() < 0) return errno;
  const auto* const address = reinterpret_cast<const sockaddr*>(&name);
  return connect(descriptor.get(), address, sizeof(name)) == 0 ? 0 : errno;
}

}  // namespace

absl::Status MakeRoomForSocket(const std::string& path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  if (path.size() >= sizeof(name.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("--unix_socket has ", path.size(),
                                                   " bytes; a socket's path has at most ",
                                                   sizeof(name.sun_path) - 1));
  }
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();  // binding reports other errors
  if (!S_ISSOCK(status.st_mode)) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", path, "; it is not a socket"));
  }
  std::memcpy(name.sun_path, path.c_str(), path.size());
  if (TryToConnect(name) != ECONNREFUSED) {
    return absl::UnavailableError(
        absl::StrCat("can't listen on ", path, "; another server may be using it"));
  }
  if (unlink(path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("can't listen on ", path, "; the existing socket can't be removed"));
}

}  // namespace rapt
