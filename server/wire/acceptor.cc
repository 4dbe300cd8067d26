#include "server/wire/acceptor.h"

#include <sys/epoll.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "base/log.h"
#include "server/wire/connection_counts.h"
#include "server/wire/listening_sockets.h"

namespace rapt {
namespace {

constexpr int kAcceptsPerRound = 64;
// Listening sockets have turns of their own. Multicast: the network of no peer.
constexpr PeerNetwork kListening = {0xFF};

}  // namespace

void Acceptor::Start() { loop_.Add(listening_.get(), EPOLLIN, shared_from_this(), kListening); }

void Acceptor::OnEvents(uint32_t) {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    Descriptor connection(accept4(listening_.get(), reinterpret_cast<sockaddr*>(&peer), &size,
                                  SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.get() < 0) return OnFailure(errno);
    take_(std::move(connection), peer);
  }
}

// Without descriptors or memory, connections wait until the next tick.
void Acceptor::OnFailure(int error) {
  if (!IsShortage(error)) return;
  if (const std::optional<int64_t> left_out = errors_.Take()) {
    Log(LogLevel::kWarning, "cannot accept connections",
        {{"reason", std::strerror(error)}, {"left_out", *left_out}});
  }
  is_paused_ = true;
  loop_.Change(listening_.get(), 0);
}

void Acceptor::OnTick(Instant) {
  if (std::exchange(is_paused_, false)) loop_.Change(listening_.get(), EPOLLIN);
}

}  // namespace rapt
