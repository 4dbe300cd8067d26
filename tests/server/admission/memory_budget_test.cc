#include "server/admission/memory_budget.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

// By default the sanitizers abort where the system's allocator would return null.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace rapt {
namespace {

TEST(MemoryBudgetTest, AReservationReleasesItsBytes) {
  MemoryBudget budget(100);
  {
    const auto first = budget.Reserve(60);
    const auto second = budget.Reserve(40);
    ASSERT_TRUE(first && second);
    EXPECT_EQ(budget.reserved_bytes(), 100);
  }
  EXPECT_EQ(budget.reserved_bytes(), 0);
}

TEST(MemoryBudgetTest, RejectsWhatIsNotFreeNow) {
  MemoryBudget budget(100);
  EXPECT_FALSE(budget.Reserve(101));
  const auto held = budget.Reserve(70);
  ASSERT_TRUE(held);
  EXPECT_FALSE(budget.Reserve(31));
  EXPECT_TRUE(budget.Reserve(30));
}

TEST(MemoryBudgetTest, ReportsEveryRelease) {
  int releases = 0;
  MemoryBudget budget(100, [&releases] { ++releases; });
  std::optional<MemoryBudget::Reservation> held = budget.Reserve(70);
  held->Split(30);
  EXPECT_EQ(releases, 1);
  budget.Reserve(0);
  EXPECT_EQ(releases, 1) << "nothing was released";
  held.reset();
  EXPECT_EQ(releases, 2);
}

TEST(MemoryBudgetTest, SupportsTheWholeRangeOfSizes) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  MemoryBudget budget(kMax);
  const auto all = budget.Reserve(kMax);
  ASSERT_TRUE(all);
  EXPECT_FALSE(budget.Reserve(1));
  EXPECT_FALSE(budget.Reserve(kMax));
}

TEST(MemoryBudgetTest, MovingAReservationMovesItsBytesOnce) {
  MemoryBudget budget(100);
  MemoryBudget::Reservation target = *budget.Reserve(10);
  {
    MemoryBudget::Reservation source = *budget.Reserve(20);
    target = std::move(source);
  }
  EXPECT_EQ(target.bytes(), 20);
  EXPECT_EQ(budget.reserved_bytes(), 20) << "the 10 bytes it held before are free";
}

TEST(MemoryBudgetTest, ASplitReservationIsIndependent) {
  MemoryBudget budget(100);
  std::optional<MemoryBudget::Reservation> whole = *budget.Reserve(100);
  MemoryBudget::Reservation part = whole->Split(30);
  EXPECT_EQ(whole->bytes(), 70);
  whole.reset();
  EXPECT_EQ(part.bytes(), 30);
  EXPECT_EQ(budget.reserved_bytes(), 30);
}

TEST(MemoryBudgetTest, AnAllocationIsChargedForItsLifetime) {
  const SteadyClock clock;
  BufferPool pool(1000, clock);
  MemoryBudget budget(1000);
  {
    const absl::StatusOr<ReservedBuffer> allocated = Allocate(pool, 300, *budget.Reserve(320));
    ASSERT_TRUE(allocated.ok());
    EXPECT_EQ(allocated->buffer.size(), 300);
    EXPECT_EQ(budget.reserved_bytes(), 320);
  }
  EXPECT_EQ(budget.reserved_bytes(), 0);
}

TEST(MemoryBudgetTest, AFailedAllocationIsAStatus) {
  constexpr int64_t kMoreThanAnAddressSpace = int64_t{1} << 60;
  const SteadyClock clock;
  BufferPool pool(kMoreThanAnAddressSpace, clock);
  MemoryBudget budget(kMoreThanAnAddressSpace);
  const absl::Status status =
      Allocate(pool, kMoreThanAnAddressSpace, *budget.Reserve(kMoreThanAnAddressSpace)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget.reserved_bytes(), 0);
}

TEST(MemoryBudgetTest, NeverGrantsMoreThanItHasToManyThreads) {
  constexpr int64_t kCapacity = 1000;
  MemoryBudget budget(kCapacity);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 10000; ++round) {
        const auto held = budget.Reserve(1 + (round * 7 + i) % 600);
        EXPECT_LE(budget.reserved_bytes(), kCapacity);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.reserved_bytes(), 0);
}

}  // namespace
}  // namespace rapt
