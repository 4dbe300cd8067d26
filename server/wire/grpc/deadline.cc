#include "server/wire/grpc/deadline.h"

#include <chrono>

namespace rapt {

Instant DeadlineOf(const grpc::ServerContextBase& context, Instant now) {
  using std::chrono::system_clock;
  // So far away that the sum would overflow: as good as never.
  constexpr std::chrono::hours kForever{24 * 365 * 100};
  const system_clock::time_point wall_now = system_clock::now();
  const system_clock::time_point deadline = context.deadline();
  if (deadline >= wall_now + kForever) return Instant::max();
  return now + (deadline - wall_now);
}

}  // namespace rapt
