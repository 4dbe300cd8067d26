#include "server/admission/gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "server/request.h"
#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Each share: 4480 bytes for all requests and 640 for those of at most 160 bytes.
constexpr int64_t kBudget = 10240;
constexpr int64_t kGeneral = 4480;
constexpr int64_t kSmall = 160;
constexpr AdmissionGate::Share kReceive = AdmissionGate::Share::kReceive;
constexpr AdmissionGate::Share kCompute = AdmissionGate::Share::kCompute;

class GateTest : public ::testing::Test {
 protected:
  MemoryBudget::Reservation Take(int64_t bytes, AdmissionGate::Share share = kCompute) {
    std::optional<AdmissionGate::Result> result = gate_.AdmitNow({.share = share, .bytes = bytes});
    if (!result || !result->ok()) {
      ADD_FAILURE() << bytes << " bytes were not admitted";
      return {};
    }
    return std::move((*result)->reservation);
  }

  // Queues a request and records its number when it is served. Its bytes are released at once
  // unless `kept` is given.
  void Queue(int number, AdmissionGate::MemoryRequest request,
             MemoryBudget::Reservation* kept = nullptr) {
    gate_.Queue(request, [this, number, kept](AdmissionGate::Result result) {
      statuses_.push_back(result.status());
      served_.push_back(number);
      if (result.ok() && kept != nullptr) *kept = std::move(result->reservation);
    });
  }

  // Returns when the timer's thread has served the queue.
  void Settle() {
    timer_.Wake();
    for (int n = 0; n < 2; ++n) {  // callbacks may release bytes, which wakes the gate again
      std::promise<void> fired;
      Alarm last(timer_, [&fired] { fired.set_value(); });
      clock_.Advance(std::chrono::nanoseconds(1));
      last.Set(clock_.Now());  // runs after other alarms of the same time
      fired.get_future().wait();
    }
    gate_.Serve();
  }

  std::vector<int> served_;
  std::vector<absl::Status> statuses_;
  test::FakeClock clock_;
  // Serves requests still queued at the end of a test, and writes to the members above.
  Timer timer_{clock_};
  AdmissionGate gate_{
      {.budget_bytes = kBudget, .max_queued = 4, .max_queue_delay = seconds(10)}, timer_, clock_};
};

TEST_F(GateTest, RejectsWhatCanNeverFitWithNeededAndAllowedBytes) {
  EXPECT_EQ(gate_.LimitOf(kCompute), kGeneral);
  const auto result = gate_.AdmitNow({.bytes = kGeneral + 1});
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result->status().message()),
              AllOf(HasSubstr("needs 4481"), HasSubstr("of 10240"), HasSubstr("at most 4480")));
}

TEST_F(GateTest, ReceivedBytesAreChargedBeyondTheLimitAndOthersWait) {
  std::optional<MemoryBudget::Reservation> held = Take(4000, kReceive);
  const MemoryBudget::Reservation charged = gate_.Charge(kReceive, 1000);
  EXPECT_EQ(gate_.reserved_bytes(kReceive), 5000);
  EXPECT_FALSE(gate_.AdmitNow({.share = kReceive, .bytes = kSmall + 1}).has_value());
  held.reset();
  EXPECT_EQ(Take(kGeneral - 1000, kReceive).bytes(), kGeneral - 1000);
}

TEST_F(GateTest, ALongReservationShrinksWhatOneRequestMayTake) {
  {
    const auto kept = gate_.ReserveForLong(1000);
    ASSERT_TRUE(kept.ok()) << kept.status();
    EXPECT_EQ(gate_.LimitOf(kCompute), kGeneral - 1000);
    EXPECT_EQ(gate_.LimitOf(kReceive), kGeneral);
    EXPECT_EQ(gate_.reserved_bytes(kCompute), 1000);
    const auto result = gate_.AdmitNow({.bytes = kGeneral - 999});
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(gate_.LimitOf(kCompute), kGeneral);
  EXPECT_EQ(Take(kGeneral).bytes(), kGeneral);
}

TEST_F(GateTest, LongReservationsLeaveAQuarterToRequests) {
  const auto most = gate_.ReserveForLong(kGeneral / 4 * 3);
  ASSERT_TRUE(most.ok()) << most.status();
  const auto more = gate_.ReserveForLong(1);
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(more.status().message()),
              AllOf(HasSubstr("need 1 bytes beside 3360 bytes"), HasSubstr("at most 3360")));
}

TEST_F(GateTest, ALongReservationWaitsWithoutMemoryAndDelaysNobody) {
  std::optional<MemoryBudget::Reservation> held = Take(3000);
  auto reserved = std::async(std::launch::async, [this] { return gate_.ReserveForLong(3000); });
  while (gate_.waiting().depth < 1) std::this_thread::yield();
  EXPECT_EQ(gate_.reserved_bytes(), 3000);
  for (int n = 0; n < 3; ++n) Take(kGeneral - 3000);  // as if nobody waited
  held.reset();
  Settle();
  const auto kept = reserved.get();
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(gate_.LimitOf(kCompute), kGeneral - 3000);
}

// Even a small one leaves the part for small requests to them.
TEST_F(GateTest, ALongReservationThatFindsNoMemoryIsRefused) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  auto reserved =
      std::async(std::launch::async, [this] { return gate_.ReserveForLong(kSmall).status(); });
  while (gate_.waiting().depth < 1) std::this_thread::yield();
  clock_.Advance(seconds(10));
  Settle();
  EXPECT_THAT(std::string(reserved.get().message()),
              HasSubstr("memory for weights needs 160 bytes, which did not become free in 10000"));
  EXPECT_EQ(gate_.reserved_bytes(), kGeneral);
}

TEST_F(GateTest, QueuesARequestUntilItFits) {
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

TEST_F(GateTest, ReportsTheTimeInTheQueue) {
  std::optional<MemoryBudget::Reservation> held = Take(4000);
  std::chrono::nanoseconds waited{0};
  gate_.Queue({.bytes = 1000}, [&](AdmissionGate::Result result) { waited = result->waited; });
  clock_.Advance(seconds(3));
  held.reset();
  Settle();
  EXPECT_GE(waited, seconds(3));
  EXPECT_LT(waited, seconds(4));
}

// Messages may fill the receive share; the compute share stays free for their responses.
TEST_F(GateTest, MessagesNeverUseTheComputeShare) {
  std::vector<MemoryBudget::Reservation> messages;
  messages.push_back(Take(kGeneral, kReceive));
  while (auto result = gate_.AdmitNow({.share = kReceive, .bytes = kSmall})) {
    messages.push_back(std::move((*result)->reservation));
  }
  EXPECT_EQ(gate_.reserved_bytes(), kBudget / 2);
  EXPECT_EQ(Take(kGeneral).bytes(), kGeneral);
}

TEST_F(GateTest, IsFirstComeFirstServedWithinAPriority) {
  std::optional<MemoryBudget::Reservation> held = Take(kGeneral);
  Queue(1, {.bytes = 1000});
  Queue(2, {.bytes = 1000});
  Queue(3, {.bytes = 1000, .priority = 1});
  Queue(4, {.bytes = 1000, .priority = kDefaultPriority + 1});
  held.reset();
  Settle();
  EXPECT_THAT(served_, ElementsAre(3, 1, 2, 4));
}

TEST_F(GateTest, LaterSmallerRequestsDoNotStarveALargeOne) {
  std::optional<MemoryBudget::Reservation> first = Take(3000);
  std::optional<MemoryBudget::Reservation> second = Take(1480);
  MemoryBudget::Reservation large;
  Queue(1, {.bytes = 4000}, &large);
  Queue(2, {.bytes = 1000});
  second.reset();  // now the second would fit
  Settle();
  EXPECT_TRUE(served_.empty());
  EXPECT_FALSE(gate_.AdmitNow({.bytes = 1000}).has_value()) << "no request overtakes the queue";
  first.reset();
  Settle();
  EXPECT_THAT(served_, ElementsAre(1));
  large = {};
  Settle();
  EXPECT_THAT(served_, ElementsAre(1, 2));
}

TEST_F(GateTest, SmallRequestsOvertakeLargeOnesInTheirReservedPart) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  Queue(1, {.bytes = 1000});
  std::vector<MemoryBudget::Reservation> small;
  for (int n = 0; n < 4; ++n) small.push_back(Take(kSmall));
  EXPECT_FALSE(gate_.AdmitNow({.bytes = kSmall}).has_value())
      << "the reserved part is full as well";
  Queue(2, {.bytes = kSmall});
  small.pop_back();
  Settle();
  EXPECT_THAT(served_, ElementsAre(2));
}

TEST_F(GateTest, RejectsWhenTheQueueIsFull) {
  const MemoryBudget::Reservation held = Take(kGeneral);
  for (int n = 1; n <= 5; ++n) Queue(n, {.bytes = 1000});
  EXPECT_THAT(served_, ElementsAre(5));
  EXPECT_EQ(statuses_[0].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(statuses_[0].message()), HasSubstr("full with 4 requests"));
  clock_.Advance(seconds(11));
  Settle();
}

TEST_F(GateTest, RejectsAfterTheMaximumQueueDelay) {
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

TEST_F(GateTest, ACancelledRequestLeavesTheQueueAndUnblocksTheNext) {
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

// --- Callers -------------------------------------------------------------------------------------

constexpr std::chrono::nanoseconds kSilentTime = AdmissionGate::kSilentTime;

class CallersTest : public GateTest {
 protected:
  using Caller = std::shared_ptr<CallerMemory>;

  MemoryBudget::Reservation TakeFor(const Caller& caller, int64_t bytes,
                                    AdmissionGate::Share share = kReceive) {
    auto result = gate_.AdmitNow({.share = share, .bytes = bytes, .caller = caller});
    if (!result || !result->ok()) {
      ADD_FAILURE() << bytes << " bytes were not admitted";
      return {};
    }
    return std::move((*result)->reservation);
  }

  // A call that is silent after kSilentTime. Its end is recorded with its number.
  AdmissionGate::PeerWait Wait(const Caller& caller, int number,
                               AdmissionGate::Shares shares = {.receive = true}) {
    return gate_.WaitForPeer(caller, shares, clock_.Now() + kSilentTime,
                             [this, number] { ended_.push_back(number); });
  }

  void Advance(std::chrono::nanoseconds by) {
    clock_.Advance(by);
    Settle();
  }

  // Takes all that the caller gets without waiting, in ever smaller pieces.
  void TakeAll(const Caller& caller, AdmissionGate::Share share,
               std::vector<MemoryBudget::Reservation>& held) {
    for (int64_t bytes = 2048; bytes > 0; bytes /= 2) {
      while (auto result = gate_.AdmitNow({.share = share, .bytes = bytes, .caller = caller})) {
        held.push_back(std::move((*result)->reservation));
      }
    }
  }

  const Caller a_ = gate_.CallerOf("a"), b_ = gate_.CallerOf("b"), victim_ = gate_.CallerOf("v");
  std::vector<int> ended_;
};

TEST_F(CallersTest, CallsOfOneNameAreOneCaller) {
  EXPECT_EQ(gate_.CallerOf("a"), a_);
  EXPECT_NE(gate_.CallerOf("b"), a_);
  for (int n = 0; n < 1000; ++n) gate_.CallerOf(std::to_string(n));
  EXPECT_EQ(gate_.CallerOf("a"), a_) << "a caller is not forgotten while it has calls";
}

TEST_F(CallersTest, BytesAreCountedUntilTheLastPartIsReleased) {
  MemoryBudget::Reservation whole = TakeFor(a_, 1000);
  std::optional<MemoryBudget::Reservation> part = whole.Split(400);
  EXPECT_EQ(a_->receive.held(), 1000);
  EXPECT_EQ(a_->compute.held(), 0);
  whole = {};
  EXPECT_EQ(a_->receive.held(), 400);
  part.reset();
  EXPECT_EQ(a_->receive.held(), 0);
}

TEST_F(CallersTest, TheLongestSilentCallEndsForAnotherCallerThatWaits) {
  std::optional<MemoryBudget::Reservation> first = TakeFor(a_, 2240), second = TakeFor(a_, 2240);
  const AdmissionGate::PeerWait first_wait = Wait(a_, 1);
  Advance(seconds(1));
  const AdmissionGate::PeerWait second_wait = Wait(a_, 2);
  Queue(1, {.share = kReceive, .bytes = 1000, .caller = b_});
  Advance(kSilentTime - milliseconds(1));
  EXPECT_THAT(ended_, IsEmpty());
  Advance(milliseconds(1));
  EXPECT_THAT(ended_, ElementsAre(1));
  first.reset();
  Settle();
  EXPECT_THAT(served_, ElementsAre(1));
  Advance(seconds(1));
  EXPECT_THAT(ended_, ElementsAre(1)) << "nobody waits any more";
}

TEST_F(CallersTest, FurtherSilentCallsEndIfOneDoesNotSuffice) {
  std::vector<MemoryBudget::Reservation> held;
  std::vector<AdmissionGate::PeerWait> waits;
  for (int n = 0; n < 4; ++n) {
    held.push_back(TakeFor(a_, 1120));
    waits.push_back(Wait(a_, n));
  }
  Queue(1, {.share = kReceive, .bytes = 2000, .caller = b_});
  Advance(kSilentTime);
  EXPECT_THAT(ended_, ElementsAre(0));
  Advance(seconds(1));
  EXPECT_THAT(ended_, ElementsAre(0, 1));
}

TEST_F(CallersTest, NoCallOfACallerWithinItsShareEnds) {
  const MemoryBudget::Reservation held = TakeFor(a_, 2500);
  const AdmissionGate::PeerWait wait = Wait(a_, 1);
  Queue(1, {.share = kReceive, .bytes = 3000, .caller = b_});
  for (int n = 0; n < 9; ++n) Advance(seconds(1));
  EXPECT_THAT(ended_, IsEmpty());
}

TEST_F(CallersTest, OnlyACallThatHoldsMemoryOfTheShareEnds) {
  const MemoryBudget::Reservation message = TakeFor(a_, 1000);
  const MemoryBudget::Reservation first = TakeFor(a_, 2240, kCompute),
                                  second = TakeFor(a_, 2240, kCompute);
  const AdmissionGate::PeerWait upload = Wait(a_, 1, {.receive = true});
  const AdmissionGate::PeerWait stream = Wait(a_, 2, {.receive = true, .compute = true});
  const AdmissionGate::PeerWait download = Wait(a_, 3, {.compute = true});
  Queue(1, {.share = kCompute, .bytes = 1000, .caller = b_});
  Advance(kSilentTime);
  EXPECT_THAT(ended_, ElementsAre(2));
  for (int n = 0; n < 3; ++n) Advance(seconds(1));
  EXPECT_THAT(ended_, ElementsAre(2, 3));
}

// The caller is above its share, so that its request waits behind the reservation.
TEST_F(CallersTest, RejectsQueuedRequestsThatALongReservationPutsOutOfReach) {
  std::optional<MemoryBudget::Reservation> held = Take(4000);
  const MemoryBudget::Reservation own = TakeFor(a_, 200, kCompute);
  auto reserved = std::async(std::launch::async, [this] { return gate_.ReserveForLong(1000); });
  while (gate_.waiting().depth < 1) std::this_thread::yield();
  Queue(1, {.bytes = kGeneral, .caller = a_});
  held.reset();
  Settle();
  const auto kept = reserved.get();
  ASSERT_TRUE(kept.ok()) << kept.status();
  Settle();
  ASSERT_THAT(served_, ElementsAre(1));
  EXPECT_THAT(std::string(statuses_[0].message()), HasSubstr("at most 3480"));
}

TEST_F(CallersTest, ASilentCallEndsForALongReservation) {
  const MemoryBudget::Reservation first = TakeFor(a_, 2240, kCompute),
                                  second = TakeFor(a_, 2240, kCompute);
  const AdmissionGate::PeerWait wait = Wait(a_, 1, {.compute = true});
  auto reserved =
      std::async(std::launch::async, [this] { return gate_.ReserveForLong(1000).status(); });
  while (gate_.waiting().depth < 1) std::this_thread::yield();
  Advance(kSilentTime);
  EXPECT_THAT(ended_, ElementsAre(1));
  Advance(seconds(8));
  EXPECT_FALSE(reserved.get().ok());
}

// Each takes what is free in ever smaller pieces, and again whatever is released.
TEST_F(CallersTest, CallersThatTakeAllTheyCanLeaveRoomForSmallRequestsOfOthers) {
  for (const AdmissionGate::Share share : {kReceive, kCompute}) {
    std::vector<MemoryBudget::Reservation> held;
    for (int round = 0; round < 10; ++round) {
      for (const Caller& greedy : {a_, b_, gate_.CallerOf("c")}) TakeAll(greedy, share, held);
      EXPECT_EQ(TakeFor(victim_, 40, share).bytes(), 40);
      held.erase(held.begin(), held.begin() + 3);
    }
  }
}

TEST_F(CallersTest, ACallerGetsNoMoreOfTheReservedPartThanItLeaves) {
  const MemoryBudget::Reservation all = TakeFor(a_, kGeneral);
  std::vector<MemoryBudget::Reservation> held;
  for (int n = 0; n < 2; ++n) held.push_back(TakeFor(a_, kSmall));  // 320 of 640
  EXPECT_FALSE(gate_.AdmitNow({.share = kReceive, .bytes = 1, .caller = a_}).has_value());
  held.push_back(TakeFor(b_, kSmall));
  held.erase(held.begin());
  held.push_back(TakeFor(a_, 80));
  EXPECT_FALSE(gate_.AdmitNow({.share = kReceive, .bytes = 1, .caller = a_}).has_value());
}

TEST_F(CallersTest, SmallRequestsThatWaitDelayOnlyTheirOwnCaller) {
  std::vector<MemoryBudget::Reservation> held;
  TakeAll(a_, kReceive, held);
  for (int n = 0; n < 3; ++n) Queue(n, {.share = kReceive, .bytes = kSmall, .caller = a_});
  EXPECT_EQ(TakeFor(b_, kSmall).bytes(), kSmall);
  Queue(3, {.share = kReceive, .bytes = 80, .caller = b_});
  Settle();
  EXPECT_THAT(served_, ElementsAre(3));
  clock_.Advance(seconds(11));
  Settle();
}

TEST_F(CallersTest, ACallerWhoseSilentCallHasEndedIsConfined) {
  std::optional<MemoryBudget::Reservation> first = TakeFor(a_, 2240), second = TakeFor(a_, 2240);
  const AdmissionGate::PeerWait wait = Wait(a_, 1);
  MemoryBudget::Reservation got;
  Queue(1, {.share = kReceive, .bytes = 2000, .caller = b_}, &got);
  Advance(kSilentTime);
  ASSERT_THAT(ended_, ElementsAre(1));
  first.reset();
  Settle();
  ASSERT_EQ(got.bytes(), 2000);
  got = {};
  // Nobody else holds or wants anything now.
  for (int n = 0; n < 3; ++n) {
    EXPECT_FALSE(gate_.AdmitNow({.share = kReceive, .bytes = 1000, .caller = a_}).has_value());
    EXPECT_EQ(TakeFor(b_, 2000).bytes(), 2000);
  }
  EXPECT_EQ(TakeFor(a_, 300).bytes(), 300) << "half of the share is its own";
  EXPECT_EQ(TakeFor(a_, kGeneral, kCompute).bytes(), kGeneral) << "the other share is untouched";
  Queue(2, {.share = kReceive, .bytes = 2240, .caller = a_});
  Advance(seconds(9));
  EXPECT_THAT(served_, ElementsAre(1));
  Advance(seconds(1));
  EXPECT_THAT(served_, ElementsAre(1, 2)) << "refused";
}

TEST_F(CallersTest, AConfinementLastsUntilAMinuteAfterTheLastSilentCall) {
  std::optional<MemoryBudget::Reservation> first = TakeFor(a_, 1000), second = TakeFor(a_, 3000);
  AdmissionGate::PeerWait ended = Wait(a_, 1), stays = Wait(a_, 2);
  Queue(1, {.share = kReceive, .bytes = 2000, .caller = b_});
  Advance(kSilentTime);
  ASSERT_THAT(ended_, ElementsAre(1));
  ended = {};
  second.reset();
  Settle();
  ASSERT_THAT(served_, ElementsAre(1));
  const auto is_confined = [&] {
    return !gate_.AdmitNow({.share = kReceive, .bytes = 2240, .caller = a_}).has_value();
  };
  // The call that stays is within the fair share and silent.
  for (int n = 0; n < 5; ++n) {
    Advance(seconds(AdmissionGate::kConfinedTime) / 2);
    EXPECT_TRUE(is_confined()) << n;
    EXPECT_EQ(TakeFor(b_, 2240).bytes(), 2240) << n;
  }
  // It ends between two looks at it, and another that is not silent begins.
  stays = {};
  first = TakeFor(a_, 500);
  Advance(AdmissionGate::kConfinedTime - seconds(1));
  const AdmissionGate::PeerWait prompt = Wait(a_, 3);
  EXPECT_TRUE(is_confined());
  Advance(seconds(1));
  EXPECT_FALSE(is_confined()) << "memory that is held without silence is harmless";
}

TEST_F(CallersTest, ACallerIsForgottenWhenItsConfinementEnds) {
  Caller caller = gate_.CallerOf("c");
  const std::weak_ptr<CallerMemory> known = caller;
  {
    const MemoryBudget::Reservation first = TakeFor(caller, 2240), second = TakeFor(caller, 2240);
    const AdmissionGate::PeerWait wait = Wait(caller, 1);
    Queue(1, {.share = kReceive, .bytes = 1000, .caller = b_});
    Advance(kSilentTime);
    ASSERT_THAT(ended_, ElementsAre(1));
  }
  Settle();
  caller.reset();
  EXPECT_FALSE(known.expired());
  Advance(AdmissionGate::kConfinedTime);
  EXPECT_EQ(TakeFor(b_, 1000).bytes(), 1000);
  EXPECT_TRUE(known.expired());
}

TEST_F(CallersTest, ACallThatIsConfinedIsServedWhenThatEnds) {
  std::optional<MemoryBudget::Reservation> first = TakeFor(a_, 2240), second = TakeFor(a_, 2240);
  const AdmissionGate::PeerWait wait = Wait(a_, 1);
  Queue(1, {.share = kReceive, .bytes = 1000, .caller = b_});
  Advance(kSilentTime);
  first.reset();
  Settle();
  Advance(AdmissionGate::kConfinedTime - seconds(5));
  Queue(2, {.share = kReceive, .bytes = 2240, .caller = a_});
  Settle();
  EXPECT_THAT(served_, ElementsAre(1));
  Advance(seconds(5));
  EXPECT_THAT(served_, ElementsAre(1, 2));
  EXPECT_TRUE(statuses_[1].ok()) << statuses_[1];
}

TEST_F(CallersTest, ACallersOnlyCallEndsIfItsPeerDoesNotKeepUp) {
  const MemoryBudget::Reservation held = TakeFor(a_, kGeneral);
  AdmissionGate::PeerPace pace;
  pace.Begin(clock_.Now());
  const AdmissionGate::PeerWait wait = gate_.WaitForPeer(
      a_, {.receive = true}, clock_.Now() + kSilentTime, [this] { ended_.push_back(1); }, &pace);
  Queue(1, {.share = kReceive, .bytes = 1000, .caller = b_});
  for (int n = 0; n < 4; ++n) {
    Advance(seconds(1));
    pace.Advance(clock_.Now(), seconds(1));
  }
  pace.Advance(clock_.Now(), seconds(100));  // a burst does not let it rest
  Advance(kSilentTime - milliseconds(1));
  EXPECT_THAT(ended_, IsEmpty());
  Advance(milliseconds(10));
  EXPECT_THAT(ended_, ElementsAre(1));
  clock_.Advance(seconds(11));
  Settle();
}

// Even in parts. Otherwise a message that alone exceeds the fair share would never arrive.
TEST_F(CallersTest, ACallersOnlyCallDoesNotEnd) {
  MemoryBudget::Reservation held = TakeFor(a_, kGeneral);
  const MemoryBudget::Reservation part = held.Split(1000);
  const AdmissionGate::PeerWait wait = Wait(a_, 1);
  Queue(1, {.share = kReceive, .bytes = 1000, .caller = b_});
  for (int n = 0; n < 5; ++n) Advance(seconds(1));
  EXPECT_THAT(ended_, IsEmpty());
  const MemoryBudget::Reservation another = TakeFor(a_, kSmall);
  Advance(seconds(1));
  EXPECT_THAT(ended_, ElementsAre(1));
}

TEST_F(CallersTest, NoCallEndsForItsOwnCaller) {
  const MemoryBudget::Reservation held = TakeFor(a_, kGeneral);
  const MemoryBudget::Reservation small = TakeFor(a_, kSmall);
  const AdmissionGate::PeerWait wait = Wait(a_, 1);
  Queue(1, {.share = kReceive, .bytes = 1000, .caller = a_});
  for (int n = 0; n < 9; ++n) Advance(seconds(1));
  EXPECT_THAT(ended_, IsEmpty());
}

TEST_F(CallersTest, ACallThatIsNoLongerWaitingDoesNotEnd) {
  const MemoryBudget::Reservation held = TakeFor(a_, kGeneral);
  const MemoryBudget::Reservation small = TakeFor(a_, kSmall);
  AdmissionGate::PeerWait wait = Wait(a_, 1);
  Queue(1, {.share = kReceive, .bytes = 1000, .caller = b_});
  wait = {};
  for (int n = 0; n < 9; ++n) Advance(seconds(1));
  EXPECT_THAT(ended_, IsEmpty());
}

TEST_F(CallersTest, ACallerThatFillsTheQueueLeavesRoomForAnother) {
  const MemoryBudget::Reservation held = TakeFor(a_, kGeneral);
  for (int n = 1; n <= 4; ++n) Queue(n, {.share = kReceive, .bytes = 1000, .caller = a_});
  Queue(5, {.share = kReceive, .bytes = 1000, .caller = b_});
  EXPECT_THAT(served_, ElementsAre(4));
  EXPECT_THAT(std::string(statuses_[0].message()), HasSubstr("full with 4 requests"));
  EXPECT_EQ(gate_.waiting().depth, 4);
  clock_.Advance(seconds(11));
  Settle();
}

TEST_F(CallersTest, ACallerThatFillsTheQueueLeavesRoomInTheOtherShareToo) {
  const MemoryBudget::Reservation message = TakeFor(a_, kGeneral),
                                  result = TakeFor(a_, kGeneral, kCompute);
  for (int n = 1; n <= 3; ++n) Queue(n, {.share = kReceive, .bytes = 1000, .caller = a_});
  Queue(4, {.share = kCompute, .bytes = 1000, .caller = b_});
  Queue(5, {.share = kCompute, .bytes = 1000, .caller = b_});
  EXPECT_THAT(served_, ElementsAre(3));
  // Now both callers have two.
  Queue(6, {.share = kCompute, .bytes = 1000, .caller = b_});
  EXPECT_THAT(served_, ElementsAre(3, 6));
  clock_.Advance(seconds(11));
  Settle();
}

// Three callers take, queue, hold in silence and release at random; another one has small calls.
class AdversariesTest : public CallersTest {
 protected:
  struct Call {
    MemoryBudget::Reservation memory;
    AdmissionGate::PeerWait wait;
    std::atomic<bool> is_ended = false;
  };

  void Step() {
    const Caller& caller = adversaries_[rng_() % std::size(adversaries_)];
    const auto share = rng_() % 2 ? kReceive : kCompute;
    const bool is_small = rng_() % 2;
    const auto bytes = static_cast<int64_t>(1 + rng_() % (is_small ? kSmall : kGeneral));
    switch (rng_() % 4) {
      case 0:
      case 1:
        return Ask({.share = share, .bytes = bytes, .priority = rng_() % 3, .caller = caller});
      case 2:
        return ReleaseOne(rng_());
      default:
        return Advance(milliseconds(rng_() % 2000));
    }
  }

  void Ask(const AdmissionGate::MemoryRequest& request) {
    ++asked_;
    const auto on_result = [this, request](AdmissionGate::Result result) {
      ++decided_;
      if (result.ok()) Hold(request, std::move(result->reservation));
    };
    if (auto result = gate_.AdmitNow(request)) return on_result(*std::move(result));
    gate_.Queue(request, on_result);
  }

  void Hold(const AdmissionGate::MemoryRequest& request, MemoryBudget::Reservation memory) {
    EXPECT_EQ(memory.bytes(), request.bytes);
    MutexLock lock(mutex_);  // the timer's thread serves the queue
    Call& call = calls_.emplace_back();
    call.memory = std::move(memory);
    const bool receives = request.share == kReceive;
    call.wait = gate_.WaitForPeer(request.caller, {.receive = receives, .compute = !receives},
                                  clock_.Now() + kSilentTime, [&call] { call.is_ended = true; });
  }

  void ReleaseOne(size_t number) {
    MutexLock lock(mutex_);
    if (!calls_.empty()) calls_.erase(std::next(calls_.begin(), number % calls_.size()));
  }
  void ReleaseEnded() {
    MutexLock lock(mutex_);
    calls_.remove_if([](const Call& call) { return call.is_ended.load(); });
  }
  void ReleaseAll() {
    MutexLock lock(mutex_);
    calls_.clear();
  }

  const Caller adversaries_[3] = {a_, b_, gate_.CallerOf("c")};
  std::mt19937 rng_{7};
  Mutex mutex_;
  std::list<Call> calls_ ABSL_GUARDED_BY(mutex_);
  int asked_ = 0;
  std::atomic<int> decided_ = 0;
};

TEST_F(AdversariesTest, NeitherStopSmallCallsOfOthersNorEachOther) {
  for (int n = 0; n < 3000; ++n) {
    Step();
    for (const auto share : {kReceive, kCompute}) {
      // An eighth of the part for small requests is left by three callers, half of it to this one.
      ASSERT_EQ(TakeFor(victim_, 40, share).bytes(), 40);
      ASSERT_LE(gate_.reserved_bytes(share), kBudget / 2);
    }
    if (rng_() % 8 == 0) ReleaseEnded();
  }
  EXPECT_GT(asked_, 1000);
  ReleaseAll();
  Advance(seconds(10));  // max_queue_delay
  EXPECT_EQ(decided_, asked_);
  EXPECT_EQ(gate_.waiting().depth, 0);
  ReleaseAll();
  EXPECT_EQ(gate_.reserved_bytes(), 0);
  for (const Caller& caller : adversaries_) {
    EXPECT_EQ(caller->receive.held() + caller->receive.held_for_small(), 0);
    EXPECT_EQ(caller->compute.held() + caller->compute.held_for_small(), 0);
  }
}

// Many threads request, wait, hold and release; every request is served and nothing leaks.
TEST(GateThreadsTest, EveryRequestIsServed) {
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
        const AdmissionGate::MemoryRequest request = {
            .share = rng() % 2 ? kReceive : kCompute,
            .bytes = static_cast<int64_t>(rng() % (kGeneral + 1)),
            .priority = rng() % 3};
        if (auto result = gate.AdmitNow(request)) {
          EXPECT_TRUE(result->ok());
          continue;
        }
        std::promise<AdmissionGate::Result> granted;
        gate.Queue(request, [&](AdmissionGate::Result r) { granted.set_value(std::move(r)); });
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
