#include "server/cache/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace rapt::cache {
namespace {

constexpr int64_t kSlab = Arena::kSlabBytes;

void Fill(const Arena::Page& page, int value) {
  std::memset(page.bytes().data(), value, page.bytes().size());
}

bool IsFilled(const Arena::Page& page, int value) {
  return std::all_of(page.bytes().begin(), page.bytes().end(),
                     [value](std::byte b) { return b == static_cast<std::byte>(value); });
}

TEST(ArenaTest, PagesAreSeparateAndAligned) {
  Arena arena(4 * kSlab);
  // Pages of this size lie across the boundaries of slabs.
  const auto pages = arena.Take(kSlab / 3 + 1, 9);
  ASSERT_TRUE(pages.ok()) << pages.status();
  for (size_t n = 0; n < pages->size(); ++n) {
    const Arena::Page& page = (*pages)[n];
    EXPECT_EQ(reinterpret_cast<uintptr_t>(page.bytes().data()) % Arena::kPageAlignment, 0u);
    EXPECT_GE(static_cast<int64_t>(page.bytes().size()), kSlab / 3 + 1);
    Fill(page, static_cast<int>(n));
  }
  for (size_t n = 0; n < pages->size(); ++n)
    EXPECT_TRUE(IsFilled((*pages)[n], static_cast<int>(n)));
}

TEST(ArenaTest, NoPageSizeWastesMemory) {
  for (const int64_t page_bytes : {int64_t{64}, kSlab / 2 + 64, kSlab, 3 * kSlab / 2}) {
    Arena arena(16 * kSlab);
    const int64_t count = 12 * kSlab / page_bytes;
    const auto pages = arena.Take(page_bytes, count);
    ASSERT_TRUE(pages.ok()) << pages.status();
    EXPECT_EQ(arena.used_bytes(), count * page_bytes);
    EXPECT_LE(arena.committed_bytes() - arena.used_bytes(), kSlab);
  }
}

TEST(ArenaTest, RefusesWithNeededAndFreeBytes) {
  Arena arena(4 * kSlab + 100);
  EXPECT_EQ(arena.capacity_bytes(), 4 * kSlab);
  const auto held = arena.Take(kSlab / 2, 5);
  ASSERT_TRUE(held.ok());
  const auto refused = arena.Take(kSlab / 2, 4);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(), "needs 4194304 bytes of pages, 3145728 are free");
  EXPECT_EQ(arena.used_bytes(), 5 * kSlab / 2);
  EXPECT_TRUE(arena.Take(kSlab / 2, 3).ok());
  // Pages of another size can't use the rest of a slab in use.
  EXPECT_EQ(arena.Take(kSlab, 2).status().message(),
            "needs 4194304 bytes of pages, 2097152 are free");
}

TEST(ArenaTest, RefusesCountsOfAnySize) {
  Arena arena(4 * kSlab);
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (const auto& [page_bytes, count] :
       std::vector<std::pair<int64_t, int64_t>>{{1, most}, {most, 1}, {most, most}, {kSlab, 5}}) {
    EXPECT_EQ(arena.Take(page_bytes, count).status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(arena.used_bytes(), 0);
    EXPECT_EQ(arena.committed_bytes(), 0);
  }
  EXPECT_TRUE(arena.Take(64, 0)->empty());
  Arena none(kSlab - 1);
  EXPECT_FALSE(none.Take(64, 1).ok());
}

TEST(ArenaTest, MemoryServesAnotherPageSizeOnceItIsFree) {
  Arena arena(4 * kSlab);
  {
    const auto small = arena.Take(4096, 4 * kSlab / 4096);
    ASSERT_TRUE(small.ok());
    for (const Arena::Page& page : *small) Fill(page, 1);
    EXPECT_FALSE(arena.Take(kSlab, 1).ok());
  }
  EXPECT_EQ(arena.committed_bytes(), 0);
  const auto large = arena.Take(kSlab, 4);
  ASSERT_TRUE(large.ok());
  // The system has taken the memory back meanwhile.
  for (const Arena::Page& page : *large) EXPECT_TRUE(IsFilled(page, 0));
}

// A record of a few bytes costs pages a whole slab.
TEST(ArenaTest, WhatIsFreeForPagesIsWholeSlabs) {
  Arena arena(2 * kSlab);
  const auto record = arena.TryCharge(1);
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(arena.Take(kSlab / 4, 5).status().message(),
            "needs 2621440 bytes of pages, 2097152 are free");
  EXPECT_TRUE(arena.Take(kSlab / 4, 4).ok());
}

TEST(ArenaTest, FillsGapsInSlabsInUseBeforeNewSlabs) {
  Arena arena(2 * kSlab);
  auto pages = arena.Take(kSlab / 4, 8);
  ASSERT_TRUE(pages.ok());
  pages->erase(pages->begin(), pages->begin() + 5);  // frees the first slab, and one page
  EXPECT_EQ(arena.committed_bytes(), kSlab);
  const auto other = arena.Take(kSlab, 1);
  ASSERT_TRUE(other.ok());
  // The places of the first slab are free, but it has no memory.
  const auto one = arena.Take(kSlab / 4, 1);
  EXPECT_TRUE(one.ok()) << one.status();
  EXPECT_FALSE(arena.Take(kSlab / 4, 1).ok());
}

TEST(ArenaTest, RandomPagesKeepTheirContentWithinTheLimit) {
  Arena arena(32 * kSlab);
  std::mt19937 random(7);
  struct Held {
    Arena::Page page;
    int value;
  };
  std::vector<Held> held;
  const int64_t sizes[] = {4096, 100'000, kSlab / 2 + 64, kSlab, 5 * kSlab / 2};
  for (int n = 0; n < 2000; ++n) {
    if (random() % 2 == 0 || held.empty()) {
      auto pages = arena.Take(sizes[random() % std::size(sizes)], 1 + random() % 4);
      if (!pages.ok()) continue;
      for (Arena::Page& page : *pages) {
        const int value = static_cast<int>(random() % 251);
        Fill(page, value);
        held.push_back({std::move(page), value});
      }
    } else {
      const size_t which = random() % held.size();
      EXPECT_TRUE(IsFilled(held[which].page, held[which].value));
      std::swap(held[which], held.back());
      held.pop_back();
    }
    EXPECT_LE(arena.used_bytes(), arena.committed_bytes());
    ASSERT_LE(arena.committed_bytes(), arena.capacity_bytes());
  }
  held.clear();
  EXPECT_EQ(arena.used_bytes(), 0);
  EXPECT_EQ(arena.committed_bytes(), 0);
}

TEST(ArenaTest, ThreadsTakeAndGiveBackAtOnce) {
  Arena arena(8 * kSlab);
  std::vector<std::thread> threads;
  for (int value = 1; value <= 4; ++value) {
    threads.emplace_back([&arena, value] {
      for (int n = 0; n < 200; ++n) {
        const auto pages = arena.Take(value % 2 == 0 ? 65536 : 100'000, 3);
        if (!pages.ok()) continue;
        for (const Arena::Page& page : *pages) Fill(page, value);
        for (const Arena::Page& page : *pages) EXPECT_TRUE(IsFilled(page, value));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena.committed_bytes(), 0);
}

}  // namespace
}  // namespace rapt::cache
