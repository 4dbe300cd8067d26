// Attention of many sequences over numbered pages, on every target. A device keeps copies of the
// pages, so each test runs calls one after the other on caches that change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/paged_caches.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

PlanOptions OptionsOf(const Target& target) {
  PlanOptions options = target.Options(2);
  options.has_lanes = true;
  return options;
}

void ExpectConforms(const RaggedCall& call, const PagedCaches& caches) {
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const PagedResult result = RunPaged(call, caches, OptionsOf(target));
    EXPECT_EQ(result.backends, target.backend);
    ExpectMatches(call, caches, result);
  }
}

TEST(RaggedPagesTest, StepsOfSequencesOfAnyLength) {
  for (const DType dtype : kTypes) {
    RaggedCall call = SmallShape(dtype);
    PagedCaches caches(call, 1);
    for (const int64_t tokens : {1, 63, 64, 65, 127, 300}) caches.Add(tokens);
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(absl::StrCat(NameOf(dtype), " step ", step));
      call.items = LastRows(caches, {1, 1, 1, 1, 1, 1});
      ExpectConforms(call, caches);
      for (int64_t n = 0; n < 6; ++n) caches.Append(n, step + 1);
    }
  }
}

TEST(RaggedPagesTest, ChunksOfPrefillsAmongSteps) {
  for (const DType dtype : kTypes) {
    SCOPED_TRACE(NameOf(dtype));
    RaggedCall call = SmallShape(dtype);
    PagedCaches caches(call, 2);
    for (const int64_t tokens : {20, 100, 64, 150, 7}) caches.Add(tokens);
    call.items = LastRows(caches, {20, 1, 30, 5, 1});
    ExpectConforms(call, caches);
    caches.Append(3, 40);
    call.items = LastRows(caches, {0, 1, 0, 40, 7});
    ExpectConforms(call, caches);
  }
}

TEST(RaggedPagesTest, ForksThatGoOnAfterATruncation) {
  RaggedCall call = SmallShape();
  PagedCaches caches(call, 3);
  caches.Add(100);
  caches.Fork(0, 100);
  caches.Fork(0, 90);
  call.items = LastRows(caches, {1, 1, 1});
  ExpectConforms(call, caches);
  for (int64_t n = 0; n < 3; ++n) caches.Append(n, 2);
  call.items = LastRows(caches, {1, 2, 1});
  ExpectConforms(call, caches);
  caches.Truncate(0, 80);
  caches.Append(0, 5);
  call.items = LastRows(caches, {1, 1, 1});
  ExpectConforms(call, caches);
}

TEST(RaggedPagesTest, HeadsAndSizes) {
  constexpr int64_t kHeads[][2] = {{1, 1}, {8, 1}, {6, 2}, {2, 2}};
  constexpr int64_t kSizes[][2] = {{8, 8}, {64, 64}, {128, 128}, {40, 80}, {256, 128}};
  for (const auto& [query_heads, kv_heads] : kHeads) {
    for (const auto& [head_size, value_head_size] : kSizes) {
      SCOPED_TRACE(absl::StrCat(query_heads, "/", kv_heads, " ", head_size, "/", value_head_size));
      RaggedCall call = SmallShape(DType::kBFloat16);
      call.query_heads = query_heads;
      call.kv_heads = kv_heads;
      call.head_size = head_size;
      call.value_head_size = value_head_size;
      call.scale = 0.1;
      PagedCaches caches(call, 4);
      for (const int64_t tokens : {70, 9}) caches.Add(tokens);
      call.items = LastRows(caches, {1, 4});
      ExpectConforms(call, caches);
    }
  }
}

// Tokens that no row sees are NaN, apart from those in a page with others.
TEST(RaggedPagesTest, WindowsOfAnyLength) {
  for (const int64_t window : {0, 30, 63, 64, 100, 191, 400}) {
    SCOPED_TRACE(window);
    RaggedCall call = SmallShape();
    PagedCaches caches(call, 8);
    for (int n = 0; n < 3; ++n) caches.Add(0);
    for (int n = 0; n < 3; ++n) {
      for (int token = 0; token < 64; ++token) {
        caches.AppendNumber(n, window < 130 ? std::nan("") : 1);
      }
      caches.Append(n, 150 + n);
    }
    call.items = LastRows(caches, {1, 20, 1});
    for (RaggedItem& item : call.items) item.left_window = window;
    ExpectConforms(call, caches);
    call.items[2].left_window = -1;
    call.items[2].rows = 0;
    ExpectConforms(call, caches);
  }
}

TEST(RaggedPagesTest, ItemsThatSeeNothing) {
  RaggedCall call = SmallShape();
  PagedCaches caches(call, 5);
  for (const int64_t tokens : {30, 40, 50}) caches.Add(tokens);
  call.items = LastRows(caches, {1, 2, 1});
  call.items[0].position = -1;
  caches.failed = 1;
  ExpectConforms(call, caches);
  call.items[2].position = -5;
  ExpectConforms(call, caches);
}

TEST(RaggedPagesTest, ARowWithinTheTokensOrBeyondThem) {
  RaggedCall call = SmallShape();
  PagedCaches caches(call, 6);
  for (const int64_t tokens : {200, 200}) caches.Add(tokens);
  call.items = LastRows(caches, {1, 1});
  call.items[0].position = 70;
  call.items[1].position = 1000;
  ExpectConforms(call, caches);
}

TEST(RaggedPagesTest, OneItemWithItsHeadsFirst) {
  RaggedCall call = SmallShape();
  PagedCaches caches(call, 7);
  caches.Add(90);
  call.items = LastRows(caches, {5});
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const PagedResult rows_first = RunPaged(call, caches, OptionsOf(target));
    call.heads_first = call.lse_heads_first = true;
    const PagedResult heads_first = RunPaged(call, caches, OptionsOf(target));
    call.heads_first = call.lse_heads_first = false;
    ExpectMatches(call, caches, rows_first);
    ExpectMatches(call, caches, heads_first);
  }
}

}  // namespace
}  // namespace rapt::test
