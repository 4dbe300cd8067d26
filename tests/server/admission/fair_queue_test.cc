#include "server/admission/fair_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "server/request.h"

namespace rapt {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kCapacity = 1000;
constexpr std::chrono::nanoseconds kLevelDelay = seconds(1);

struct NumberedRequest final : WaitingRequest {
  int number = 0;
};

// The memory is a number that the test sets.
class FairQueueTest : public ::testing::Test {
 protected:
  using Caller = std::shared_ptr<CallerBytes>;

  Caller NewCaller(int64_t held = 0) {
    auto caller = std::make_shared<CallerBytes>(holders_);
    caller->Add(held);
    return caller;
  }

  // Each request arrives a millisecond after the previous one.
  void Add(int number, const Caller& caller, int64_t bytes, uint64_t priority = 0) {
    now_ += milliseconds(1);
    auto request = std::make_unique<NumberedRequest>();
    request->caller = caller;
    request->bytes = bytes;
    request->priority = priority;
    request->since = now_;
    request->number = number;
    queue_.Add(std::move(request));
  }

  // Offers `free` bytes. Returns the numbers of the requests served, whose callers hold them then.
  std::vector<int> Serve(int64_t free) {
    std::vector<int> served;
    queue_.Offer([](const WaitingRequest&) { return true; },
                 [&](FairQueue::Entry& entry) {
                   if (entry->bytes > free) return false;
                   free -= entry->bytes;
                   if (entry->caller != nullptr) entry->caller->Add(entry->bytes);
                   served.push_back(static_cast<NumberedRequest&>(*entry).number);
                   entry.reset();
                   return true;
                 });
    return served;
  }

  Instant now_ = Instant(seconds(100));
  std::atomic<int64_t> holders_{0};
  FairQueue queue_{kCapacity, holders_, kLevelDelay};
};

TEST_F(FairQueueTest, ACallerAloneGetsEverythingInOrderOfArrival) {
  const Caller a = NewCaller();
  for (int n = 1; n <= 4; ++n) Add(n, a, 250);
  EXPECT_THAT(Serve(1000), ElementsAre(1, 2, 3, 4));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(FairQueueTest, ACallerAboveItsShareGetsNoMoreWhileAnotherWaits) {
  const Caller a = NewCaller(/*held=*/500), b = NewCaller();
  Add(1, a, 100);
  Add(2, a, 100);
  Add(3, b, 300);
  EXPECT_EQ(queue_.FairShare(), 500);
  EXPECT_THAT(Serve(200), IsEmpty()) << "the memory is kept for the other caller";
  EXPECT_THAT(Serve(300), ElementsAre(3));
  EXPECT_THAT(Serve(200), ElementsAre(1, 2)) << "nobody within its share waits any more";
}

TEST_F(FairQueueTest, ACallerThatHoldsNothingMayExceedItsShareByOneRequest) {
  const Caller a = NewCaller(), b = NewCaller();
  Add(1, a, 900);
  Add(2, a, 900);
  Add(3, b, 100);
  EXPECT_THAT(Serve(1000), ElementsAre(1, 3));
}

TEST_F(FairQueueTest, LaterSmallRequestsOfACallerDoNotStarveItsLargeOne) {
  const Caller a = NewCaller(/*held=*/100), b = NewCaller();
  Add(1, a, 600);  // beyond its fair share of 500
  for (int n = 2; n <= 4; ++n) Add(n, a, 100);
  Add(5, b, 400);
  EXPECT_EQ(queue_.OldestWithinShare(), now_);
  EXPECT_THAT(Serve(300), IsEmpty()) << "the memory is kept for the other caller";
  EXPECT_THAT(Serve(900), ElementsAre(5)) << "the rest does not suffice for the large request";
  a->Subtract(100);  // it holds nothing
  EXPECT_THAT(Serve(700), ElementsAre(1, 2));
  EXPECT_THAT(Serve(200), ElementsAre(3, 4));
}

TEST_F(FairQueueTest, TheShareCountsHoldersAndWaitingCallersOnce) {
  EXPECT_EQ(queue_.FairShare(), 1000);
  const Caller a = NewCaller(10), b = NewCaller(10);
  EXPECT_EQ(queue_.FairShare(), 500);
  Add(1, a, 1);
  EXPECT_EQ(queue_.FairShare(), 500);
  Add(2, NewCaller(), 1);
  Add(3, nullptr, 1);
  EXPECT_EQ(queue_.FairShare(), 250);
  b->Subtract(10);
  EXPECT_EQ(queue_.FairShare(), 333);
}

TEST_F(FairQueueTest, ARequestThatDoesNotFitBlocksLaterOnes) {
  Add(1, NewCaller(), 400);
  Add(2, NewCaller(), 100);
  EXPECT_THAT(Serve(399), IsEmpty());
  EXPECT_THAT(Serve(500), ElementsAre(1, 2));
}

TEST_F(FairQueueTest, MoreUrgentRequestsPrecedeOnesThatHaveNotWaitedLong) {
  const Caller a = NewCaller();
  Add(1, a, 1);
  Add(2, a, 1, /*priority=*/1);
  Add(3, a, 1, kDefaultPriority + 1);
  Add(4, a, 1);
  EXPECT_THAT(Serve(1000), ElementsAre(2, 1, 4, 3));
}

TEST_F(FairQueueTest, UrgentRequestsThatKeepComingDoNotStarveOthers) {
  const Caller a = NewCaller(), b = NewCaller();
  Add(0, a, 1);
  const Instant since = now_;
  int number = 0;
  for (bool is_served = false; !is_served;) {
    now_ += milliseconds(100);
    Add(++number, b, 1, /*priority=*/1);
    const std::vector<int> served = Serve(1);
    ASSERT_EQ(served.size(), 1u);
    is_served = served.front() == 0;
    b->Subtract(b->held());
    ASSERT_LT(number, 1000);
  }
  const auto waited = now_ - since;
  EXPECT_GE(waited, 6 * kLevelDelay) << "the head start of 7 levels";
  EXPECT_LE(waited, 8 * kLevelDelay);
}

TEST_F(FairQueueTest, LevelsBeyondTheLeastUrgentCountAsIt) {
  const Caller a = NewCaller();
  Add(1, a, 1, kLowestPriority);
  Add(2, a, 1, ~uint64_t{0});
  Add(3, a, 1, kLowestPriority);
  EXPECT_THAT(Serve(1000), ElementsAre(1, 2, 3));
}

TEST_F(FairQueueTest, AFullQueueDisplacesTheLastRequestOfTheCallerWithTheMost) {
  const Caller a = NewCaller(), b = NewCaller();
  for (int n = 1; n <= 3; ++n) Add(n, a, 1);
  Add(4, b, 1);
  const auto displace_for = [this](const Caller& newcomer) {
    return queue_.Displace(queue_.CountOf(newcomer.get()));
  };
  const FairQueue::Entry displaced = displace_for(b);
  ASSERT_NE(displaced, nullptr);
  EXPECT_EQ(static_cast<NumberedRequest&>(*displaced).number, 3);
  EXPECT_EQ(displace_for(b), nullptr) << "it would only change places";
  EXPECT_EQ(displace_for(a), nullptr);
  EXPECT_THAT(Serve(1000), ElementsAre(1, 2, 4));
  EXPECT_EQ(displace_for(a), nullptr);
}

TEST_F(FairQueueTest, KnowsSinceWhenARequestWithinItsShareWaits) {
  const Caller a = NewCaller(/*held=*/900);
  Add(1, a, 100);
  EXPECT_EQ(queue_.OldestWithinShare(), now_);
  Add(2, NewCaller(), 100);
  EXPECT_EQ(queue_.OldestWithinShare(), now_);
  queue_.RemoveIf(
      [](FairQueue::Entry& entry) { return static_cast<NumberedRequest&>(*entry).number == 2; });
  EXPECT_EQ(queue_.FairShare(), 1000);
}

}  // namespace
}  // namespace rapt
