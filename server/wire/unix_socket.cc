#include "server/wire/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Connects to the socket. Returns 0 or an errno.
int TryToConnect(const sockaddr_un& name) {
  const Descriptor descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (descriptor.get() < 0) return errno;
  const auto* const address = reinterpret_cast<const sockaddr*>(&name);
  return connect(descriptor.get(), address, sizeof(name)) == 0 ? 0 : errno;
}

// REQUIRES: the path fits.
sockaddr_un NameOf(const std::string& path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size());
  return name;
}

// Sets the mode of sockets bound during its lifetime.
class ScopedFileMode {
 public:
  explicit ScopedFileMode(int mode) : previous_(umask(~static_cast<mode_t>(mode) & 0777)) {}
  ~ScopedFileMode() { umask(previous_); }
  ScopedFileMode(const ScopedFileMode&) = delete;
  ScopedFileMode& operator=(const ScopedFileMode&) = delete;

 private:
  const mode_t previous_;
};

// Removes the stale socket of a dead server.
absl::Status MakeRoomForSocket(const std::string& path) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Invalid("--unix_socket has ", path.size(), " bytes; a socket's path has at most ",
                   sizeof(sockaddr_un::sun_path) - 1);
  }
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();  // binding reports other errors
  if (!S_ISSOCK(status.st_mode)) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", path, "; it is not a socket"));
  }
  if (TryToConnect(NameOf(path)) != ECONNREFUSED) {
    return absl::UnavailableError(
        absl::StrCat("can't listen on ", path, "; another server may be using it"));
  }
  if (unlink(path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("can't listen on ", path, "; the existing socket can't be removed"));
}

}  // namespace

absl::StatusOr<Descriptor> ListenOnUnix(const std::string& path, int mode) {
  RAPT_RETURN_IF_ERROR(MakeRoomForSocket(path));
  Descriptor result(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const sockaddr_un name = NameOf(path);
  const ScopedFileMode file_mode(mode);
  if (result.get() < 0 ||
      bind(result.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 ||
      listen(result.get(), SOMAXCONN) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "can't listen on ", path, "; its directory may not exist or may not be writable"));
  }
  return result;
}

}  // namespace rapt
