// rapt.v1.CacheService of the real rapt-server, compared with a model in float64.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "tests/support/cache_caller.h"
#include "tests/support/cache_model.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// A server's memory stays within its budgets and this.
constexpr int64_t kOtherBytes = 128 << 20;
constexpr int64_t kSuiteCacheBytes = 64 << 20, kSuiteBudgetBytes = 256 << 20;

struct CacheModel {
  v1::Cache info;
  std::vector<LayerModel> layers;

  int64_t shortest() const {
    int64_t least = layers[0].tokens.count();
    for (const LayerModel& layer : layers) least = std::min(least, layer.tokens.count());
    return least;
  }
};

class CacheServiceTest : public ::testing::Test, protected CacheCaller {
 protected:
  static void SetUpTestSuite() {
    server_ = new ServerProcess({"--threads=2", absl::StrCat("--kv_cache_bytes=", kSuiteCacheBytes),
                                 absl::StrCat("--memory_budget_bytes=", kSuiteBudgetBytes),
                                 "--instance_name=me", "--grace_period=0s"});
    memory_ = new MemoryWatch(server_->pid());
  }
  static void TearDownTestSuite() {
    if (kRssIsMeaningful) {
      EXPECT_LE(memory_->peak(), kSuiteCacheBytes + kSuiteBudgetBytes + kOtherBytes);
    }
    delete memory_;
    delete server_;
  }

  void SetUp() override { stub_ = StubOf(*server_); }

  // Random operations on up to 12 caches, compared with models of them.
  void RunRandomOperations(int operations, v1::Storage storage);

  static ServerProcess* server_;
  static MemoryWatch* memory_;
};

ServerProcess* CacheServiceTest::server_ = nullptr;
MemoryWatch* CacheServiceTest::memory_ = nullptr;

TEST_F(CacheServiceTest, AStepAppendsAndAttends) {
  Rng rng(1);
  const v1::Cache cache = CreateCache();
  EXPECT_THAT(cache.id(), HasSubstr("me:"));
  EXPECT_EQ(cache.generation(), 1u);
  LayerModel layer{RandomTokens(200, rng)};
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(cache, 1, 0, layer.tokens), appended).ok());
  EXPECT_EQ(appended.results(0).length(), 200);
  for (int64_t n = 200; n < 210; ++n) {
    const Tokens next = RandomTokens(1, rng);
    const v1::AttendCachedRequest request = [&] {
      v1::AttendCachedRequest r = AttendOf(cache, 1, n, next, 1, rng);
      r.set_want_lse(true);
      return r;
    }();
    layer.tokens.Add(next);
    v1::AttendCachedResponse response;
    const grpc::Status status = Attend(request, response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.items(0).length(), n + 1);
    EXPECT_FALSE(response.items(0).applied_before());
    const std::vector<float> q = Values(request.q());
    const Answer want = Define(layer, n + 1, 0, n, 1, q.data(), {});
    ExpectClose(response.y(), want.y, "y");
    ExpectClose(response.lse(), want.lse, "lse");
    EXPECT_THAT(response.plan(), HasSubstr("cpu/"));
    // Sent again, as after a lost reply: the same bits.
    v1::AttendCachedResponse again;
    ASSERT_TRUE(Attend(request, again).ok());
    EXPECT_TRUE(again.items(0).applied_before());
    EXPECT_EQ(again.y().data(), response.y().data());
    EXPECT_EQ(again.lse().data(), response.lse().data());
  }
}

void CacheServiceTest::RunRandomOperations(int operations, v1::Storage storage) {
  Rng rng(20261124);
  std::vector<CacheModel> caches;
  int64_t attended = 0, aborted = 0;
  for (int n = 0; n < operations; ++n) {
    SCOPED_TRACE(absl::StrCat("operation ", n));
    const int64_t kind = caches.empty() ? 0 : UniformInt(rng, 0, 20);
    if (kind == 0 && caches.size() < 12) {
      v1::CreateRequest request = CreateOf(1);
      request.set_storage(storage);
      *request.add_shapes() = request.shapes(0);
      request.set_first_position(UniformInt(rng, 0, 1) * 1000);
      if (UniformInt(rng, 0, 1) == 1) {
        request.mutable_shapes(1)->set_keep_last(UniformInt(rng, 1, 200));
        request.mutable_shapes(1)->set_keep_first(UniformInt(rng, 0, 1) * 1100);
      }
      CacheModel model{CreateCache(request), {}};
      for (const v1::LayerShape& shape : request.shapes()) {
        model.layers.push_back({{}, shape.keep_first(), shape.keep_last()});
      }
      caches.push_back(std::move(model));
      continue;
    }
    if (caches.empty()) continue;
    CacheModel& cache =
        caches[static_cast<size_t>(UniformInt(rng, 0, static_cast<int64_t>(caches.size()) - 1))];
    if (kind == 1 && caches.size() < 12) {
      v1::ForkRequest request;
      request.set_cache(cache.info.id());
      request.set_generation(cache.info.generation());
      request.set_length(UniformInt(rng, 0, cache.shortest()));
      v1::Cache fork;
      const grpc::Status status = Call(&v1::CacheService::Stub::Fork, request, fork);
      if (status.error_code() == StatusCode::FAILED_PRECONDITION) continue;  // evicted
      ASSERT_TRUE(status.ok()) << status.error_message();
      CacheModel model = cache;
      model.info = fork;
      for (LayerModel& layer : model.layers) layer.tokens.Resize(request.length());
      caches.push_back(std::move(model));
    } else if (kind == 2) {
      v1::TruncateRequest request;
      request.set_cache(cache.info.id());
      request.set_generation(cache.info.generation());
      request.set_length(UniformInt(rng, 0, cache.shortest()));
      const v1::Cache before = cache.info;
      v1::Cache truncated;
      const grpc::Status status = Call(&v1::CacheService::Stub::Truncate, request, truncated);
      if (status.error_code() == StatusCode::FAILED_PRECONDITION) continue;
      ASSERT_TRUE(status.ok()) << status.error_message();
      ASSERT_EQ(truncated.generation(), before.generation() + 1);
      cache.info = truncated;
      for (LayerModel& layer : cache.layers) layer.tokens.Resize(request.length());
      // A late append is fenced.
      v1::AppendResponse response;
      ExpectFails(Append(AppendOf(before, 0, request.length(), RandomTokens(1, rng)), response),
                  StatusCode::ABORTED, "generation");
      ++aborted;
    } else if (kind == 3 && caches.size() > 4) {
      v1::Ids ids;
      ids.add_caches(cache.info.id());
      v1::Caches closed;
      ASSERT_TRUE(Call(&v1::CacheService::Stub::Close, ids, closed).ok());
      EXPECT_EQ(closed.caches(0).lengths(0), cache.layers[0].tokens.count());
      ExpectFails(Call(&v1::CacheService::Stub::Get, ids, closed), StatusCode::NOT_FOUND, "closed");
      std::swap(cache, caches.back());
      caches.pop_back();
    } else if (kind == 20 && caches.size() < 12) {
      // As a step of beams: a cache has a fork and is cut, and the last one ends, perhaps the same.
      v1::UpdateRequest request;
      v1::ForkRequest& fork = *request.add_forks();
      fork.set_cache(cache.info.id());
      fork.set_generation(cache.info.generation());
      fork.set_length(UniformInt(rng, 0, cache.shortest()));
      fork.set_name(absl::StrCat("beam ", storage, " ", n));
      v1::TruncateRequest& truncate = *request.add_truncates();
      truncate.set_cache(fork.cache());
      truncate.set_generation(fork.generation());
      truncate.set_length(fork.length());
      request.add_closes(caches.back().info.id());
      v1::UpdateResponse first, again;
      ASSERT_TRUE(Call(&v1::CacheService::Stub::Update, request, first).ok());
      ASSERT_TRUE(Call(&v1::CacheService::Stub::Update, request, again).ok());  // a lost reply
      if (first.forks(0).code() != 0) {
        ASSERT_EQ(first.forks(0).reason(), "evicted");
        ASSERT_EQ(first.truncates_size() + first.closes_size(), 0);
        continue;
      }
      EXPECT_EQ(again.forks(0).cache().id(), first.forks(0).cache().id());
      ASSERT_EQ(first.closes(0).cache().id(), request.closes(0));
      CacheModel model = cache;
      model.info = first.forks(0).cache();
      ASSERT_EQ(first.truncates_size(), 1);
      cache.info = first.truncates(0).cache();
      for (CacheModel* cut : {&model, &cache}) {
        for (LayerModel& layer : cut->layers) layer.tokens.Resize(fork.length());
      }
      caches.back() = std::move(model);
    } else if (kind < 8) {
      const auto layer = static_cast<int>(UniformInt(rng, 0, 1));
      Tokens& tokens = cache.layers[layer].tokens;
      const Tokens more = RandomTokens(UniformInt(rng, 0, 150), rng);
      const v1::AppendRequest request = AppendOf(cache.info, layer, tokens.count(), more);
      v1::AppendResponse response;
      for (int64_t times = UniformInt(rng, 1, 2); times > 0; --times) {
        const grpc::Status status = Append(request, response);
        ASSERT_TRUE(status.ok()) << status.error_message();
      }
      tokens.Add(Stored(more, storage));
      ASSERT_EQ(response.results(0).length(), tokens.count());
      if (more.count() == 0) continue;
      // Other tokens at the same place.
      Tokens other = more;
      other.values.back() += 1;
      if (cache.layers[layer].keep_last > 0) continue;  // evicted tokens count as the same
      ExpectFails(
          Append(AppendOf(cache.info, layer, tokens.count() - more.count(), other), response),
          StatusCode::ABORTED, "conflict");
      ++aborted;
    } else {
      // A ragged batch over some caches.
      const auto layer = static_cast<int>(UniformInt(rng, 0, 1));
      v1::AttendCachedRequest request;
      request.set_layer(layer);
      request.set_want_lse(true);
      std::optional<int64_t> left;
      if (UniformInt(rng, 0, 4) == 0) request.mutable_window()->set_left(*(left = 20));
      Tokens all;
      std::vector<float> q;
      Answer want;
      std::vector<std::pair<CacheModel*, Tokens>> parts;
      for (CacheModel& each : caches) {
        if (UniformInt(rng, 0, 1) == 0) continue;
        LayerModel& model = each.layers[layer];
        v1::Item& item = *request.add_items();
        item.set_cache(each.info.id());
        item.set_generation(each.info.generation());
        const Tokens more = RandomTokens(UniformInt(rng, 0, 1) * UniformInt(rng, 1, 20), rng);
        int64_t rows = more.count() == 0 ? 1 : UniformInt(rng, 0, more.count());
        item.set_rows(static_cast<int>(rows));
        item.set_new_tokens(static_cast<int>(more.count()));
        item.set_at(model.tokens.count());
        all.Add(more);
        parts.emplace_back(&each, more);
        LayerModel after = model;
        after.tokens.Add(Stored(more, storage));
        const std::vector<float> own = Random(rows * kQueryHeads * kHeadSize, rng);
        const int64_t length = after.tokens.count();
        const int64_t first = each.info.first_position();
        const Answer answer =
            Define(after, length, first, first + length - rows, rows, own.data(), left);
        want.y.insert(want.y.end(), answer.y.begin(), answer.y.end());
        want.lse.insert(want.lse.end(), answer.lse.begin(), answer.lse.end());
        q.insert(q.end(), own.begin(), own.end());
      }
      if (request.items().empty()) continue;
      if (!q.empty()) {
        *request.mutable_q() = ToMessage(
            q,
            {static_cast<int64_t>(q.size()) / (kQueryHeads * kHeadSize), kQueryHeads, kHeadSize});
      }
      if (all.count() > 0) {
        *request.mutable_k() = all.k();
        *request.mutable_v() = all.v();
      }
      v1::AttendCachedResponse response;
      for (int64_t times = UniformInt(rng, 1, 2); times > 0; --times) {
        const grpc::Status status = Attend(request, response);
        ASSERT_TRUE(status.ok()) << status.error_message();
      }
      for (auto& [each, more] : parts) each->layers[layer].tokens.Add(Stored(more, storage));
      ExpectClose(response.y(), want.y, "y");
      ExpectClose(response.lse(), want.lse, "lse");
      ++attended;
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(attended, 800);
  EXPECT_GT(aborted, 200);
  v1::ListRequest list;
  v1::Caches listed;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::List, list, listed).ok());
  for (const CacheModel& cache : caches) {
    const auto found = std::find_if(listed.caches().begin(), listed.caches().end(),
                                    [&](const v1::Cache& c) { return c.id() == cache.info.id(); });
    ASSERT_NE(found, listed.caches().end());
    for (int layer : {0, 1}) {
      EXPECT_EQ(found->lengths(layer), cache.layers[layer].tokens.count());
    }
  }
}

TEST_F(CacheServiceTest, TwoThousandRandomOperationsMatchTheModel) {
  RunRandomOperations(2000, v1::STORAGE_PLAIN);
}

TEST_F(CacheServiceTest, TwoThousandRandomOperationsInEightBitsMatchTheModel) {
  RunRandomOperations(2000, v1::STORAGE_INT8);
}

TEST_F(CacheServiceTest, RefusesWhatIsNotAllowedAndSaysWhy) {
  Rng rng(2);
  const v1::Cache cache = CreateCache();
  const Tokens two = RandomTokens(2, rng);
  const v1::AttendCachedRequest good = AttendOf(cache, 0, 0, two, 2, rng);
  const auto refusal = [&](const std::function<void(v1::AttendCachedRequest&)>& change) {
    v1::AttendCachedRequest request = good;
    change(request);
    v1::AttendCachedResponse response;
    const grpc::Status status = Attend(request, response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status.error_message();
  };
  using R = v1::AttendCachedRequest;
  EXPECT_EQ(refusal([](R& r) { r.clear_items(); }), "items has 0 entries; it must have 1 to 1024");
  EXPECT_EQ(refusal([](R& r) { r.mutable_items(0)->set_rows(-1); }),
            "items[0]: rows is -1; it must be in [0, 2^62)");
  EXPECT_EQ(refusal([](R& r) { r.mutable_items(0)->set_new_tokens(-1); }),
            "items[0]: new_tokens is -1; it must be in [0, 2^62)");
  EXPECT_EQ(refusal([](R& r) {
              r.mutable_items(0)->set_rows(0);
              r.mutable_items(0)->set_new_tokens(0);
            }),
            "items[0]: rows and new_tokens are both 0; an item needs one of them");
  EXPECT_EQ(refusal([](R& r) { r.mutable_items(0)->clear_at(); }),
            "items[0]: at is absent; new tokens need it");
  EXPECT_EQ(refusal([](R& r) { r.mutable_items(0)->set_position(-1); }),
            "items[0]: position is -1; it must be in [0, 2^62)");
  EXPECT_EQ(refusal([](R& r) { r.set_layer(2); }), "items[0]: layer is 2; the cache has 2 layers");
  EXPECT_EQ(refusal([](R& r) { *r.add_items() = r.items(0); }),
            "items[1]: layer 0 of the cache occurs twice");
  EXPECT_EQ(refusal([](R& r) { r.clear_q(); }), "q is absent; the items need [2, 2, 8]");
  EXPECT_EQ(refusal([](R& r) { r.clear_v(); }), "v is absent; the items need [2, 2, 6]");
  EXPECT_EQ(refusal([](R& r) { r.mutable_items(0)->set_rows(1); }),
            "q has shape [2, 4, 8]; the items and their caches need [1, 4, 8]");
  EXPECT_EQ(refusal([](R& r) { *r.mutable_q()->mutable_shape()->Mutable(1) = 3; }),
            "q has 256 bytes of data; its shape [2, 3, 8] of FP32 needs 192");
  EXPECT_EQ(refusal([](R& r) { r.set_scale(kInfinity); }),
            "scale is inf; it must be finite, or absent for 1 / sqrt(D)");
  EXPECT_EQ(refusal([](R& r) { r.set_softcap(-2); }),
            "softcap is -2; it must be finite and at least 0");
  EXPECT_EQ(refusal([](R& r) { r.mutable_window()->set_left(-1); }),
            "window.left is -1; it must be at least 0, or absent");
  EXPECT_EQ(refusal([](R& r) { r.mutable_window()->set_right(-1); }),
            "window.right is -1; it must be at least 0, or absent");
  EXPECT_EQ(refusal([](R& r) { r.set_output(v1::FP16); }),
            "output is FP16; it must be the caches' FP32");
  EXPECT_THAT(refusal([](R& r) { r.set_share_prefix(static_cast<v1::SharePrefix>(7)); }),
              HasSubstr("share_prefix is 7"));
  v1::AttendCachedResponse response;
  ASSERT_TRUE(Attend(good, response).ok());
}

TEST_F(CacheServiceTest, StoresEightBits) {
  Rng rng(31);
  v1::CreateRequest create = CreateOf(1);
  create.set_storage(v1::STORAGE_INT8);
  const v1::Cache at_once = CreateCache(create), one_by_one = CreateCache(create);
  EXPECT_EQ(at_once.storage(), v1::STORAGE_INT8);
  const Tokens tokens = RandomTokens(130, rng);
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(at_once, 0, 0, tokens), appended).ok());
  for (int64_t n = 0; n < 130; ++n) {
    ASSERT_TRUE(Append(AppendOf(one_by_one, 0, n, tokens.Slice(n, 1)), appended).ok());
  }
  // A page has 64 tokens, a row of 8 or 6 numbers one scale.
  v1::Ids ids;
  ids.add_caches(at_once.id());
  v1::Caches caches;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Get, ids, caches).ok());
  EXPECT_EQ(caches.caches(0).bytes(), 3 * 64 * kKvHeads * (kHeadSize + 2 + kValueSize + 2));

  v1::AttendCachedRequest request = AttendOf(at_once, 0, 130, {}, 2, rng);
  v1::AttendCachedResponse response, other;
  ASSERT_TRUE(Attend(request, response).ok());
  EXPECT_THAT(response.plan(), ::testing::EndsWith(" 1 item, INT8"));
  const std::vector<float> q = Values(request.q());
  const LayerModel stored{Stored(tokens, v1::STORAGE_INT8)};
  ExpectClose(response.y(), Define(stored, 130, 0, 128, 2, q.data(), {}).y, "y");
  request.mutable_items(0)->set_cache(one_by_one.id());
  ASSERT_TRUE(Attend(request, other).ok());
  EXPECT_EQ(other.y().data(), response.y().data()) << "bits depend on how tokens were appended";

  // What is rounded to the same is the same.
  Tokens near = tokens.Slice(60, 10), far = near;
  for (float& value : near.values) value = std::nextafter(value, 0.0F);
  ASSERT_EQ(Rounded(near.values, kValueSize),
            Stored(tokens.Slice(60, 10), v1::STORAGE_INT8).values);
  ASSERT_TRUE(Append(AppendOf(at_once, 0, 60, near), appended).ok());
  EXPECT_TRUE(appended.results(0).applied_before());
  far.values[0] += 0.1F;
  ExpectFails(Append(AppendOf(at_once, 0, 60, far), appended), StatusCode::ABORTED, "conflict");
}

TEST_F(CacheServiceTest, RefusesEightBitsWhereTheyAreNotPossible) {
  v1::CreateRequest create = CreateOf(1);
  create.set_storage(v1::STORAGE_INT8);
  const v1::Cache cache = CreateCache(create);
  create.set_dtype(v1::FP64);
  v1::Cache none;
  grpc::Status status = Create(create, none);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "storage is INT8 and dtype is FP64; INT8 stores FP32, FP16 or BF16");
  create.set_dtype(v1::FP32);
  create.set_storage(static_cast<v1::Storage>(2));
  status = Create(create, none);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("storage is 2"));
  // Caches of one call are stored alike.
  Rng rng(32);
  v1::AttendCachedRequest request = AttendOf(cache, 0, 0, RandomTokens(1, rng), 1, rng);
  v1::Item& plain = *request.add_items();
  plain.set_cache(CreateCache(CreateOf(1)).id());
  plain.set_generation(1);
  plain.set_rows(1);
  v1::AttendCachedResponse response;
  status = Attend(request, response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "items[1]: the layer has Hkv 2, D 8, Dv 6, FP32; other items have Hkv 2, D 8, Dv 6, "
            "FP32 stored as INT8");
}

TEST_F(CacheServiceTest, AnItemThatFailsLeavesTheOthersAlone) {
  Rng rng(3);
  const v1::Cache cache = CreateCache();
  Tokens tokens = RandomTokens(3, rng);
  v1::AttendCachedRequest request = AttendOf(cache, 0, 0, tokens, 1, rng);
  v1::Item& missing = *request.add_items();
  missing.set_cache("me:0:1");
  missing.set_generation(1);
  missing.set_rows(2);
  *request.mutable_q() =
      ToMessage(Random(3 * kQueryHeads * kHeadSize, rng), {3, kQueryHeads, kHeadSize});
  request.set_want_lse(true);
  v1::AttendCachedResponse response;
  ExpectFails(Attend(request, response), StatusCode::NOT_FOUND, "restarted");
  v1::Ids ids;
  ids.add_caches(cache.id());
  v1::Caches caches;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Get, ids, caches).ok());
  EXPECT_EQ(caches.caches(0).lengths(0), 0);  // all or nothing
  request.set_return_partial_success(true);
  ASSERT_TRUE(Attend(request, response).ok());
  EXPECT_EQ(response.items(0).code(), 0);
  EXPECT_EQ(response.items(0).length(), 3);
  EXPECT_EQ(response.items(1).code(), static_cast<int>(StatusCode::NOT_FOUND));
  EXPECT_EQ(response.items(1).reason(), "restarted");
  const std::vector<float> q = Values(request.q());
  Answer want = Define({tokens}, 3, 0, 2, 1, q.data(), {});
  want.y.resize(want.y.size() + 2 * kQueryHeads * kValueSize, 0);
  want.lse.resize(want.lse.size() + 2 * kQueryHeads, -kInfinity);
  ExpectClose(response.y(), want.y, "y");
  ExpectClose(response.lse(), want.lse, "lse");
}

TEST_F(CacheServiceTest, AnUpdateForksTruncatesAndCloses) {
  Rng rng(4);
  const v1::Cache cache = CreateCache(CreateOf(1)), other = CreateCache();
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(cache, 0, 0, RandomTokens(3, rng)), appended).ok());
  v1::UpdateRequest request;
  v1::ForkRequest& fork = *request.add_forks();
  fork.set_cache(cache.id());
  fork.set_generation(1);
  fork.set_name("an update's");
  v1::TruncateRequest& truncate = *request.add_truncates();
  truncate.set_cache(cache.id());
  truncate.set_generation(1);
  truncate.set_length(2);
  for (const std::string& id : {std::string("me:0:1"), cache.id(), other.id()}) {
    request.add_closes(id);
  }
  const auto update = [&] {
    v1::UpdateResponse response;
    const grpc::Status status = Call(&v1::CacheService::Stub::Update, request, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  // After a fork that fails nothing is truncated, so that the fork can be made later.
  request.mutable_forks(0)->set_length(4);
  v1::UpdateResponse refused = update();
  EXPECT_EQ(refused.forks(0).code(), static_cast<int>(StatusCode::OUT_OF_RANGE));
  EXPECT_EQ(refused.truncates_size() + refused.closes_size(), 0);
  request.mutable_forks(0)->clear_length();
  request.mutable_truncates(0)->set_generation(2);
  refused = update();
  EXPECT_EQ(refused.forks(0).cache().lengths(0), 3);
  EXPECT_EQ(refused.truncates(0).code(), static_cast<int>(StatusCode::ABORTED));
  EXPECT_EQ(refused.truncates(0).reason(), "generation");
  EXPECT_EQ(refused.truncates(0).message(), "generation is 2; the cache has 1");
  EXPECT_EQ(refused.closes_size(), 0);
  request.mutable_truncates(0)->set_generation(1);
  const v1::UpdateResponse first = update();
  EXPECT_EQ(first.forks(0).cache().id(), refused.forks(0).cache().id());
  EXPECT_EQ(first.forks(0).cache().lengths(0), 3);  // as before the truncation
  EXPECT_EQ(first.truncates(0).cache().lengths(0), 2);
  for (const auto& results : {first.forks(), first.truncates()}) {
    EXPECT_EQ(results[0].cache().shapes_size(), 0);  // the caller knows them
  }
  EXPECT_EQ(first.closes(0).code(), static_cast<int>(StatusCode::NOT_FOUND));
  EXPECT_EQ(first.closes(0).reason(), "restarted");
  EXPECT_EQ(first.closes(1).cache().lengths(0), 2);
  EXPECT_EQ(first.closes(2).cache().id(), other.id());
  // Sent again: the fork is there, though what it was made of is not.
  request.clear_truncates();
  const v1::UpdateResponse again = update();
  EXPECT_EQ(again.forks(0).cache().id(), first.forks(0).cache().id());
  EXPECT_EQ(again.closes(1).reason(), "closed");
}

TEST_F(CacheServiceTest, AnUpdateThatIsNotAllowedDoesNothing) {
  const v1::Cache cache = CreateCache();
  v1::UpdateRequest request;
  v1::UpdateResponse response;
  grpc::Status status = Call(&v1::CacheService::Stub::Update, request, response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "forks, truncates and closes have 0 entries; they must have 1 to 1024");
  request.add_closes(cache.id());
  request.add_forks()->set_lease_ms(-1);
  status = Call(&v1::CacheService::Stub::Update, request, response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("forks[0].lease_ms is -1"));
  request.clear_forks();
  for (int n = 0; n < 1024; ++n) request.add_closes(std::string(128, 'x'));
  status = Call(&v1::CacheService::Stub::Update, request, response);
  EXPECT_THAT(status.error_message(), HasSubstr("have 1025 entries"));
  request.clear_closes();
  for (int n = 0; n < 2; ++n) {
    v1::TruncateRequest& truncate = *request.add_truncates();
    truncate.set_cache(cache.id());
    truncate.set_generation(1);
  }
  status = Call(&v1::CacheService::Stub::Update, request, response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "truncates[1].cache occurs twice");
  request.mutable_truncates()->RemoveLast();
  for (int n = 0; n < 2; ++n) request.add_closes(cache.id());
  status = Call(&v1::CacheService::Stub::Update, request, response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "closes[1] occurs twice");
  v1::Ids ids;
  ids.add_caches(cache.id());
  v1::Caches caches;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Get, ids, caches).ok());
  EXPECT_EQ(caches.caches(0).generation(), 1u);
}

// The callers of TCP are one caller, those of the Unix domain socket another.
TEST_F(CacheServiceTest, AnUpdateReachesNoCachesOfOthers) {
  std::string folder = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string socket = absl::StrCat(folder, "/socket");
  const ServerProcess server(
      {"--kv_cache_bytes=8388608", absl::StrCat("--unix_socket=", socket), "--grace_period=0s"});
  stub_ = StubOf(server);
  const v1::Cache cache = CreateCache();
  v1::UpdateRequest forks, rest;
  forks.add_forks()->set_cache(cache.id());
  rest.add_closes(cache.id());
  v1::UpdateResponse response;
  stub_ = v1::CacheService::NewStub(
      grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Update, forks, response).ok());
  EXPECT_EQ(response.forks(0).reason(), "unknown");
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Update, rest, response).ok());
  EXPECT_EQ(response.closes(0).reason(), "unknown");
  rest.add_truncates()->set_cache(cache.id());
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Update, rest, response).ok());
  EXPECT_EQ(response.truncates(0).reason(), "unknown");
  std::filesystem::remove_all(folder);
}

TEST_F(CacheServiceTest, AnUpdateEndsAtItsDeadline) {
  const ServerProcess server({"--kv_cache_bytes=67108864", "--grace_period=0s"});
  stub_ = StubOf(server);
  const v1::Cache cache = CreateCache(CreateOf(100));
  v1::UpdateRequest request;
  for (int n = 0; n < 1024; ++n) {
    v1::ForkRequest& fork = *request.add_forks();
    fork.set_cache(cache.id());
    fork.set_generation(1);
    fork.set_name(absl::StrCat("late ", n));
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(2));
  v1::UpdateResponse response;
  EXPECT_EQ(stub_->Update(&context, request, &response).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  v1::ListRequest list;
  list.set_name_prefix("late 1023");
  v1::Caches late;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::List, list, late).ok());
  EXPECT_EQ(late.caches_size(), 0);
}

TEST_F(CacheServiceTest, RunsOutOfPagesAtOnceAndOthersKeepTheirBits) {
  constexpr int64_t kCacheBytes = 48 << 20, kBudgetBytes = 64 << 20;
  const ServerProcess server({"--threads=2", absl::StrCat("--kv_cache_bytes=", kCacheBytes),
                              absl::StrCat("--memory_budget_bytes=", kBudgetBytes),
                              "--grace_period=0s"});
  stub_ = StubOf(server);
  const MemoryWatch memory(server.pid());
  Rng rng(4);
  const v1::Cache kept = CreateCache(CreateOf(1));
  const Tokens tokens = RandomTokens(1000, rng);
  v1::AppendResponse response;
  ASSERT_TRUE(Append(AppendOf(kept, 0, 0, tokens), response).ok());
  const v1::AttendCachedRequest question = AttendOf(kept, 0, 1000, {}, 1, rng);
  v1::AttendCachedResponse before, after;
  ASSERT_TRUE(Attend(question, before).ok());
  const v1::Cache filler = CreateCache(CreateOf(1));
  const Tokens more = RandomTokens(20000, rng);
  int64_t length = 0;
  grpc::Status status;
  while ((status = Append(AppendOf(filler, 0, length, more), response)).ok()) {
    length += more.count();
  }
  ExpectFails(status, StatusCode::RESOURCE_EXHAUSTED, "pages");
  EXPECT_THAT(status.error_message(), ::testing::ContainsRegex("needs [0-9]+ bytes of pages, "
                                                               "[0-9]+ are free"));
  EXPECT_GT(length, 0);
  ASSERT_TRUE(Attend(question, after).ok());
  EXPECT_EQ(after.y().data(), before.y().data());
  v1::Ids ids;
  ids.add_caches(filler.id());
  v1::Caches closed;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Close, ids, closed).ok());
  EXPECT_TRUE(Append(AppendOf(kept, 0, 1000, more), response).ok());
  EXPECT_GT(memory.peak(), kCacheBytes / 2);
  EXPECT_LE(memory.peak(), kCacheBytes + kBudgetBytes + kOtherBytes);
}

TEST_F(CacheServiceTest, AnExpiredCacheIsGoneAndItsPagesAreFree) {
  const double expired = ReadMetric(*server_, "rapt_kv_expired_total");
  const double reserved = ReadMetric(*server_, "rapt_kv_reserved_bytes");
  v1::CreateRequest request = CreateOf();
  request.set_lease_ms(50);
  request.set_reserve_tokens(1000);
  const v1::Cache cache = CreateCache(request);
  EXPECT_EQ(cache.lease_ms(), 50);
  WaitForMetric(*server_, "rapt_kv_expired_total", expired + 1);
  WaitForMetric(*server_, "rapt_kv_reserved_bytes", reserved);
  v1::Ids ids;
  ids.add_caches(cache.id());
  v1::Caches caches;
  ExpectFails(Call(&v1::CacheService::Stub::Get, ids, caches), StatusCode::NOT_FOUND, "expired");
}

TEST_F(CacheServiceTest, CloseDuringALongCallLetsItFinish) {
  Rng rng(6);
  const v1::Cache cache = CreateCache(CreateOf(1));
  const Tokens tokens = RandomTokens(30000, rng);
  v1::AppendResponse response;
  ASSERT_TRUE(Append(AppendOf(cache, 0, 0, tokens), response).ok());
  const v1::AttendCachedRequest question = AttendOf(cache, 0, 30000, {}, 1500, rng);
  v1::AttendCachedResponse alone;
  ASSERT_TRUE(Attend(question, alone).ok());
  WaitUntilNothingIsHeld(*server_);
  v1::AttendCachedResponse answered;
  grpc::Status status;
  std::thread caller([&] {
    grpc::ClientContext context;
    status = stub_->Attend(&context, question, &answered);
  });
  WaitUntilComputing(*server_);
  v1::Ids ids;
  ids.add_caches(cache.id());
  v1::Caches closed;
  const grpc::Status close = Call(&v1::CacheService::Stub::Close, ids, closed);
  caller.join();
  EXPECT_TRUE(close.ok()) << close.error_message();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(answered.y().data(), alone.y().data());
}

TEST_F(CacheServiceTest, ForksReadTheirPrefixOnce) {
  Rng rng(9);
  const v1::Cache parent = CreateCache(CreateOf(1));
  LayerModel prompt{RandomTokens(1000, rng)};
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(parent, 0, 0, prompt.tokens), appended).ok());
  v1::AttendCachedRequest batch;
  batch.set_want_lse(true);
  Tokens all;
  std::vector<float> q;
  Answer want;
  std::vector<v1::AttendCachedRequest> alone;
  for (int n = 0; n < 6; ++n) {
    v1::ForkRequest request;
    request.set_cache(parent.id());
    request.set_generation(1);
    request.set_length(n == 5 ? 700 : 1000);
    v1::Cache fork;
    ASSERT_TRUE(Call(&v1::CacheService::Stub::Fork, request, fork).ok());
    LayerModel layer = prompt;
    layer.tokens.Resize(request.length());
    if (n == 5) {  // parts from the others within pages that all have
      const Tokens earlier = RandomTokens(200, rng);
      ASSERT_TRUE(Append(AppendOf(fork, 0, request.length(), earlier), appended).ok());
      layer.tokens.Add(earlier);
    }
    const Tokens own = RandomTokens(1 + n, rng);
    const v1::AttendCachedRequest one = AttendOf(fork, 0, layer.tokens.count(), own, 1, rng);
    layer.tokens.Add(own);
    alone.push_back(one);
    *batch.add_items() = one.items(0);
    all.Add(own);
    const std::vector<float> row = Values(one.q());
    q.insert(q.end(), row.begin(), row.end());
    const int64_t length = layer.tokens.count();
    const Answer answer = Define(layer, length, 0, length - 1, 1, row.data(), {});
    want.y.insert(want.y.end(), answer.y.begin(), answer.y.end());
    want.lse.insert(want.lse.end(), answer.lse.begin(), answer.lse.end());
  }
  *batch.mutable_q() = ToMessage(q, {6, kQueryHeads, kHeadSize});
  *batch.mutable_k() = all.k();
  *batch.mutable_v() = all.v();
  const double saved = ReadMetric(*server_, "rapt_kv_saved_bytes_total");
  v1::AttendCachedResponse shared, apart;
  ASSERT_TRUE(Attend(batch, shared).ok());
  EXPECT_THAT(shared.plan(), HasSubstr("6 items, prefixes of 6"));
  ExpectClose(shared.y(), want.y, "y");
  ExpectClose(shared.lse(), want.lse, "lse");
  // Ten whole pages of 64 tokens are common to all of them.
  const double token_bytes = kKvHeads * (kHeadSize + kValueSize) * sizeof(float);
  EXPECT_EQ(ReadMetric(*server_, "rapt_kv_saved_bytes_total") - saved, 5 * 640 * token_bytes);
  batch.set_share_prefix(v1::SHARE_PREFIX_NEVER);
  ASSERT_TRUE(Attend(batch, apart).ok());
  EXPECT_THAT(apart.plan(), ::testing::EndsWith("6 items"));
  std::string bytes;
  for (v1::AttendCachedRequest& one : alone) {
    v1::AttendCachedResponse response;
    ASSERT_TRUE(Attend(one, response).ok());
    bytes += response.y().data();
  }
  EXPECT_EQ(apart.y().data(), bytes);
}

TEST_F(CacheServiceTest, AServerThatWasKilledSaysSo) {
  Rng rng(7);
  v1::Cache cache;
  {
    ServerProcess first({"--kv_cache_bytes=8388608", "--instance_name=again"});
    stub_ = StubOf(first);
    cache = CreateCache();
    v1::AppendResponse response;
    ASSERT_TRUE(Append(AppendOf(cache, 0, 0, RandomTokens(100, rng)), response).ok());
    first.Signal(SIGKILL);
    first.Wait();
  }
  const ServerProcess second({"--kv_cache_bytes=8388608", "--instance_name=again"});
  stub_ = StubOf(second);
  v1::AppendResponse response;
  ExpectFails(Append(AppendOf(cache, 0, 100, RandomTokens(1, rng)), response),
              StatusCode::NOT_FOUND, "restarted");
  const ServerProcess other({"--kv_cache_bytes=8388608"});
  stub_ = StubOf(other);
  ExpectFails(Append(AppendOf(cache, 0, 100, RandomTokens(1, rng)), response),
              StatusCode::NOT_FOUND, "wrong_instance");
}

TEST_F(CacheServiceTest, ADrainingServerServesItsCachesAndMakesNone) {
  Rng rng(8);
  ServerProcess server({"--kv_cache_bytes=8388608", "--grace_period=20s"});
  stub_ = StubOf(server);
  const v1::Cache cache = CreateCache();
  server.Terminate();
  v1::Cache refused;
  grpc::Status status;
  do {
    status = Create(CreateOf(), refused);
  } while (status.ok());
  ExpectFails(status, StatusCode::UNAVAILABLE, "draining");
  v1::UpdateRequest update;
  update.add_forks()->set_cache(cache.id());
  v1::UpdateResponse updated;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Update, update, updated).ok());
  EXPECT_EQ(updated.forks(0).reason(), "draining");
  v1::AppendResponse response;
  for (int64_t n = 0; n < 5; ++n) {
    const grpc::Status appended = Append(AppendOf(cache, 0, n, RandomTokens(1, rng)), response);
    ASSERT_TRUE(appended.ok()) << appended.error_message();
  }
  v1::Ids ids;
  ids.add_caches(cache.id());
  v1::Caches closed;
  ASSERT_TRUE(Call(&v1::CacheService::Stub::Close, ids, closed).ok());
  while (closed.caches_size() == 0) std::this_thread::yield();
  EXPECT_EQ(server.Wait(), 0);  // long before the grace period ends: no cache lives
}

TEST_F(CacheServiceTest, ADrainingServerWaitsForNobody) {
  ServerProcess server({"--kv_cache_bytes=8388608", "--grace_period=1h"});
  stub_ = StubOf(server);
  CreateCache();
  server.Terminate();
  EXPECT_EQ(server.Wait(), 0);  // long before the grace period ends
  EXPECT_THAT(server.Log(),
              AllOf(HasSubstr("waiting for the callers of caches caches=1 quiet_time=5s"),
                    HasSubstr("caches end with the server caches=1 reason=\"no calls\"")));
}

TEST_F(CacheServiceTest, AServerWithoutCachesSaysSo) {
  const ServerProcess server;
  stub_ = StubOf(server);
  v1::Cache cache;
  const grpc::Status status = Create(CreateOf(), cache);
  EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--kv_cache_bytes"));
  v1::AttendCachedResponse response;
  EXPECT_EQ(Attend({}, response).error_code(), StatusCode::UNIMPLEMENTED);
  v1::Ids ids;
  v1::Caches caches;
  EXPECT_EQ(Call(&v1::CacheService::Stub::Get, ids, caches).error_code(),
            StatusCode::UNIMPLEMENTED);
}

TEST_F(CacheServiceTest, ExportsItsState) {
  v1::CreateRequest request = CreateOf();
  request.set_reserve_tokens(640);
  const v1::Cache cache = CreateCache(request);
  EXPECT_EQ(ReadMetric(*server_, "rapt_kv_limit_bytes"), 67108864);
  EXPECT_GE(ReadMetric(*server_, "rapt_kv_used_bytes"), static_cast<double>(cache.bytes()));
  EXPECT_GE(ReadMetric(*server_, "rapt_kv_reserved_bytes"), static_cast<double>(cache.bytes()));
  EXPECT_GE(ReadMetric(*server_, "rapt_kv_caches"), 1);
  v1::AttendCachedResponse response;
  v1::AttendCachedRequest unknown;
  unknown.add_items()->set_cache("nobody");
  unknown.mutable_items(0)->set_rows(1);
  ExpectFails(Attend(unknown, response), StatusCode::NOT_FOUND, "unknown");
  EXPECT_GE(ReadMetric(*server_, "rapt_kv_refused_total", {{"reason", "unknown"}}), 1);
}

}  // namespace
}  // namespace rapt::test
