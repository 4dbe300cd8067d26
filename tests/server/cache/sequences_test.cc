#include "server/cache/sequences.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/fake_clock.h"

namespace rapt::cache {
namespace {

using std::chrono::minutes;
using Turn = Sequences::Turn;

class SequencesTest : public ::testing::Test {
 protected:
  static SequenceCall Call(SequenceId id, bool starts = false, bool ends = false) {
    SequenceCall call = {.id = std::move(id), .starts = starts, .ends = ends};
    call.spec.shapes = {{.token = {.kv_heads = 1, .head_size = 2, .value_head_size = 1}}};
    return call;
  }

  static SequenceCall In(SequenceScope scope, SequenceCall call) {
    call.scope = std::move(scope);
    return call;
  }

  // Runs a call whose turn must come at once, and returns its cache.
  absl::StatusOr<std::string> RunCall(SequenceCall call, bool succeeds = true,
                                      const std::string& owner = "a") {
    std::optional<absl::StatusOr<std::string>> cache;
    sequences_.Enter(owner, std::move(call), [&](Turn turn) {
      cache = turn.cache();
      if (succeeds) turn.End(true);
    });
    EXPECT_TRUE(cache.has_value());
    return cache.value_or(absl::UnknownError("the turn did not come"));
  }
  std::string Start(const SequenceId& id, const std::string& owner = "a") {
    return RunCall(Call(id, /*starts=*/true), true, owner).value();
  }
  std::string Step(const SequenceId& id, const std::string& owner = "a") {
    return RunCall(Call(id), true, owner).value();
  }
  bool Runs(const SequenceId& id, const std::string& owner = "a") {
    const auto cache = RunCall(Call(id), true, owner);
    EXPECT_TRUE(cache.ok() || absl::IsNotFound(cache.status())) << cache.status();
    return cache.ok();
  }

  Arena arena_{4 * Arena::kSlabBytes};
  test::FakeClock clock_;
  CacheStore store_{{.instance = "test", .default_lease = minutes(10)}, arena_, clock_};
  Sequences sequences_{store_};
};

TEST_F(SequencesTest, CallsShareTheCacheUntilTheLast) {
  EXPECT_FALSE(Runs(5u));
  const std::string cache = Start(5u);
  EXPECT_EQ(Step(5u), cache);
  EXPECT_EQ(RunCall(Call(5u, false, /*ends=*/true)).value(), cache);
  EXPECT_FALSE(Runs(5u));
  EXPECT_EQ(store_.caches(), 0);
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(SequencesTest, NumbersTextsAndOwnersHaveSequencesOfTheirOwn) {
  const std::string number = Start(5u), text = Start("5"), other = Start(5u, "b");
  EXPECT_EQ(Step(5u), number);
  EXPECT_EQ(Step("5"), text);
  EXPECT_EQ(Step(5u, "b"), other);
  EXPECT_EQ(store_.caches(), 3);
  EXPECT_FALSE(Runs("5", "b"));
}

TEST_F(SequencesTest, ScopesHaveSequencesOfTheirOwnAndEndAlone) {
  const auto first = std::make_shared<std::atomic<bool>>(false);
  const auto second = std::make_shared<std::atomic<bool>>(false);
  const std::string none = Start(5u);
  const std::string one = RunCall(In(first, Call(5u, /*starts=*/true))).value();
  const std::string other = RunCall(In(first, Call("x", /*starts=*/true)), true, "b").value();
  const std::string two = RunCall(In(second, Call(5u, /*starts=*/true))).value();
  EXPECT_EQ(store_.caches(), 4);
  EXPECT_EQ(RunCall(In(first, Call(5u))).value(), one);
  *first = true;
  sequences_.EndAll(first);
  EXPECT_FALSE(store_.Has("a", one) || store_.Has("b", other));
  EXPECT_TRUE(absl::IsNotFound(RunCall(In(first, Call(5u))).status()));
  EXPECT_EQ(Step(5u), none);
  EXPECT_EQ(RunCall(In(second, Call(5u))).value(), two);
  EXPECT_EQ(store_.caches(), 2);
  EXPECT_EQ(sequences_.size(), 2u);
}

TEST_F(SequencesTest, AScopeEndsAfterTheCallsThatRunAndWait) {
  const auto scope = std::make_shared<std::atomic<bool>>(false);
  std::optional<Turn> first;
  sequences_.Enter("a", In(scope, Call(7u, /*starts=*/true)),
                   [&](Turn turn) { first.emplace(std::move(turn)); });
  std::optional<Turn> second;
  sequences_.Enter("a", In(scope, Call(7u)), [&](Turn turn) { second.emplace(std::move(turn)); });
  *scope = true;
  sequences_.EndAll(scope);
  EXPECT_EQ(store_.caches(), 1);
  first->End(true);
  first.reset();
  ASSERT_TRUE(second.has_value());
  EXPECT_TRUE(second->cache().ok());
  second->End(true);
  EXPECT_EQ(store_.caches(), 1);
  second.reset();
  EXPECT_EQ(store_.caches(), 0);
  EXPECT_EQ(sequences_.size(), 0u);
}

// A call may have been read before its layer was replaced.
TEST_F(SequencesTest, ACallThatEntersAnEndedScopeLeavesNoSequence) {
  const auto scope = std::make_shared<std::atomic<bool>>(true);
  sequences_.EndAll(scope);
  EXPECT_TRUE(RunCall(In(scope, Call(7u, /*starts=*/true))).ok());
  EXPECT_EQ(store_.caches(), 0);
  EXPECT_EQ(sequences_.size(), 0u);
  EXPECT_TRUE(absl::IsNotFound(RunCall(In(scope, Call(7u))).status()));
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(SequencesTest, CallsThatEnterWhileScopesEndLeaveNoSequences) {
  SequenceScope current;
  Mutex mutex;
  const auto swap = [&](SequenceScope next) {
    MutexLock lock(mutex);
    current.swap(next);
    return next;
  };
  std::atomic<bool> stops{false};
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      while (!stops) {
        SequenceScope scope = swap(nullptr);
        if (scope == nullptr) continue;
        swap(scope);
        RunCall(In(scope, Call(id, /*starts=*/true))).IgnoreError();
      }
    });
  }
  for (int n = 0; n < 2000; ++n) {
    const auto scope = std::make_shared<std::atomic<bool>>(false);
    swap(scope);
    std::this_thread::yield();
    *scope = true;
    sequences_.EndAll(scope);
  }
  stops = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store_.caches(), 0);
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(SequencesTest, AStartReplacesTheSequence) {
  const std::string first = Start(7u);
  const std::string second = Start(7u);
  EXPECT_NE(first, second);
  EXPECT_FALSE(store_.Has("a", first));
  EXPECT_EQ(Step(7u), second);
  EXPECT_EQ(store_.caches(), 1);
}

TEST_F(SequencesTest, AStartThatFailsLeavesNoSequence) {
  Start(7u);
  EXPECT_TRUE(RunCall(Call(7u, /*starts=*/true), /*succeeds=*/false).ok());
  EXPECT_FALSE(Runs(7u));
  SequenceCall wrong = Call(7u, /*starts=*/true);
  wrong.spec.shapes.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(RunCall(wrong).status()));
  EXPECT_FALSE(Runs(7u));
  EXPECT_EQ(store_.caches(), 0);
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(SequencesTest, AStepThatFailsLeavesTheSequenceAndAnEndDoesNot) {
  Start(7u);
  EXPECT_TRUE(RunCall(Call(7u), /*succeeds=*/false).ok());
  EXPECT_TRUE(Runs(7u));
  EXPECT_TRUE(RunCall(Call(7u, false, /*ends=*/true), /*succeeds=*/false).ok());
  EXPECT_FALSE(Runs(7u));
  EXPECT_EQ(store_.caches(), 0);
}

TEST_F(SequencesTest, ACacheIsClosedBeforeItsTurnIsOver) {
  sequences_.Enter("a", Call("x", true, true), [&](Turn turn) {
    EXPECT_EQ(store_.caches(), 1);
    turn.End(true);
    EXPECT_EQ(store_.caches(), 0);
  });
}

TEST_F(SequencesTest, ASequenceEndsWithItsLease) {
  Start(7u);
  clock_.Advance(minutes(11));
  EXPECT_FALSE(Runs(7u));
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(SequencesTest, ACacheClosedByItsOwnerIsNoSequence) {
  const std::string cache = Start(7u);
  ASSERT_TRUE(store_.Close("a", {&cache, 1}).ok());
  EXPECT_FALSE(Runs(7u));
}

TEST_F(SequencesTest, CallsHaveTurnsInTheOrderOfTheirArrival) {
  std::string order;
  std::optional<Turn> first;
  sequences_.Enter("a", Call(7u, /*starts=*/true), [&](Turn turn) {
    EXPECT_FALSE(turn.has_waited());
    first.emplace(std::move(turn));
  });
  for (const char name : {'1', '2', '3'}) {
    sequences_.Enter("a", Call(7u), [&, name](Turn turn) {
      EXPECT_TRUE(turn.cache().ok() && turn.has_waited());
      order += name;
    });
  }
  EXPECT_EQ(order, "");
  Start(8u);  // others do not wait
  first->End(true);
  EXPECT_EQ(order, "");
  first.reset();
  EXPECT_EQ(order, "123");
}

TEST_F(SequencesTest, AWaitingCallSeesWhatThoseBeforeItDid) {
  std::optional<Turn> first;
  sequences_.Enter("a", Call(7u, /*starts=*/true),
                   [&](Turn turn) { first.emplace(std::move(turn)); });
  std::vector<bool> found;
  const auto note = [&](Turn turn) {
    found.push_back(turn.cache().ok());
    turn.End(true);
  };
  sequences_.Enter("a", Call(7u, false, /*ends=*/true), note);
  sequences_.Enter("a", Call(7u), note);
  sequences_.Enter("a", Call(7u, /*starts=*/true), note);
  sequences_.Enter("a", Call(7u), note);
  first->End(true);
  first.reset();
  EXPECT_EQ(found, (std::vector<bool>{true, false, true, true}));
}

TEST_F(SequencesTest, AnyNumberOfCallsMayWait) {
  constexpr int kCalls = 200'000;  // each with a stack frame would overflow it
  int turns = 0;
  std::optional<Turn> first;
  sequences_.Enter("a", Call(7u), [&](Turn turn) { first.emplace(std::move(turn)); });
  for (int n = 0; n < kCalls; ++n) {
    sequences_.Enter("a", Call(7u), [&](const Turn&) { ++turns; });
  }
  first.reset();
  EXPECT_EQ(turns, kCalls);
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(SequencesTest, DeadSequencesDoNotAccumulate) {
  Start("kept");
  constexpr int kSequences = 10'000;
  for (int n = 0; n < kSequences; ++n) {
    const std::string cache = Start(absl::StrCat("closed ", n));
    ASSERT_TRUE(store_.Close("a", {&cache, 1}).ok());
  }
  EXPECT_LE(sequences_.size(), 200u);
  EXPECT_TRUE(Runs("kept"));
}

// A turn may end on any thread, while others enter.
TEST_F(SequencesTest, ThreadsShareASequence) {
  constexpr int kThreads = 4;
  constexpr int kCallsPerThread = 2000;
  std::atomic<int> in_turn{0}, turns{0};
  const auto end = [&](Turn* turn) {
    --in_turn;
    delete turn;
  };
  using HeldTurn = std::unique_ptr<Turn, decltype(end)>;
  Mutex mutex;
  std::vector<HeldTurn> held;
  const auto end_held = [&] {
    std::vector<HeldTurn> over;  // destroyed without the lock
    MutexLock lock(mutex);
    over.swap(held);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::minstd_rand random(static_cast<unsigned>(t + 1));
      for (int n = 0; n < kCallsPerThread; ++n) {
        const bool is_held = random() % 4 == 0;
        sequences_.Enter("a", Call(7u, random() % 4 == 0, random() % 4 == 0),
                         [&, is_held](Turn turn) {
                           EXPECT_EQ(++in_turn, 1);
                           ++turns;
                           HeldTurn mine(new Turn(std::move(turn)), end);
                           mine->End(true);
                           if (!is_held) return;
                           MutexLock lock(mutex);
                           held.push_back(std::move(mine));
                         });
        end_held();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (turns < kThreads * kCallsPerThread || in_turn > 0) end_held();
  EXPECT_TRUE(RunCall(Call(7u, true, true)).ok());
  EXPECT_EQ(store_.caches(), 0);
  EXPECT_EQ(sequences_.size(), 0u);
}

}  // namespace
}  // namespace rapt::cache
