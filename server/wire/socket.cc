#include "server/wire/socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

namespace rapt {
namespace {

ssize_t ResultOf(ssize_t count) {
  if (count >= 0) return count;
  return errno == EAGAIN || errno == EINTR ? Socket::kBlocked : Socket::kEnded;
}

}  // namespace

uint32_t InterestOf(Socket::Handshake handshake) {
  return handshake == Socket::Handshake::kNeedsWrite ? EPOLLOUT : EPOLLIN;
}

ssize_t PlainSocket::Read(absl::Span<const iovec> places) {
  const ssize_t count = readv(descriptor(), places.data(), static_cast<int>(places.size()));
  return count == 0 ? kEnded : ResultOf(count);
}

ssize_t PlainSocket::Write(absl::Span<const iovec> places) {
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(places.data());
  message.msg_iovlen = places.size();
  return ResultOf(sendmsg(descriptor(), &message, MSG_NOSIGNAL));
}

void PlainSocket::EndWriting() { shutdown(descriptor(), SHUT_WR); }

}  // namespace rapt
