#include "attention/cudnn/page_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace rapt::cudnn {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kPage = 100;
constexpr int64_t kSegment = 450;  // 4 pages, or 3 where it begins within one
constexpr int64_t kMemory = 16 * kSegment;

// Remembers what it was asked to fill.
struct Filler {
  absl::Status operator()(absl::Span<MissingRows> missing) {
    filled.assign(missing.begin(), missing.end());
    for (MissingRows& rows : missing) {
      rows.is_finite = is_finite;
      rows.copied_bytes = rows.rows - rows.first_row;
    }
    return status;
  }

  std::vector<std::pair<int64_t, int64_t>> Rows() const {
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (const MissingRows& missing : filled) rows.emplace_back(missing.first_row, missing.rows);
    return rows;
  }

  std::vector<MissingRows> filled;
  absl::Status status;
  bool is_finite = true;
};

class PagePoolTest : public ::testing::Test {
 protected:
  absl::StatusOr<PagePool::Lease> Acquire(const std::vector<PageUse>& uses,
                                          int64_t page_bytes = kPage) {
    filler_.filled.clear();
    return pool_.Acquire(page_bytes, uses, std::ref(filler_));
  }

  // Acquires as many pages as fit, with ids from `first_id` on.
  std::vector<PageUse> AllPages(uint64_t first_id, int64_t page_bytes = kPage) const {
    std::vector<PageUse> uses;
    for (int64_t n = 0; n < pool_.CapacityOf(page_bytes); ++n) uses.push_back({first_id++, 64});
    return uses;
  }

  PagePool pool_{kMemory};
  Filler filler_;
};

TEST_F(PagePoolTest, CopiesAPageOnce) {
  ASSERT_TRUE(Acquire({{7, 64}, {8, 10}}).ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(0, 64), std::pair(0, 10)));
  const auto again = Acquire({{8, 10}, {7, 64}});
  ASSERT_TRUE(again.ok());
  EXPECT_THAT(filler_.filled, IsEmpty());
  EXPECT_NE(again->page(0), again->page(1));
  EXPECT_EQ(pool_.counts().hits, 2);
  EXPECT_EQ(pool_.counts().misses, 2);
  EXPECT_EQ(pool_.counts().copied_bytes, 74);
  EXPECT_EQ(pool_.counts().resident_bytes, 2 * kPage);
}

TEST_F(PagePoolTest, CopiesOnlyTheRowsThatWereAdded) {
  ASSERT_TRUE(Acquire({{7, 10}}).ok());
  const int64_t page = Acquire({{7, 10}})->page(0);
  const auto longer = Acquire({{7, 13}});
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(10, 13)));
  EXPECT_EQ(longer->page(0), page);
  EXPECT_EQ(filler_.filled[0].offset, page * kPage);
  ASSERT_TRUE(Acquire({{7, 4}}).ok());
  EXPECT_THAT(filler_.filled, IsEmpty()) << "fewer rows are there";
}

TEST_F(PagePoolTest, CopiesAPageThatSeveralItemsReadOnce) {
  const auto lease = Acquire({{7, 10}, {9, 64}, {7, 12}});
  ASSERT_TRUE(lease.ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(0, 12), std::pair(0, 64)));
  EXPECT_EQ(lease->page(0), lease->page(2));
}

TEST_F(PagePoolTest, PagesDoNotOverlapAndLieInTheMemory) {
  for (const int64_t page_bytes : {int64_t{1}, kPage, int64_t{170}, kSegment / 2}) {
    PagePool pool(kMemory);
    std::vector<PageUse> uses;
    for (int64_t n = 0; n < pool.CapacityOf(page_bytes); ++n) {
      uses.push_back({static_cast<uint64_t>(n) + 1, 1});
    }
    std::map<int64_t, bool> pages;
    const auto lease = pool.Acquire(page_bytes, uses, std::ref(filler_));
    ASSERT_TRUE(lease.ok()) << page_bytes << ": " << lease.status();
    for (size_t n = 0; n < uses.size(); ++n) {
      EXPECT_TRUE(pages.try_emplace(lease->page(n)).second) << "two pages at one place";
      EXPECT_GE(lease->page(n), 0);
      EXPECT_LE((lease->page(n) + 1) * page_bytes, kMemory);
    }
    EXPECT_GT(static_cast<int64_t>(uses.size()) * page_bytes, kMemory / 2);
  }
}

TEST_F(PagePoolTest, ThePageUsedLongestAgoMakesRoom) {
  const std::vector<PageUse> uses = AllPages(100);
  ASSERT_TRUE(Acquire(uses).ok());
  ASSERT_TRUE(Acquire({uses[0]}).ok());
  ASSERT_TRUE(Acquire({{1, 64}}).ok());
  EXPECT_EQ(pool_.counts().evictions, 1);
  ASSERT_TRUE(Acquire({uses[0]}).ok());
  EXPECT_THAT(filler_.filled, IsEmpty()) << "it was used after the second";
  ASSERT_TRUE(Acquire({uses[1]}).ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(0, 64)));
}

TEST_F(PagePoolTest, PagesOfARunStay) {
  const std::vector<PageUse> uses = AllPages(100);
  {
    const auto lease = Acquire(uses);
    ASSERT_TRUE(lease.ok());
    EXPECT_EQ(Acquire({{1, 64}}).status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(Acquire({{1, 64}}, 2 * kPage).status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_TRUE(Acquire({{1, 64}}).ok());
}

TEST_F(PagePoolTest, RefusesMorePagesThanFitAndKeepsNone) {
  std::vector<PageUse> uses = AllPages(100);
  uses.push_back({99, 1});
  EXPECT_EQ(Acquire(uses).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(filler_.filled, IsEmpty());
  EXPECT_TRUE(Acquire(AllPages(1000)).ok()) << "nothing is pinned";
}

TEST_F(PagePoolTest, OldPagesMakeRoomForPagesOfAnotherSize) {
  const std::vector<PageUse> small = AllPages(100);
  ASSERT_TRUE(Acquire(small).ok());
  ASSERT_TRUE(Acquire({{1, 64}}, 2 * kPage).ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(0, 64)));
  ASSERT_TRUE(Acquire({small.back()}).ok());
  EXPECT_THAT(filler_.filled, IsEmpty()) << "only one segment made room";
  ASSERT_TRUE(Acquire(AllPages(1000, 2 * kPage), 2 * kPage).ok());
  ASSERT_TRUE(Acquire(small).ok());
  EXPECT_EQ(filler_.filled.size(), small.size());
}

TEST_F(PagePoolTest, FailedCopiesAreMadeAgain) {
  ASSERT_TRUE(Acquire({{7, 10}}).ok());
  filler_.status = absl::UnavailableError("no device");
  EXPECT_EQ(Acquire({{7, 12}, {8, 64}}).status(), filler_.status);
  filler_.status = absl::OkStatus();
  ASSERT_TRUE(Acquire({{7, 12}, {8, 64}}).ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(10, 12), std::pair(0, 64)));
}

TEST_F(PagePoolTest, RemembersPagesThatAreNotFinite) {
  filler_.is_finite = false;
  EXPECT_EQ(Acquire({{7, 10}}).status().code(), absl::StatusCode::kOutOfRange);
  filler_.is_finite = true;
  EXPECT_EQ(Acquire({{8, 64}, {7, 10}}).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(filler_.filled, IsEmpty());
  EXPECT_TRUE(Acquire({{8, 64}}).ok());
}

// What a run that failed wanted is not copied for the next one.
TEST_F(PagePoolTest, AFailedRunLeavesNoWish) {
  filler_.is_finite = false;
  EXPECT_FALSE(Acquire({{8, 64}}).ok());
  filler_.is_finite = true;
  EXPECT_FALSE(Acquire({{7, 50}, {8, 64}}).ok());
  ASSERT_TRUE(Acquire({{7, 40}}).ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(0, 40)));
}

TEST_F(PagePoolTest, ARunWithAllItsPagesDoesNotWaitForCopiesOfAnother) {
  ASSERT_TRUE(Acquire({{7, 64}}).ok());
  bool acquired = false;
  const auto fill = [&](absl::Span<MissingRows>) {
    std::thread other([&] { acquired = Acquire({{7, 64}}).ok(); });
    other.join();
    return absl::OkStatus();
  };
  ASSERT_TRUE(pool_.Acquire(kPage, {{8, 64}}, fill).ok());
  EXPECT_TRUE(acquired);
}

TEST_F(PagePoolTest, ForgetsAllCopiesOfADeviceThatRestarts) {
  ASSERT_TRUE(Acquire({{7, 10}}).ok());
  pool_.Clear();
  EXPECT_EQ(pool_.counts().resident_bytes, 0);
  ASSERT_TRUE(Acquire({{7, 10}}).ok());
  EXPECT_THAT(filler_.Rows(), ElementsAre(std::pair(0, 10)));
}

// What a fill writes is what a run reads, whatever other runs do at the same time.
TEST_F(PagePoolTest, RunsOfSeveralThreadsReadTheirPages) {
  std::vector<std::atomic<uint64_t>> memory(kMemory / kPage);
  std::atomic<int> wrong{0};
  const auto run = [&](uint64_t seed) {
    for (uint64_t n = 0; n < 2000; ++n) {
      std::vector<PageUse> uses;
      for (uint64_t page = 0; page < 10; ++page) {
        uses.push_back({1 + (seed + n * 7 + page * 3) % 100, 64});
      }
      const auto lease = pool_.Acquire(kPage, uses, [&](absl::Span<MissingRows> missing) {
        for (const MissingRows& rows : missing) {
          memory[static_cast<size_t>(rows.offset / kPage)] = uses[rows.use].id;
        }
        return absl::OkStatus();
      });
      if (!lease.ok()) ++wrong;
      for (size_t use = 0; lease.ok() && use < uses.size(); ++use) {
        if (memory[static_cast<size_t>(lease->page(use))] != uses[use].id) ++wrong;
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t seed : {1, 31, 77}) threads.emplace_back(run, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(pool_.counts().evictions, 0);
}

}  // namespace
}  // namespace rapt::cudnn
