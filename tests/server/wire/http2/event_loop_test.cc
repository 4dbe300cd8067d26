#include "server/wire/http2/event_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/descriptor.h"

namespace rapt {
namespace {

// What the watchers of a loop do in its rounds.
struct Rounds {
  int heavy_in_round = 0;
  int most_heavy_in_round = 0;
  int rounds = 0;
  std::promise<void> enough;
};

constexpr int kRounds = 50;
constexpr int kWatchers = 20;

// Always ready, and always wants to compute for long.
class BusyWatcher final : public EventLoop::Watcher,
                          public std::enable_shared_from_this<BusyWatcher> {
 public:
  BusyWatcher(EventLoop& loop, Rounds& rounds, bool ends_rounds)
      : loop_(loop), rounds_(rounds), ends_rounds_(ends_rounds) {}

  int descriptor() const { return event_.get(); }

 private:
  void OnEvents(uint32_t) override {
    if (ends_rounds_) loop_.AtRoundEnd(shared_from_this());
    if (loop_.TakeHeavyTurn()) ++rounds_.heavy_in_round;
  }
  void OnTick(Instant) override {}
  void OnRoundEnd() override {
    rounds_.most_heavy_in_round =
        std::max(rounds_.most_heavy_in_round, std::exchange(rounds_.heavy_in_round, 0));
    if (++rounds_.rounds == kRounds) rounds_.enough.set_value();
  }

  EventLoop& loop_;
  Rounds& rounds_;
  const bool ends_rounds_;
  const Descriptor event_{eventfd(1, EFD_CLOEXEC)};
};

TEST(EventLoopTest, FewComputeForLongInARound) {
  const SteadyClock clock;
  EventLoop loop(clock);
  Rounds rounds;
  std::vector<std::shared_ptr<BusyWatcher>> watchers;
  for (int i = 0; i < kWatchers; ++i) {
    watchers.push_back(std::make_shared<BusyWatcher>(loop, rounds, /*ends_rounds=*/i == 0));
    loop.Add(watchers.back()->descriptor(), EPOLLIN, watchers.back());
  }
  loop.Start();
  rounds.enough.get_future().wait();
  loop.Stop();
  EXPECT_GE(rounds.most_heavy_in_round, 1);
  EXPECT_LE(rounds.most_heavy_in_round, 2);
}

}  // namespace
}  // namespace rapt
