#include "server/wire/event_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "tests/support/fake_clock.h"

namespace rapt::test {
namespace {

constexpr PeerNetwork kBusy = {1}, kQuiet = {2};
constexpr int kRound = -1;  // instead of a watcher: the loop looked for events and tasks

// Who had a turn, in order. Belongs to the thread of the loop until it is complete.
class Turns {
 public:
  void Add(int watcher) {
    if (turns_.size() == kTurns) return;
    turns_.push_back(watcher);
    if (turns_.size() == kTurns) complete_.set_value();
  }

  const std::vector<int>& Await() {
    complete_.get_future().wait();
    return turns_;
  }

 private:
  static constexpr size_t kTurns = 500;
  std::vector<int> turns_;
  std::promise<void> complete_;
};

// Returns the most turns of watchers between two of `watcher`.
int MostBetween(const std::vector<int>& turns, int watcher) {
  std::optional<int> between;  // since its last one
  int most = 0, count = 0;
  for (const int turn : turns) {
    if (turn == watcher) {
      most = std::max(most, between.value_or(0));
      between = 0;
      ++count;
    } else if (turn != kRound && between) {
      ++*between;
    }
  }
  EXPECT_GE(count, 5) << "turns of watcher " << watcher;
  return most;
}

// Always ready. Computes for a millisecond in each turn.
class BusyWatcher final : public EventLoop::Watcher {
 public:
  BusyWatcher(int number, bool is_heavy, FakeClock& clock, Turns& turns)
      : number_(number), is_heavy_(is_heavy), clock_(clock), turns_(turns) {}

  int descriptor() const { return event_.get(); }

 private:
  void OnEvents(uint32_t) override {
    clock_.Advance(std::chrono::milliseconds(1));
    turns_.Add(number_);
  }
  void OnTick(Instant) override {}
  bool NextTurnIsHeavy() const override { return is_heavy_; }

  const int number_;
  const bool is_heavy_;
  FakeClock& clock_;
  Turns& turns_;
  const Descriptor event_{eventfd(1, EFD_CLOEXEC)};
};

// 20 watchers of a network and another network's only one; all of them heavy, or none.
class TurnsTest : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int kWatchers = 20;  // of the busy network; the quiet one's has this number

  void SetUp() override {
    for (int i = 0; i < kWatchers; ++i) Watch(i, kBusy);
    Watch(kWatchers, kQuiet);
    loop_.Post(count_rounds_);
    loop_.Start();
  }
  void TearDown() override {
    is_stopping_ = true;
    loop_.Stop();
  }

  void Watch(int number, const PeerNetwork& network) {
    auto watcher = std::make_shared<BusyWatcher>(number, /*is_heavy=*/GetParam(), clock_, turns_);
    const int descriptor = watcher->descriptor();
    loop_.Add(descriptor, EPOLLIN, std::move(watcher), network);
  }

  FakeClock clock_;
  Turns turns_;
  EventLoop loop_{clock_};
  // Tasks run once in a round.
  const std::function<void()> count_rounds_ = [this] {
    turns_.Add(kRound);
    if (!is_stopping_) loop_.Post(count_rounds_);
  };
  std::atomic<bool> is_stopping_{false};
};

TEST_P(TurnsTest, ANetworkWaitsForATurnOfEachOtherNetwork) {
  // Two if it becomes ready while the loop serves the other network.
  EXPECT_LE(MostBetween(turns_.Await(), kWatchers), 2);
}

TEST_P(TurnsTest, TheWatchersOfANetworkHaveEqualTurns) {
  const std::vector<int>& turns = turns_.Await();
  for (int i = 0; i < kWatchers; ++i) {
    // Each of the others, and as many of the other network.
    EXPECT_LE(MostBetween(turns, i), 2 * kWatchers);
  }
}

TEST_P(TurnsTest, FewComputeInARound) {
  const std::vector<int>& turns = turns_.Await();
  int most = 0, in_round = 0;
  for (const int turn : turns) {
    in_round = turn == kRound ? 0 : in_round + 1;
    most = std::max(most, in_round);
  }
  EXPECT_GE(most, 1);
  EXPECT_LE(most, 2);
}

INSTANTIATE_TEST_SUITE_P(, TurnsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Heavy" : "Light"; });

}  // namespace
}  // namespace rapt::test
