#include "server/cache/cache_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/metric_sink.h"
#include "base/range.h"
#include "tests/support/fake_clock.h"

namespace rapt::cache {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

constexpr TokenShape kToken = {.kv_heads = 1, .head_size = 2, .value_head_size = 1};
constexpr int64_t kPage = 64 * (2 + 1) * 4;

// Tokens that are known by a number: their keys and values.
struct Tokens {
  std::vector<float> keys, values;
};

Tokens TokensOf(const std::vector<int>& numbers) {
  Tokens tokens;
  for (const int n : numbers) {
    tokens.keys.insert(tokens.keys.end(), {static_cast<float>(n), 1});
    tokens.values.push_back(static_cast<float>(-n));
  }
  return tokens;
}

std::vector<int> Read(const Snapshot& snapshot) {
  std::vector<int> numbers;
  for (int64_t s = 0; s < snapshot.length(); ++s) {
    float key[2], value[1];
    snapshot.keys().CopyRow(0, 0, s, reinterpret_cast<std::byte*>(key));
    snapshot.values().CopyRow(0, 0, s, reinterpret_cast<std::byte*>(value));
    EXPECT_EQ(key[0], -value[0]);
    numbers.push_back(static_cast<int>(key[0]));
  }
  return numbers;
}

std::vector<int> Range(int begin, int count) {
  std::vector<int> numbers;
  for (int n = begin; n < begin + count; ++n) numbers.push_back(n);
  return numbers;
}

// A layer in a call, and its new tokens.
struct Part {
  LayerCall call;
  NewTokens tokens;
};

absl::StatusOr<std::vector<AppendResult>> AppendParts(CacheStore& store, const std::string& owner,
                                                      const std::vector<Part>& parts,
                                                      bool partial = false) {
  std::vector<LayerCall> calls;
  std::vector<NewTokens> tokens;
  for (const Part& part : parts) {
    calls.push_back(part.call);
    tokens.push_back(part.tokens);
  }
  const auto batch = store.Open(owner, calls);
  if (!batch.ok()) return batch.status();
  return store.Append(*batch, tokens, partial);
}

class CacheStoreTest : public ::testing::Test {
 protected:
  CacheInfo Create(const std::string& owner = "a", CacheSpec spec = {}) {
    if (spec.shapes.empty()) spec.shapes = {{.layers = 2, .token = kToken}};
    absl::StatusOr<CacheInfo> info = store_.Create(owner, spec);
    EXPECT_TRUE(info.ok()) << info.status();
    return info.ok() ? *info : CacheInfo();
  }

  AppendResult Append(const CacheInfo& cache, std::optional<int64_t> at,
                      const std::vector<int>& numbers, int64_t layer = 0,
                      const std::string& owner = "a") {
    const Tokens tokens = TokensOf(numbers);
    auto results = AppendParts(store_, owner, {PartOf(cache, at, tokens, layer)}, /*partial=*/true);
    if (!results.ok()) return {.status = results.status()};
    return std::move(results->front());
  }

  static Part PartOf(const CacheInfo& cache, std::optional<int64_t> at, const Tokens& tokens,
                     int64_t layer = 0) {
    return {{.cache = cache.id,
             .layer = layer,
             .generation = cache.generation,
             .at = at,
             .count = static_cast<int64_t>(tokens.values.size())},
            {.keys = reinterpret_cast<const std::byte*>(tokens.keys.data()),
             .values = reinterpret_cast<const std::byte*>(tokens.values.data())}};
  }

  std::vector<int> TokensIn(const CacheInfo& cache, int64_t layer = 0) {
    const AppendResult result = Append(cache, std::nullopt, {}, layer);
    EXPECT_TRUE(result.status.ok()) << result.status;
    return result.snapshot ? Read(*result.snapshot) : std::vector<int>();
  }

  static void ExpectFails(const absl::Status& status, absl::StatusCode code, Reason reason) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(NameOf(ReasonOf(status)), NameOf(reason)) << status;
  }

  Arena arena_{4 * Arena::kSlabBytes};
  test::FakeClock clock_;
  CacheStore store_{{.instance = "here:1", .max_caches_per_caller = 50}, arena_, clock_};
};

TEST_F(CacheStoreTest, AppendsAreIdempotentByPosition) {
  const CacheInfo cache = Create();
  EXPECT_FALSE(Append(cache, 0, {1, 2, 3}).applied_before);
  const AppendResult again = Append(cache, 0, {1, 2, 3});
  EXPECT_TRUE(again.status.ok() && again.applied_before);
  EXPECT_TRUE(Append(cache, 3, Range(4, 100)).status.ok());
  // A late duplicate is answered over what it was answered over before.
  const AppendResult late = Append(cache, 1, {2, 3});
  EXPECT_EQ(Read(*late.snapshot), Range(1, 3));
  EXPECT_EQ(late.length, 103);
  ExpectFails(Append(cache, 1, {2, 4}).status, absl::StatusCode::kAborted, Reason::kConflict);
  ExpectFails(Append(cache, 102, {103, 104}).status, absl::StatusCode::kAborted, Reason::kConflict);
  EXPECT_EQ(Append(cache, 104, {1}).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Append(cache, -1, {1}).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Append(cache, std::nullopt, {1}).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Append(cache, 0, {1}, /*layer=*/2).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TokensIn(cache), Range(1, 103));
  EXPECT_TRUE(TokensIn(cache, /*layer=*/1).empty());
}

TEST_F(CacheStoreTest, ATruncationFencesLateAppends) {
  const CacheInfo cache = Create();
  for (const int64_t layer : {0, 1}) ASSERT_TRUE(Append(cache, 0, Range(1, 80), layer).status.ok());
  EXPECT_EQ(store_.Truncate("a", cache.id, 81, 1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(store_.Truncate("a", cache.id, -1, 1).status().code(), absl::StatusCode::kOutOfRange);
  const auto truncated = store_.Truncate("a", cache.id, 70, 1);
  ASSERT_TRUE(truncated.ok());
  EXPECT_EQ(truncated->generation, 2u);
  EXPECT_EQ(truncated->lengths, (std::vector<int64_t>{70, 70}));
  ExpectFails(Append(cache, 70, {71}).status, absl::StatusCode::kAborted, Reason::kGeneration);
  // Sent again, until something is appended.
  EXPECT_EQ(store_.Truncate("a", cache.id, 70, 1)->generation, 2u);
  ASSERT_TRUE(Append(*truncated, 70, {5}).status.ok());
  ExpectFails(store_.Truncate("a", cache.id, 70, 1).status(), absl::StatusCode::kAborted,
              Reason::kGeneration);
  EXPECT_EQ(TokensIn(*truncated).back(), 5);
}

TEST_F(CacheStoreTest, ABatchIsAppliedAsAWholeOrNotAtAll) {
  const CacheInfo one = Create(), two = Create();
  const Tokens good = TokensOf({1, 2}), many = TokensOf(Range(0, 40'000));
  ASSERT_GT(20 * 40'000 / 64 * kPage, arena_.capacity_bytes());
  std::vector<Part> parts = {PartOf(one, 0, good), PartOf(two, 7, good)};
  EXPECT_EQ(AppendParts(store_, "a", parts).status().message(),
            "parts[1]: at is 7; the layer has 0 tokens");
  EXPECT_TRUE(TokensIn(one).empty());
  EXPECT_EQ(arena_.used_bytes(), 0);
  // Pages that were taken for the parts before are given back.
  parts.clear();
  std::vector<CacheInfo> caches;
  for (int n = 0; n < 20; ++n) caches.push_back(Create());
  for (const CacheInfo& cache : caches) parts.push_back(PartOf(cache, 0, many));
  ExpectFails(AppendParts(store_, "a", parts).status(), absl::StatusCode::kResourceExhausted,
              Reason::kPages);
  EXPECT_EQ(arena_.used_bytes(), 0);
  // In part: each has its own status.
  const auto results = AppendParts(store_, "a", parts, /*partial=*/true);
  ASSERT_TRUE(results.ok());
  EXPECT_TRUE(results->front().status.ok());
  ExpectFails(results->back().status, absl::StatusCode::kResourceExhausted, Reason::kPages);
  EXPECT_EQ(AppendParts(store_, "a", std::vector<Part>{parts[0], parts[0]}).status().message(),
            "parts[1]: layer 0 of the cache occurs twice");
}

TEST_F(CacheStoreTest, CreateIsIdempotentByName) {
  const CacheInfo cache = Create("a", {.name = "x"});
  ASSERT_TRUE(Append(cache, 0, {1}).status.ok());
  const CacheInfo same = Create("a", {.name = "x"});
  EXPECT_EQ(same.id, cache.id);
  EXPECT_EQ(same.lengths, (std::vector<int64_t>{1, 0}));
  EXPECT_NE(Create("b", {.name = "x"}).id, cache.id);
  EXPECT_NE(Create().id, Create().id);
  const CacheSpec other = {.name = "x", .shapes = {{.layers = 3, .token = kToken}}};
  EXPECT_EQ(store_.Create("a", other).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(store_.Close("a", {{cache.id}}).ok());
  EXPECT_NE(Create("a", {.name = "x"}).id, cache.id);
}

TEST_F(CacheStoreTest, AForkGoesOnByItself) {
  const CacheInfo parent = Create();
  for (const int64_t layer : {0, 1}) {
    ASSERT_TRUE(Append(parent, 0, Range(0, 100), layer).status.ok());
  }
  ASSERT_TRUE(Append(parent, 100, {100}).status.ok());
  EXPECT_EQ(store_.Fork("a", {.cache = parent.id, .generation = 1, .length = 101}).status().code(),
            absl::StatusCode::kOutOfRange);
  ExpectFails(store_.Fork("a", {.cache = parent.id}).status(), absl::StatusCode::kAborted,
              Reason::kGeneration);
  const ForkSpec spec = {.cache = parent.id, .generation = 1, .name = "fork"};
  const auto fork = store_.Fork("a", spec);
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(fork->lengths, (std::vector<int64_t>{100, 100}));
  EXPECT_EQ(arena_.used_bytes(), 4 * kPage);
  ASSERT_TRUE(Append(*fork, 100, {7}).status.ok());
  ASSERT_TRUE(store_.Close("a", {{parent.id}}).ok());
  std::vector<int> expected = Range(0, 100);
  expected.push_back(7);
  EXPECT_EQ(TokensIn(*fork), expected);
}

TEST_F(CacheStoreTest, AForkIsIdempotentByName) {
  const CacheInfo parent = Create(), other = Create();
  const ForkSpec spec = {.cache = parent.id, .generation = 1, .name = "fork"};
  const auto fork = store_.Fork("a", spec);
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(store_.Fork("a", spec)->id, fork->id);
  ForkSpec longer = spec;
  longer.length = 1;
  EXPECT_FALSE(store_.Fork("a", longer).ok());
  // Also when the other cache has gone on, and is gone.
  ASSERT_TRUE(store_.Truncate("a", parent.id, 0, 1).ok());
  EXPECT_EQ(store_.Fork("a", spec)->id, fork->id);
  ASSERT_TRUE(store_.Close("a", {{parent.id}}).ok());
  EXPECT_EQ(store_.Fork("a", spec)->id, fork->id);
  const ForkSpec of_other = {.cache = other.id, .generation = 1, .name = "fork"};
  EXPECT_EQ(store_.Fork("a", of_other).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(CacheStoreTest, AForkIsNotTheAnswerOnceItsParentHasGrown) {
  const CacheInfo parent = Create("a", {.shapes = {{.token = kToken}}});
  ASSERT_TRUE(Append(parent, 0, Range(0, 3)).status.ok());
  ForkSpec spec = {.cache = parent.id, .generation = 1, .name = "beam"};
  const auto fork = store_.Fork("a", spec);
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(Append(parent, 3, {3}).status.ok());
  EXPECT_EQ(store_.Fork("a", spec).status().code(), absl::StatusCode::kAlreadyExists);
  spec.length = 3;
  EXPECT_EQ(store_.Fork("a", spec)->id, fork->id);
}

TEST_F(CacheStoreTest, AForkNeedsACache) {
  Create("a", {.name = "no fork"});
  EXPECT_EQ(store_.Fork("a", {.name = "no fork"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CacheStoreTest, LeasesEnd) {
  const CacheInfo kept = Create("a", {.lease = minutes(2)});
  const CacheInfo lost = Create("a", {.lease = minutes(2)});
  ASSERT_TRUE(Append(lost, 0, {1, 2}).status.ok());
  const Snapshot running = *Append(lost, std::nullopt, {}).snapshot;
  clock_.Advance(seconds(119));
  ASSERT_TRUE(store_.Renew("a", {{kept.id}}).ok());
  ASSERT_TRUE(store_.Get("a", {{lost.id}}).ok());  // does not renew
  clock_.Advance(seconds(1));
  EXPECT_GT(store_.Expire(), clock_.Now());
  EXPECT_EQ(store_.caches(), 1);
  ExpectFails(Append(lost, 2, {3}).status, absl::StatusCode::kNotFound, Reason::kExpired);
  EXPECT_EQ(Read(running), (std::vector<int>{1, 2}));
  EXPECT_TRUE(Append(kept, 0, {1}).status.ok());
  EXPECT_EQ(Create("a", {.lease = std::chrono::hours(48)}).spec.lease, std::chrono::hours(24));
  EXPECT_EQ(Create().spec.lease, minutes(10));
}

TEST_F(CacheStoreTest, OthersSeeNothingOfACache) {
  const CacheInfo cache = Create();
  ExpectFails(Append(cache, 0, {1}, 0, "b").status, absl::StatusCode::kNotFound, Reason::kUnknown);
  ExpectFails(store_.Fork("b", {.cache = cache.id, .generation = 1}).status(),
              absl::StatusCode::kNotFound, Reason::kUnknown);
  ExpectFails(store_.Truncate("b", cache.id, 0, 1).status(), absl::StatusCode::kNotFound,
              Reason::kUnknown);
  ExpectFails(store_.Close("b", {{cache.id}}).status(), absl::StatusCode::kNotFound,
              Reason::kUnknown);
  EXPECT_TRUE(store_.List("b", 0, "", "")->caches.empty());
  ASSERT_TRUE(store_.Close("a", {{cache.id}}).ok());
  ExpectFails(store_.Get("b", {{cache.id}}).status(), absl::StatusCode::kNotFound,
              Reason::kUnknown);
  ExpectFails(store_.Get("a", {{cache.id}}).status(), absl::StatusCode::kNotFound, Reason::kClosed);
}

TEST_F(CacheStoreTest, SaysWhyACacheIsMissing) {
  const CacheInfo cache = Create();
  CacheStore restarted({.instance = "here:1"}, arena_, clock_);
  CacheStore elsewhere({.instance = "there:1"}, arena_, clock_);
  const auto why = [&](CacheStore& store, const std::string& id) {
    return NameOf(ReasonOf(store.Get("a", {{id}}).status()));
  };
  EXPECT_EQ(why(restarted, cache.id), "restarted");
  EXPECT_EQ(why(elsewhere, cache.id), "wrong_instance");
  for (const std::string& id :
       {std::string(":"), std::string("::"), std::string("x"), std::string(100'000, ':')}) {
    EXPECT_FALSE(why(store_, id).empty());
  }
  EXPECT_EQ(store_.Get("a", {{""}}).status().code(), absl::StatusCode::kInvalidArgument);
  const auto some = store_.Get("a", {{"x", cache.id}});
  ASSERT_TRUE(some.ok());
  EXPECT_EQ(some->caches.front().id, cache.id);
  EXPECT_EQ(some->missing.front().id, "x");
}

TEST_F(CacheStoreTest, ListsInTheOrderOfMaking) {
  std::vector<std::string> ids;
  for (int n = 0; n < 7; ++n) {
    const std::string name = n % 2 == 0 ? "even" : "odd";
    ids.push_back(Create("a", {.name = absl::StrCat(name, n)}).id);
  }
  std::vector<std::string> listed;
  std::string token;
  do {
    const auto page = store_.List("a", 3, token, "");
    ASSERT_TRUE(page.ok());
    for (const CacheInfo& info : page->caches) listed.push_back(info.id);
    token = page->next_page_token;
  } while (!token.empty());
  EXPECT_EQ(listed, ids);
  EXPECT_EQ(store_.List("a", 0, "", "odd")->caches.size(), 3u);
  EXPECT_EQ(store_.List("a", 3, "", "odd")->next_page_token, "");
  EXPECT_FALSE(store_.List("a", -1, "", "").ok());
  EXPECT_FALSE(store_.List("a", 0, "x", "").ok());
}

TEST_F(CacheStoreTest, QuotasHoldForEachCaller) {
  CacheInfo last;
  for (int n = 0; n < 50; ++n) last = Create();
  ExpectFails(store_.Create("a", {.shapes = {{.token = kToken}}}).status(),
              absl::StatusCode::kResourceExhausted, Reason::kQuota);
  // Before a fork looks at what it would copy.
  ExpectFails(store_.Fork("a", {.cache = last.id, .generation = 1, .length = 1}).status(),
              absl::StatusCode::kResourceExhausted, Reason::kQuota);
  Create("b");
  CacheStore small({.instance = "here", .max_bytes_per_caller = 2 * kPage}, arena_, clock_);
  const auto cache = small.Create("a", {.shapes = {{.token = kToken}}, .reserve_tokens = 64});
  ASSERT_TRUE(cache.ok());
  const Tokens tokens = TokensOf(Range(0, 65)), more = TokensOf(Range(65, 64));
  ASSERT_TRUE(AppendParts(small, "a", {PartOf(*cache, 0, tokens)}).ok());
  ExpectFails(AppendParts(small, "a", {PartOf(*cache, 65, more)}).status(),
              absl::StatusCode::kResourceExhausted, Reason::kQuota);
  ExpectFails(small.Fork("a", {.cache = cache->id, .generation = 1}).status(),
              absl::StatusCode::kResourceExhausted, Reason::kQuota);
  ASSERT_TRUE(small.Truncate("a", cache->id, 64, 1).ok());
  EXPECT_TRUE(small.Create("a", {.shapes = {{.token = kToken}}, .reserve_tokens = 64}).ok());
}

TEST_F(CacheStoreTest, EvictsWhatNoLaterRowSees) {
  const CacheInfo cache = Create(
      "a", {.shapes = {{.token = kToken, .keep_first = 70, .keep_last = 100}, {.token = kToken}}});
  ASSERT_TRUE(Append(cache, 0, Range(0, 400)).status.ok());
  EXPECT_EQ(store_.Get("a", {{cache.id}})->caches[0].bytes, 7 * kPage);
  // Rows from token 400 on see tokens from 301 on: pages 2 and 3 have only tokens that are hidden.
  const AppendResult last = Append(cache, 400, {400});
  ASSERT_TRUE(last.status.ok()) << last.status;
  EXPECT_EQ(store_.Get("a", {{cache.id}})->caches[0].bytes, 5 * kPage);
  EXPECT_EQ(store_.Get("a", {{cache.id}})->caches[0].lengths[0], 401);
  // The last call can be sent again, and so can earlier ones.
  EXPECT_TRUE(Append(cache, 400, {400}).applied_before);
  EXPECT_TRUE(Append(cache, 0, Range(0, 400)).applied_before);
  // Only tokens that stay are compared: token 100 is on a page that does.
  std::vector<int> other = Range(0, 400);
  other[130] = -1;
  EXPECT_TRUE(Append(cache, 0, other).applied_before);
  other[100] = -1;
  ExpectFails(Append(cache, 0, other).status, absl::StatusCode::kAborted, Reason::kConflict);
}

TEST_F(CacheStoreTest, WhatNeedsAnEvictedTokenFails) {
  const CacheInfo cache =
      Create("a", {.shapes = {{.token = kToken, .keep_first = 64, .keep_last = 64}}});
  ASSERT_TRUE(Append(cache, 0, Range(0, 300)).status.ok());
  ASSERT_TRUE(Append(cache, 300, Range(300, 100)).status.ok());  // pages 1 and 2 are gone
  const Tokens none;
  const auto attend = [&](TokenRange recent) {
    Part part = PartOf(cache, std::nullopt, none);
    part.tokens.visible = {.first = {0, 64}, .recent = recent};
    return AppendParts(store_, "a", {part}).status();
  };
  EXPECT_TRUE(attend({192, 400}).ok()) << attend({192, 400});
  ExpectFails(attend({191, 400}), absl::StatusCode::kFailedPrecondition, Reason::kEvicted);
  for (const int64_t length : {65, 254}) {
    ExpectFails(store_.Truncate("a", cache.id, length, 1).status(),
                absl::StatusCode::kFailedPrecondition, Reason::kEvicted);
    ExpectFails(store_.Fork("a", {.cache = cache.id, .generation = 1, .length = length}).status(),
                absl::StatusCode::kFailedPrecondition, Reason::kEvicted);
  }
  EXPECT_TRUE(store_.Fork("a", {.cache = cache.id, .generation = 1, .length = 255}).ok());
  const auto truncated = store_.Truncate("a", cache.id, 64, 1);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  EXPECT_EQ(truncated->bytes, kPage);
  EXPECT_TRUE(Append(*truncated, 64, Range(0, 300)).status.ok());
}

// The next row sees only itself, but the other tokens of its page are gone.
TEST_F(CacheStoreTest, ACutThroughAnEvictedPageFails) {
  const CacheInfo cache = Create("a", {.shapes = {{.token = kToken, .keep_last = 1}}});
  ASSERT_TRUE(Append(cache, 0, Range(0, 200)).status.ok());
  ASSERT_TRUE(Append(cache, 200, {200}).status.ok());  // pages 0 to 2 are gone
  ExpectFails(store_.Truncate("a", cache.id, 100, 1).status(),
              absl::StatusCode::kFailedPrecondition, Reason::kEvicted);
  ExpectFails(store_.Fork("a", {.cache = cache.id, .generation = 1, .length = 100}).status(),
              absl::StatusCode::kFailedPrecondition, Reason::kEvicted);
  const auto fork = store_.Fork("a", {.cache = cache.id, .generation = 1, .length = 64});
  const auto truncated = store_.Truncate("a", cache.id, 128, 1);
  for (const auto& [cut, length] : {std::pair{&fork, 64}, std::pair{&truncated, 128}}) {
    ASSERT_TRUE(cut->ok()) << cut->status();
    EXPECT_EQ((*cut)->bytes, 0);
    EXPECT_TRUE(Append(**cut, length, Range(0, 100)).status.ok());
    EXPECT_EQ(store_.Get("a", {{(*cut)->id}})->caches[0].bytes, 2 * kPage);
  }
}

TEST_F(CacheStoreTest, AnEarlierRowOfTheCallKeepsWhatItSees) {
  const CacheInfo cache = Create("a", {.shapes = {{.token = kToken, .keep_last = 10}}});
  ASSERT_TRUE(Append(cache, 0, Range(0, 200)).status.ok());
  const Tokens one = TokensOf({200});
  Part part = PartOf(cache, 200, one);
  part.tokens.first_row = 100;
  part.tokens.visible = {.first = {}, .recent = {91, 201}};
  ASSERT_TRUE(AppendParts(store_, "a", {part}).ok());
  EXPECT_EQ(store_.Get("a", {{cache.id}})->caches[0].bytes, 3 * kPage);
  EXPECT_TRUE(AppendParts(store_, "a", {part})->front().applied_before);
}

TEST_F(CacheStoreTest, AReservationOutlivesATruncation) {
  const int64_t reserve = 4 * Arena::kSlabBytes / kPage * 64;  // most of the arena
  const CacheInfo cache =
      Create("a", {.shapes = {{.token = kToken}}, .reserve_tokens = reserve * 3 / 4 / 64 * 64});
  ASSERT_TRUE(Append(cache, 0, Range(0, 1000)).status.ok());
  const auto truncated = store_.Truncate("a", cache.id, 10, 1);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  EXPECT_GE(truncated->bytes, cache.bytes);
  EXPECT_LE(truncated->bytes, cache.bytes + kPage);
  EXPECT_TRUE(Append(*truncated, 10, Range(0, 1000)).status.ok());
}

TEST_F(CacheStoreTest, CountsWhatForksShare) {
  const CacheInfo cache = Create("a", {.shapes = {{.token = kToken}}});
  ASSERT_TRUE(Append(cache, 0, Range(0, 130)).status.ok());
  const auto fork = store_.Fork("a", {.cache = cache.id, .generation = 1, .length = 128});
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(fork->bytes, 2 * kPage);
  EXPECT_EQ(store_.Get("a", {{fork->id}})->caches[0].shared_bytes, 2 * kPage);
  EXPECT_EQ(store_.List("a", 0, "", "")->caches[1].shared_bytes, 2 * kPage);
  ASSERT_TRUE(store_.Close("a", {{cache.id}}).ok());
  EXPECT_EQ(store_.Get("a", {{fork->id}})->caches[0].shared_bytes, 0);
}

TEST_F(CacheStoreTest, AForkCountsItsTablesOnce) {
  const CacheInfo cache = Create("a", {.shapes = {{.token = kToken}}});
  ASSERT_TRUE(Append(cache, 0, Range(0, 200 * 64)).status.ok());
  const int64_t before = arena_.committed_bytes();
  ASSERT_TRUE(store_.Fork("a", {.cache = cache.id, .generation = 1}).ok());
  const int64_t tables = 200 * kPageTableBytes;
  EXPECT_GE(arena_.committed_bytes() - before, tables);
  EXPECT_LT(arena_.committed_bytes() - before, tables * 3 / 2);
}

// Reads the gauges that a store exports.
class Gauges final : public MetricSink {
 public:
  explicit Gauges(CacheStore& store) { store.ExportTo(*this); }
  void AddGauge(const std::string& name, const std::string&, Labels,
                std::function<double()> read) override {
    reads_[name] = std::move(read);
  }
  void AddCounter(const std::string&, const std::string&, Labels,
                  std::function<double()>) override {}
  int64_t operator()(const std::string& name) const {
    return static_cast<int64_t>(reads_.at("rapt_kv_" + name + "_bytes")());
  }

 private:
  std::map<std::string, std::function<double()>> reads_;
};

TEST_F(CacheStoreTest, GaugesFollowReservedAndSharedPages) {
  const Gauges gauge(store_);
  const CacheInfo cache = Create("a", {.shapes = {{.token = kToken}}, .reserve_tokens = 640});
  EXPECT_EQ(gauge("reserved"), 10 * kPage);
  ASSERT_TRUE(Append(cache, 0, Range(0, 65)).status.ok());
  EXPECT_EQ(gauge("reserved"), 8 * kPage);
  // A batch that fails gives back what it took.
  const CacheInfo other = Create("a", {.shapes = {{.token = kToken}}});
  const Tokens tokens = TokensOf(Range(0, 100));
  EXPECT_FALSE(AppendParts(store_, "a", {PartOf(other, 0, tokens), PartOf(cache, 7, tokens)}).ok());
  EXPECT_EQ(gauge("reserved"), 8 * kPage);
  EXPECT_EQ(gauge("shared"), 0);
  const auto fork = store_.Fork("a", {.cache = cache.id, .generation = 1, .reserve_tokens = 128});
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(gauge("reserved"), 9 * kPage);  // it copies the page in which it goes on
  EXPECT_EQ(gauge("shared"), 2 * kPage);
  const auto truncated = store_.Truncate("a", cache.id, 64, 1);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  EXPECT_EQ(gauge("reserved"), 10 * kPage);
  EXPECT_EQ(gauge("shared"), kPage);
  ASSERT_TRUE(store_.Close("a", {{cache.id}}).ok());
  EXPECT_EQ(gauge("reserved"), kPage);
  EXPECT_EQ(gauge("shared"), 0);
  clock_.Advance(minutes(10));
  EXPECT_EQ(store_.Expire(), Instant::max());
  EXPECT_EQ(gauge("reserved"), 0);
}

TEST_F(CacheStoreTest, RecordsCountTowardsTheLimit) {
  Arena arena(2 * Arena::kSlabBytes);
  CacheStore store({.instance = "here"}, arena, clock_);
  int made = 0;
  absl::StatusOr<CacheInfo> cache;
  do {
    cache = store.Create("a", {.shapes = {{.layers = 1000, .token = kToken}}});
    if (cache.ok()) ++made;
  } while (cache.ok() && made < 1000);
  ExpectFails(cache.status(), absl::StatusCode::kResourceExhausted, Reason::kPages);
  EXPECT_GT(made, 2);
  EXPECT_LT(made, 50);
}

TEST_F(CacheStoreTest, ADrainingServerMakesNoCaches) {
  const CacheInfo cache = Create();
  store_.StopCreating();
  ExpectFails(store_.Create("a", {.shapes = {{.token = kToken}}}).status(),
              absl::StatusCode::kUnavailable, Reason::kDraining);
  ExpectFails(store_.Fork("a", {.cache = cache.id, .generation = 1}).status(),
              absl::StatusCode::kUnavailable, Reason::kDraining);
  EXPECT_TRUE(Append(cache, 0, {1}).status.ok());
}

TEST_F(CacheStoreTest, ARenewedLeaseRunsFromTheLastCall) {
  const CacheInfo cache = Create("a", {.shapes = {{.token = kToken}}, .lease = seconds(10)});
  for (int n = 0; n < 5; ++n) {
    clock_.Advance(seconds(9));
    store_.Expire();
    ASSERT_TRUE(Append(cache, n, {n}).status.ok());
  }
  clock_.Advance(seconds(10));
  EXPECT_EQ(store_.Expire(), Instant::max());
  ExpectFails(Append(cache, 5, {5}).status, absl::StatusCode::kNotFound, Reason::kExpired);
}

TEST_F(CacheStoreTest, RefusesAReservationWhoseBytesOverflow) {
  const TokenShape large = {
      .kv_heads = kMaxHeads, .head_size = kMaxHeadSize, .value_head_size = kMaxHeadSize};
  ExpectFails(
      store_.Create("a", {.shapes = {{.token = large}}, .reserve_tokens = 1 << 20}).status(),
      absl::StatusCode::kResourceExhausted, Reason::kPages);
  EXPECT_TRUE(store_.Create("a", {.shapes = {{.token = kToken}}, .reserve_tokens = 64}).ok());
}

TEST_F(CacheStoreTest, RefusesShapesThatAreNotAllowed) {
  const auto refused = [&](CacheSpec spec) {
    const auto cache = store_.Create("a", spec);
    EXPECT_EQ(cache.status().code(), absl::StatusCode::kInvalidArgument) << cache.status();
  };
  const int64_t most = std::numeric_limits<int64_t>::max();
  refused({});
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, most}) {
    refused({.shapes = {{.layers = bad, .token = kToken}}});
    refused({.shapes = {{.token = {.kv_heads = bad, .head_size = 2, .value_head_size = 1}}}});
    refused({.shapes = {{.token = {.kv_heads = 2, .head_size = bad, .value_head_size = 1}}}});
    refused({.shapes = {{.token = {.kv_heads = 2, .head_size = 1, .value_head_size = bad}}}});
  }
  refused({.name = std::string(257, 'n'), .shapes = {{.token = kToken}}});
  for (const int64_t bad : {int64_t{-1}, int64_t{1} << 62, most - 62, most}) {
    refused({.shapes = {{.token = kToken, .keep_first = bad}}});
    refused({.shapes = {{.token = kToken, .keep_last = bad}}});
    refused({.shapes = {{.token = kToken}}, .first_position = bad});
    refused({.shapes = {{.token = kToken}}, .reserve_tokens = bad});
  }
  refused({.shapes = {{.token = kToken}}, .lease = seconds(-1)});
  ExpectFails(
      store_.Create("a", {.shapes = {{.token = kToken}}, .reserve_tokens = kCounts.most}).status(),
      absl::StatusCode::kResourceExhausted, Reason::kPages);
  EXPECT_EQ(store_.caches(), 0);
}

// Each of the random calls is sent once or twice, some of them late.
TEST_F(CacheStoreTest, RandomCallsEqualAModel) {
  struct Model {
    CacheInfo info;
    std::vector<int> layers[2];
  };
  std::mt19937 random(5);
  const auto pick = [&](size_t below) { return static_cast<int>(random() % below); };
  std::vector<Model> models;
  for (int n = 0; n < 2000; ++n) {
    if (models.size() < 2) models.push_back({Create(), {}});
    Model& model = models[static_cast<size_t>(pick(models.size()))];
    const int layer = pick(2);
    std::vector<int>& tokens = model.layers[layer];
    const int64_t least =
        static_cast<int64_t>(std::min(model.layers[0].size(), model.layers[1].size()));
    switch (pick(6)) {
      case 0:
      case 1:
      case 2: {
        const std::vector<int> more = Range(n, pick(40));
        const auto at = static_cast<int64_t>(tokens.size());
        for (int times = 0; times < 1 + pick(2); ++times) {
          ASSERT_TRUE(Append(model.info, at, more, layer).status.ok());
        }
        tokens.insert(tokens.end(), more.begin(), more.end());
        break;
      }
      case 3: {
        const int64_t keep = pick(static_cast<size_t>(least + 1));
        const CacheInfo before = model.info;
        for (int times = 0; times < 1 + pick(2); ++times) {
          const auto info = store_.Truncate("a", before.id, keep, before.generation);
          ASSERT_TRUE(info.ok());
          model.info = *info;
        }
        for (auto& kept : model.layers) kept.resize(static_cast<size_t>(keep));
        ExpectFails(Append(before, keep, {n}, layer).status, absl::StatusCode::kAborted,
                    Reason::kGeneration);
        break;
      }
      case 4: {
        if (models.size() > 20) break;
        const int64_t keep = pick(static_cast<size_t>(least + 1));
        const auto fork = store_.Fork(
            "a", {.cache = model.info.id, .generation = model.info.generation, .length = keep});
        ASSERT_TRUE(fork.ok()) << fork.status();
        Model forked = {*fork, {model.layers[0], model.layers[1]}};
        for (auto& kept : forked.layers) kept.resize(static_cast<size_t>(keep));
        models.push_back(std::move(forked));
        break;
      }
      case 5:
        if (models.size() < 10) break;
        ASSERT_TRUE(store_.Close("a", {{model.info.id}}).ok());
        std::swap(model, models.back());
        models.pop_back();
        continue;
    }
    const Model& other = models[static_cast<size_t>(pick(models.size()))];
    for (const int64_t l : {0, 1}) ASSERT_EQ(TokensIn(other.info, l), other.layers[l]);
  }
  for (const Model& model : models) ASSERT_TRUE(store_.Close("a", {{model.info.id}}).ok());
  EXPECT_EQ(arena_.used_bytes(), 0);
}

TEST_F(CacheStoreTest, ThreadsShareCaches) {
  const CacheInfo one = Create(), two = Create();
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (int n = 0; n < 100; ++n) {
        // All write the same tokens: the first is applied, and the others find them.
        const Tokens tokens = TokensOf({n});
        const std::vector<Part> parts = {PartOf(id % 2 == 0 ? one : two, n, tokens),
                                         PartOf(id % 2 == 0 ? two : one, n, tokens)};
        const auto results = AppendParts(store_, "a", parts);
        ASSERT_TRUE(results.ok()) << results.status();
        ASSERT_EQ(Read(*results->back().snapshot), Range(0, n + 1));
        const auto fork = store_.Fork("a", {.cache = one.id, .generation = 1});
        ASSERT_TRUE(fork.ok()) << fork.status();
        ASSERT_TRUE(store_.Close("a", {{fork->id}}).ok());
        ASSERT_TRUE(store_.Get("a", {{one.id, two.id}}).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(TokensIn(one), Range(0, 100));
}

}  // namespace
}  // namespace rapt::cache
