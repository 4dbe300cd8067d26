#include "server/cache/page_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"

namespace rapt::cache {
namespace {

constexpr TokenShape kShape = {.kv_heads = 2, .head_size = 8, .value_head_size = 4};
constexpr int64_t kKeys = 2 * 8;
constexpr int64_t kValues = 2 * 4;

// Keys and values of tokens, as a caller sends them.
struct Tokens {
  std::vector<float> keys, values;

  int64_t count() const { return static_cast<int64_t>(keys.size()) / kKeys; }
  const std::byte* k(int64_t at = 0) const {
    return reinterpret_cast<const std::byte*>(keys.data() + at * kKeys);
  }
  const std::byte* v(int64_t at = 0) const {
    return reinterpret_cast<const std::byte*>(values.data() + at * kValues);
  }
  void Resize(int64_t count) {
    keys.resize(static_cast<size_t>(count * kKeys));
    values.resize(static_cast<size_t>(count * kValues));
  }
  void Add(const Tokens& more) {
    keys.insert(keys.end(), more.keys.begin(), more.keys.end());
    values.insert(values.end(), more.values.begin(), more.values.end());
  }
  bool operator==(const Tokens&) const = default;
};

Tokens RandomTokens(int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  Tokens tokens;
  tokens.Resize(count);
  for (float& x : tokens.keys) x = uniform(random);
  for (float& x : tokens.values) x = uniform(random);
  return tokens;
}

void CopyTokens(const TensorView& view, std::vector<float>& to) {
  const auto& [batch, heads, length, size] = view.dims;
  to.resize(static_cast<size_t>(heads * length * size));
  for (int64_t s = 0; s < length; ++s) {
    for (int64_t h = 0; h < heads; ++h) {
      view.CopyRow(0, h, s, reinterpret_cast<std::byte*>(&to[(s * heads + h) * size]));
    }
  }
}

Tokens Read(const Snapshot& snapshot) {
  Tokens tokens;
  if (snapshot.length() == 0) return tokens;
  CopyTokens(snapshot.keys(), tokens.keys);
  CopyTokens(snapshot.values(), tokens.values);
  return tokens;
}

Tokens Read(const PageList& list) { return Read(list.Take(list.length())); }

// Returns how many pages at the beginning are the same ones.
int64_t SharedPages(const PageList& a, const PageList& b) {
  const Snapshot first = a.Take(a.length()), second = b.Take(b.length());
  const auto pages = first.pages(), others = second.pages();
  return std::mismatch(pages.begin(), pages.end(), others.begin(), others.end()).first -
         pages.begin();
}

void Append(PageList& list, const Tokens& tokens) {
  const absl::Status status = list.Reserve(tokens.count());
  ASSERT_TRUE(status.ok()) << status;
  list.Append(tokens.count(), tokens.k(), tokens.v());
}

class PageListTest : public ::testing::Test {
 protected:
  std::mt19937 random_{3};
  Arena arena_{16 * Arena::kSlabBytes};
};

TEST_F(PageListTest, HoldsWhatWasAppended) {
  PageList list(arena_, kShape);
  Tokens all;
  for (const int64_t count : {0, 1, 62, 1, 1, 64, 200, 0, 63}) {
    const Tokens tokens = RandomTokens(count, random_);
    Append(list, tokens);
    all.Add(tokens);
    EXPECT_EQ(list.length(), all.count());
    EXPECT_EQ(Read(list), all);
  }
  EXPECT_EQ(list.bytes(), 7 * kShape.page_bytes());
  EXPECT_EQ(arena_.used_bytes(), list.bytes());
  for (const int64_t at : {0, 63, 64, 100}) {
    EXPECT_TRUE(list.Holds(at, all.count() - at, all.k(at), all.v(at)));
  }
  EXPECT_FALSE(list.Holds(0, 64, all.k(1), all.v(0)));
  EXPECT_FALSE(list.Holds(0, 64, all.k(0), all.v(1)));
}

TEST_F(PageListTest, ASnapshotKeepsItsTokens) {
  std::optional<Snapshot> snapshot;
  const Tokens tokens = RandomTokens(100, random_);
  {
    PageList list(arena_, kShape);
    Append(list, tokens);
    snapshot = list.Take(100);
    list.Truncate(70);
    Append(list, RandomTokens(200, random_));
    EXPECT_EQ(Read(*snapshot), tokens);
  }
  EXPECT_EQ(Read(*snapshot), tokens);
  EXPECT_EQ(arena_.used_bytes(), 2 * kShape.page_bytes());
  snapshot.reset();
  EXPECT_EQ(arena_.used_bytes(), 0);
}

TEST_F(PageListTest, AForkSharesPagesUntilItAppends) {
  PageList parent(arena_, kShape);
  Append(parent, RandomTokens(130, random_));
  PageList fork = parent.Fork(130);
  EXPECT_EQ(SharedPages(parent, fork), 3);
  EXPECT_EQ(arena_.used_bytes(), 3 * kShape.page_bytes());
  Append(fork, RandomTokens(1, random_));
  EXPECT_EQ(SharedPages(parent, fork), 2);
  EXPECT_EQ(arena_.used_bytes(), 4 * kShape.page_bytes());
  // The parent took the page, so it goes on in place.
  Append(parent, RandomTokens(1, random_));
  EXPECT_EQ(arena_.used_bytes(), 4 * kShape.page_bytes());
  // A fork does not keep what the parent has beyond it.
  PageList short_fork = parent.Fork(64);
  parent.Truncate(0);
  fork.Truncate(0);
  EXPECT_EQ(arena_.used_bytes(), kShape.page_bytes());
}

TEST_F(PageListTest, ForksWriteTokensOfTheirOwnInEveryOrder) {
  for (int order = 0; order < 6; ++order) {
    PageList parent(arena_, kShape);
    const Tokens tokens = RandomTokens(100, random_);
    Append(parent, tokens);
    PageList fork = parent.Fork(90);
    Tokens of_parent = tokens, of_fork = tokens;
    of_fork.Resize(90);
    const auto append_to_parent = [&] {
      const Tokens more = RandomTokens(30, random_);
      Append(parent, more);
      of_parent.Add(more);
    };
    const auto append_to_fork = [&] {
      const Tokens more = RandomTokens(30, random_);
      Append(fork, more);
      of_fork.Add(more);
    };
    const auto truncate_parent = [&] {
      parent.Truncate(80);
      of_parent.Resize(80);
    };
    const int first = order / 2;
    const bool swapped = order % 2 == 1;
    if (first == 0) append_to_parent();
    if (first == 1) append_to_fork();
    if (first == 2) truncate_parent();
    if (first != 0 && !swapped) append_to_parent();
    if (first != 1) append_to_fork();
    if (first != 2) truncate_parent();
    if (first != 0 && swapped) append_to_parent();
    append_to_parent();
    EXPECT_EQ(Read(parent), of_parent);
    EXPECT_EQ(Read(fork), of_fork);
  }
}

TEST_F(PageListTest, ReservedPagesGuaranteeGrowth) {
  PageList list(arena_, kShape);
  ASSERT_TRUE(list.Reserve(1000).ok());
  EXPECT_EQ(list.bytes(), 16 * kShape.page_bytes());
  // Another takes all the rest.
  PageList other(arena_, {.kv_heads = 1, .head_size = 1, .value_head_size = 0});
  int64_t tokens = int64_t{1} << 40;
  while (tokens > 0) {
    if (!other.Reserve(tokens).ok())
      tokens /= 2;
    else
      break;
  }
  Append(list, RandomTokens(999, random_));
  Append(list, RandomTokens(1, random_));
  EXPECT_EQ(list.length(), 1000);
}

TEST_F(PageListTest, ARefusalChangesNothing) {
  PageList list(arena_, kShape);
  const Tokens tokens = RandomTokens(100, random_);
  Append(list, tokens);
  const int64_t used = arena_.used_bytes();
  for (const int64_t count : {int64_t{1} << 30, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(list.Reserve(count).code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(arena_.used_bytes(), used);
  EXPECT_EQ(Read(list), tokens);
}

TEST_F(PageListTest, RandomOperationsEqualAModel) {
  struct Case {
    PageList list;
    Tokens model;
  };
  std::vector<Case> cases;
  std::vector<std::pair<Snapshot, Tokens>> snapshots;
  const auto pick = [this](size_t below) { return random_() % below; };
  for (int n = 0; n < 2000; ++n) {
    if (cases.empty()) cases.push_back({PageList(arena_, kShape), {}});
    Case& one = cases[pick(cases.size())];
    const int64_t some = static_cast<int64_t>(pick(static_cast<size_t>(one.model.count() + 1)));
    Tokens first = one.model;
    switch (pick(7)) {
      case 0:
      case 1:
      case 2: {
        const Tokens tokens = RandomTokens(static_cast<int64_t>(pick(100)), random_);
        Append(one.list, tokens);
        one.model.Add(tokens);
        break;
      }
      case 3:
        one.list.Truncate(some);
        one.model.Resize(some);
        break;
      case 4: {
        first.Resize(some);
        PageList fork = one.list.Fork(some);
        if (cases.size() > 8) cases.erase(cases.begin());
        cases.push_back({std::move(fork), std::move(first)});
        break;
      }
      case 5:
        first.Resize(some);
        snapshots.emplace_back(one.list.Take(some), std::move(first));
        break;
      case 6:
        if (snapshots.empty()) break;
        EXPECT_EQ(Read(snapshots.front().first), snapshots.front().second);
        snapshots.erase(snapshots.begin());
        break;
    }
    const Case& other = cases[pick(cases.size())];
    ASSERT_EQ(Read(other.list), other.model);
  }
  for (const auto& [snapshot, model] : snapshots) EXPECT_EQ(Read(snapshot), model);
  snapshots.clear();
  cases.clear();
  EXPECT_EQ(arena_.used_bytes(), 0);
}

TEST_F(PageListTest, SnapshotsAreReadWhileTheListGrows) {
  PageList list(arena_, kShape);
  const Tokens tokens = RandomTokens(100, random_);
  Append(list, tokens);
  std::vector<std::thread> readers;
  for (int n = 0; n < 2; ++n) {
    readers.emplace_back([snapshot = list.Take(100), &tokens] {
      for (int times = 0; times < 200; ++times) ASSERT_EQ(Read(snapshot), tokens);
    });
  }
  std::mt19937 random(4);
  for (int n = 0; n < 200; ++n) Append(list, RandomTokens(7, random));
  list.Truncate(90);
  Append(list, RandomTokens(7, random));
  for (std::thread& reader : readers) reader.join();
}

// Returns Y of two queries and two query heads over the keys.
std::vector<float> Attend(TensorView keys, TensorView values, bool is_paged) {
  const Problem problem{.batch = 1,
                        .query_heads = 2,
                        .kv_heads = 2,
                        .query_length = 2,
                        .key_length = keys.dims[2],
                        .head_size = 8,
                        .value_head_size = 4};
  const absl::StatusOr<Plan> plan =
      MakePlan(problem, {.threads = 2, .source = is_paged ? Source::kPaged : Source::kStrided});
  EXPECT_TRUE(plan.ok()) << plan.status();
  std::vector<float> queries(2 * 2 * 8, 0.5f), y(2 * 2 * 4);
  Arguments arguments;
  TensorView& q = arguments.inputs[Role::kQ];
  q.data = reinterpret_cast<const std::byte*>(queries.data());
  q.dims = {1, 2, 2, 8};
  q.strides = RowMajorStrides(q.dims);
  arguments.inputs[Role::kK] = keys;
  arguments.inputs[Role::kV] = values;
  MutableTensorView& out = arguments.outputs[Role::kY];
  out.data = reinterpret_cast<std::byte*>(y.data());
  out.dims = {1, 2, 2, 4};
  out.strides = RowMajorStrides(out.dims);
  AlignedBuffer workspace(static_cast<size_t>(plan->workspace_bytes()));
  ThreadPool pool(2);
  const absl::Status status = Run(*plan, arguments, workspace.span(), pool);
  EXPECT_TRUE(status.ok()) << status;
  return y;
}

TEST_F(PageListTest, KernelsReadPagesInPlace) {
  PageList list(arena_, kShape);
  const Tokens tokens = RandomTokens(300, random_);
  Append(list, tokens);
  const Snapshot snapshot = list.Take(300);
  // Tokens are [S, Hkv, D]: strided views of the same rows.
  TensorView keys, values;
  keys.data = tokens.k();
  keys.dims = {1, 2, 300, 8};
  keys.strides = {300 * kKeys, 8, kKeys, 1};
  values.data = tokens.v();
  values.dims = {1, 2, 300, 4};
  values.strides = {300 * kValues, 4, kValues, 1};
  EXPECT_EQ(Attend(snapshot.keys(), snapshot.values(), true), Attend(keys, values, false));
}

// What a device relies on that keeps copies of pages by their numbers.
TEST(PageNumbersTest, EachStandsForOneContent) {
  Arena arena(4 << 20);
  std::mt19937 random(3);
  std::vector<PageList> lists;
  lists.emplace_back(arena, kShape);
  std::map<uint64_t, Tokens> contents;
  for (int n = 0; n < 1000; ++n) {
    size_t chosen = random() % lists.size();
    switch (random() % 5) {
      case 0:
        lists.push_back(
            lists[chosen].Fork(static_cast<int64_t>(random()) % (lists[chosen].length() + 1)));
        chosen = lists.size() - 1;
        break;
      case 1:
        lists[chosen].Truncate(static_cast<int64_t>(random()) % (lists[chosen].length() + 1));
        break;
      case 2:
        if (lists.size() > 5) lists.erase(lists.begin() + static_cast<int64_t>(chosen));
        chosen = 0;
        break;
      default:
        if (lists[chosen].length() < 500) {
          Append(lists[chosen], RandomTokens(static_cast<int64_t>(random() % 100), random));
        }
    }
    const PageList& list = lists[chosen];
    if (list.length() == 0) continue;
    const Snapshot snapshot = list.Take(list.length());
    const Tokens all = Read(snapshot);
    ASSERT_EQ(snapshot.page_ids().size(), snapshot.pages().size());
    for (size_t page = 0; page < snapshot.page_ids().size(); ++page) {
      Tokens& known = contents[snapshot.page_ids()[page]];
      const auto at = static_cast<int64_t>(page) * kPageTokens;
      const int64_t count = std::min(kPageTokens, all.count() - at);
      const int64_t both = std::min(known.count(), count);
      ASSERT_TRUE(std::equal(known.keys.begin(), known.keys.begin() + both * kKeys,
                             all.keys.begin() + at * kKeys));
      ASSERT_TRUE(std::equal(known.values.begin(), known.values.begin() + both * kValues,
                             all.values.begin() + at * kValues));
      if (count <= both) continue;
      known.keys.assign(all.keys.begin() + at * kKeys, all.keys.begin() + (at + count) * kKeys);
      known.values.assign(all.values.begin() + at * kValues,
                          all.values.begin() + (at + count) * kValues);
    }
  }
}

}  // namespace
}  // namespace rapt::cache
