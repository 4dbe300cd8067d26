#include "server/admission/gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Each share: 4480 for everybody, 640 for requests of at most 160.
constexpr int64_t kBudget = 10240;
constexpr int64_t kGeneral = 4480;
constexpr int64_t kSmall = 160;
constexpr AdmissionGate::Share kReceive = AdmissionGate::Share::kReceive;
constexpr AdmissionGate::Share kCompute = AdmissionGate::Share::kCompute;

class GateTest : public ::testing::Test {
 protected:
  MemoryBudget::Reservation Take(int64_t bytes, AdmissionGate::Share share = kCompute) {
    std::optional<AdmissionGate::Outcome> outcome =
        gate_.AdmitNow({.share = share, .bytes = bytes});
    if (!outcome || !outcome->ok()) {
      ADD_FAILURE() << bytes << " bytes were not admitted";
      return {};
    }
    return std::move((*outcome)->reservation);
  }

  // Queues, and notes the request's number when it is served; its bytes are given back at once
  // unless `kept`.
  void Queue(int number, AdmissionGate::Ask ask, MemoryBudget::Reservation* kept = nullptr) {
    gate_.Queue(ask, [this, number, kept](AdmissionGate::Outcome outcome) {
      statuses_.push_back(outcome.status());
      served_.push_back(number);
      if (outcome.ok() && kept != nullptr) *kept = std::move(outcome->reservation);
    });
  }

  // Returns when the timer's thread has done what it can.
  void Settle() {
    timer_.Wake();
    for (int n = 0; n < 2; ++n) {  // grants may give bytes back, which wakes the gate once more
      std::promise<void> rang;
      Alarm last(timer_, [&rang] { rang.set_value(); });
      clock_.Advance(std::chrono::nanoseconds(1));
      last.Set(clock_.Now());  // after those of the same time
      rang.get_future().wait();
    }
    gate_.Serve();
  }

  std::vector<int> served_;
  std::vector<absl::Status> statuses_;
  test::FakeClock clock_;
  // Serves those whom the end of a test lets by, and writes to the above.
  Timer timer_{clock_};
  AdmissionGate gate_{
      {.budget_bytes = kBudget, .max_queued = 4, .max_queue_delay = seconds(10)}, timer_, clock_};
};

TEST_F(GateTest, RefusesWhatCanNeverFitWithNeededAndAllowed) {
  EXPECT_EQ(gate_.LimitOf(kCompute), kGeneral);
  const auto outcome = gate_.AdmitNow({.bytes = kGeneral + 1});
  ASSERT_TRUE(outcome.has_value());
  EXPECT_EQ(outcome->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(outcome->status().message()),
              AllOf(HasSubstr("needs 4481"), HasSubstr("of 10240"), HasSubstr("at most 4480")));
}

TEST_F(GateTest, WhatHasComeIsHeldAllTheSameAndOthersWait) {
  std::optional<MemoryBudget::Reservation> held = Take(4000, kReceive);
  const MemoryBudget::Reservation charged = gate_.Charge(kReceive, 1000);
  EXPECT_EQ(gate_.reserved_bytes(kReceive), 5000);
  EXPECT_FALSE(gate_.AdmitNow({.share = kReceive, .bytes = kSmall + 1}).has_value());
  held.reset();
  EXPECT_EQ(Take(kGeneral - 1000, kReceive).bytes(), kGeneral - 1000);
}

TEST_F(GateTest, WhatCouldFitWaitsUntilItDoes) {
  std::optional<MemoryBudget::Reservation> held = Take(4000);
  EXPECT_FALSE(gate_.AdmitNow({.bytes = 1000}).has_value());
  Queue(1, {.bytes = 1000});
  Settle();
  EXPECT_TRUE(served_.empty());
  held.reset();
  Settle();
  EXPECT_THAT(served_, ElementsAre(1));
  EXPECT_TRUE(statuses_[0].ok()) << statuses_[0];
  EXPECT_EQ(gate_.reserved_bytes(), 0);
  EXPECT_EQ(gate_.waiting().depth, 0);
}

TEST_F(GateTest, WhoWasAdmittedLearnsHowLongItWaited) {
  std::optional<MemoryBudget::Reservation> held = Take(4000);
  std::chrono::nanoseconds waited{0};
  gate_.Queue({.bytes = 1000}, [&](AdmissionGate::Outcome outcome) { waited = outcome->waited; });
  clock_.Advance(seconds(3));
  held.reset();
  Settle();
  EXPECT_GE(waited, seconds(3));
  EXPECT_LT(waited, seconds(4));
}

// Received messages fill their share to the end; answers to them still have theirs.
TEST_F(GateTest, MessagesNeverTakeTheMemoryOfAnswers) {
  std::vector<MemoryBudget::Reservation> messages;
  messages.push_back(Take(kGeneral, kReceive));
  while (auto outcome = gate_.AdmitNow({.share = kReceive, .bytes = kSmall})) {
    messages.push_back(std::move((*outcome)->reservation));
  }
  EXPECT_EQ(gate_.reserved_bytes(), kBudget / 2);
  EXPECT_EQ(Take(kGeneral).bytes(), kGeneral);
}

TEST_F(GateTest, IsFirstComeFirstServedWithinAPriority) {
  std::optional<MemoryBudget::Reservation> held = Take(kGeneral);
  Queue(1, {.bytes = 1000});
  Queue(2, {.bytes = 1000});
  Queue(3, {.bytes = 1000, .priority = 1});
  Queue(4, {.bytes = 1000, .priority = AdmissionGate::kDefaultPriority + 1});
  held.reset();
  Settle();
  EXPECT_THAT(served_, ElementsAre(3, 1, 2, 4));
}

TEST_F(GateTest, LaterSmallerOnesDoNotStarveALargeOne) {
  std::optional<MemoryBudget::Reservation> first = Take(3000);
  std::optional<MemoryBudget::Reservation> second = Take(1480);
  MemoryBudget::Reservation large;
  Queue(1, {.bytes = 4000}, &large);
  Queue(2, {.bytes = 1000});
  second.reset();  // there would be room for the second
  Settle();
  EXPECT_TRUE(served_.empty());
  EXPECT_FALSE(gate_.AdmitNow({.bytes = 1000}).has_value()) << "nobody passes the queue";
  first.reset();
  Settle();
  EXPECT_THAT(served_, ElementsAre(1));
  large = {};
  Settle();
  EXPECT_THAT(served_, ElementsAre(1, 2));
}

TEST_F(GateTest, SmallOnesPassLargeOnesByTheirReservedPart) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  Queue(1, {.bytes = 1000});
  std::vector<MemoryBudget::Reservation> small;
  for (int n = 0; n < 4; ++n) small.push_back(Take(kSmall));
  EXPECT_FALSE(gate_.AdmitNow({.bytes = kSmall}).has_value()) << "its part is full too";
  Queue(2, {.bytes = kSmall});
  small.pop_back();
  Settle();
  EXPECT_THAT(served_, ElementsAre(2));
}

TEST_F(GateTest, AFullQueueRefuses) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  for (int n = 1; n <= 5; ++n) Queue(n, {.bytes = 1000});
  EXPECT_THAT(served_, ElementsAre(5));
  EXPECT_EQ(statuses_[0].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(statuses_[0].message()), HasSubstr("full with 4 requests"));
  clock_.Advance(seconds(11));
  Settle();
}

TEST_F(GateTest, WaitsNoLongerThanTheQueueAllows) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  Queue(1, {.bytes = 1000});
  clock_.Advance(seconds(9));
  Settle();
  EXPECT_TRUE(served_.empty());
  clock_.Advance(seconds(1));
  Settle();
  ASSERT_THAT(served_, ElementsAre(1));
  EXPECT_EQ(statuses_[0].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(statuses_[0].message()), HasSubstr("in 10000 ms in the queue"));
}

TEST_F(GateTest, ADeadlineEndsTheWait) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  Queue(1, {.bytes = 1000, .deadline = clock_.Now() + seconds(2)});
  clock_.Advance(seconds(2));
  Settle();
  ASSERT_THAT(served_, ElementsAre(1));
  EXPECT_EQ(statuses_[0].code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(GateTest, ACancelledRequestLeavesTheQueueAtOnceAndLetsTheNextBy) {
  MemoryBudget::Reservation held = Take(3000);
  std::atomic<bool> cancelled = false;
  Queue(1, {.bytes = 4000, .cancelled = &cancelled});
  Queue(2, {.bytes = 1000});
  cancelled = true;
  gate_.NoticeCancellation();
  Settle();
  EXPECT_THAT(served_, ElementsAre(1, 2));
  EXPECT_EQ(statuses_[0].code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(statuses_[1].ok());
}

// Many threads ask, wait, hold and give back; nobody is forgotten and nothing is left over.
TEST(GateThreadsTest, NobodyIsForgotten) {
  const SteadyClock clock;
  Timer timer(clock);
  AdmissionGate gate(
      {.budget_bytes = kBudget, .max_queued = 1000, .max_queue_delay = std::chrono::hours(1)},
      timer, clock);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&gate, t] {
      std::mt19937 rng(t);
      for (int n = 0; n < 2000; ++n) {
        const AdmissionGate::Ask ask = {.share = rng() % 2 ? kReceive : kCompute,
                                        .bytes = static_cast<int64_t>(rng() % (kGeneral + 1)),
                                        .priority = rng() % 3};
        if (auto outcome = gate.AdmitNow(ask)) {
          EXPECT_TRUE(outcome->ok());
          continue;
        }
        std::promise<AdmissionGate::Outcome> granted;
        gate.Queue(ask, [&](AdmissionGate::Outcome o) { granted.set_value(std::move(o)); });
        EXPECT_TRUE(granted.get_future().get().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(gate.reserved_bytes(), 0);
  EXPECT_EQ(gate.waiting().depth, 0);
}

}  // namespace
}  // namespace rapt
