// Accepts the connections of a listening socket.
#ifndef RAPT_SERVER_WIRE_ACCEPTOR_H_
#define RAPT_SERVER_WIRE_ACCEPTOR_H_

#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/descriptor.h"
#include "base/log_limit.h"
#include "server/wire/event_loop.h"

namespace rapt {

// Belongs to the thread of its loop, except for Start().
class Acceptor final : public EventLoop::Watcher, public std::enable_shared_from_this<Acceptor> {
 public:
  using Take = std::function<void(Descriptor connection, const sockaddr_storage& peer)>;

  // Calls `take` with each connection. REQUIRES: the loop outlives it.
  Acceptor(EventLoop& loop, Descriptor listening, Take take)
      : loop_(loop), listening_(std::move(listening)), take_(std::move(take)) {}

  // Call once, before the loop starts or on its thread.
  void Start();
  void Stop() { loop_.Remove(listening_.get()); }

 private:
  void OnEvents(uint32_t events) override;
  void OnTick(Instant now) override;
  void OnFailure(int error);

  EventLoop& loop_;
  const Descriptor listening_;
  const Take take_;
  LogLimit errors_{1, loop_.clock()};
  bool is_paused_ = false;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_ACCEPTOR_H_
