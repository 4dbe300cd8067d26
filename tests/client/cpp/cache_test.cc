// Caches of the client library, against the real server and one that loses replies.
#include "rapt/cache.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/mutex.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "tests/client/cpp/cache_proxy.h"
#include "tests/client/cpp/cache_tokens.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_reason.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::CacheProxy;
using test::DrawTokens;
using test::ExpectFails;
using test::kQueryHeads;
using test::kValueSize;
using test::ReadMetric;
using test::Rows;
using test::ServerProcess;
using test::Tokens;
using test::TwoLayers;
using test::ValuesOf;
using test::WaitForMetric;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::FloatNear;
using testing::HasSubstr;
using testing::Pointwise;
using testing::SizeIs;

std::vector<float> FirstRows(int64_t rows, std::vector<float> y) {
  y.resize(static_cast<size_t>(rows * kQueryHeads * kValueSize));
  return y;
}

class CacheTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = new ServerProcess({"--threads=2", "--kv_cache_bytes=67108864", "--grace_period=0s"});
  }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }

  void SetUp() override { client_ = Connect(); }

  static std::unique_ptr<Client> Connect(const Options& options = {}) {
    absl::StatusOr<std::unique_ptr<Client>> client =
        Client::Connect(server_->grpc_address(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  Cache Create(const CacheOptions& options = TwoLayers()) {
    absl::StatusOr<Cache> cache = CreateCache(*client_, options);
    EXPECT_TRUE(cache.ok()) << cache.status();
    return *std::move(cache);
  }

  static void Append(Cache& cache, const Tokens& tokens, int32_t layer = 0) {
    const auto result = cache.Append(layer, tokens.k.view(), tokens.v.view());
    EXPECT_TRUE(result.ok()) << result.status();
  }

  static CacheAttendResult Attend(Cache& cache, const CacheAttendCall& call) {
    absl::StatusOr<CacheAttendResult> result = cache.Attend(call);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : CacheAttendResult();
  }

  // Causal attention of all tokens, [tokens, Hq, Dv], without a cache.
  std::vector<float> Want(const Tokens& tokens, AttendCall call = {}) {
    call.q = WithBatch(tokens.q);
    call.k = WithBatch(tokens.k);
    call.v = WithBatch(tokens.v);
    call.layout = Layout::kBshd;
    call.causal = true;
    const absl::StatusOr<AttendResult> result = client_->Attend(call);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? ValuesOf(result->y) : std::vector<float>();
  }

  static TensorView WithBatch(const Rows& rows) {
    return View<float>({1, rows.shape[0], rows.shape[1], rows.shape[2]}, rows.values);
  }

  absl::Status Find(const std::string& id) { return GetCaches(*client_, {id}).status(); }

  static ServerProcess* server_;
  std::unique_ptr<Client> client_;
};

ServerProcess* CacheTest::server_ = nullptr;

static_assert(!std::is_copy_constructible_v<Cache> && std::is_nothrow_move_assignable_v<Cache>);

TEST_F(CacheTest, StepsEqualAttentionOfAllTokens) {
  const Tokens tokens = DrawTokens(1, 9);
  const std::vector<float> want = Want(tokens);
  Cache cache = Create();
  const auto prompt = cache.Append(1, tokens.k.view(0, 4), tokens.v.view(0, 4));
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->length, 4);
  EXPECT_FALSE(prompt->applied_before);
  for (int64_t at = 4; at < 9; ++at) {
    const TensorView q = tokens.q.view(at, at + 1);
    const CacheAttendResult step = Attend(
        cache,
        {.layer = 1, .q = q, .k = tokens.k.view(at, at + 1), .v = tokens.v.view(at, at + 1)});
    EXPECT_EQ(step.y.shape(), (Shape{1, kQueryHeads, kValueSize}));
    const auto row = want.begin() + at * kQueryHeads * kValueSize;
    EXPECT_THAT(
        ValuesOf(step.y),
        Pointwise(FloatNear(2e-6f), std::vector<float>(row, row + kQueryHeads * kValueSize)));
    ASSERT_THAT(step.items, SizeIs(1));
    EXPECT_EQ(step.items[0].length, at + 1);
    EXPECT_FALSE(step.lse.has_value());
    EXPECT_THAT(step.plan, HasSubstr("cpu/"));
  }
  EXPECT_THAT(cache.lengths(), ElementsAre(0, 9));
  const CacheAttendResult again = Attend(cache, {.layer = 1, .q = tokens.q.view()});
  EXPECT_THAT(ValuesOf(again.y), Pointwise(FloatNear(2e-6f), want));
  EXPECT_THAT(cache.lengths(), ElementsAre(0, 9));
}

TEST_F(CacheTest, TakesAttributes) {
  const Tokens tokens = DrawTokens(2, 7);
  const std::vector<float> sink(kQueryHeads, 0.5f);
  Cache cache = Create();
  Append(cache, tokens);
  const TensorView head_sink = View<float>({kQueryHeads}, sink);
  const CacheAttendResult result = Attend(cache, {.q = tokens.q.view(),
                                                  .head_sink = head_sink,
                                                  .scale = 0.7,
                                                  .softcap = 1.5,
                                                  .window = {.left = 2},
                                                  .wants_lse = true,
                                                  .output = DType::kFloat32,
                                                  .share_prefix = false,
                                                  .priority = 1});
  AttendCall want;
  want.scale = 0.7;
  want.softcap = 1.5;
  want.window.left = 2;
  want.head_sink = head_sink;
  EXPECT_THAT(ValuesOf(result.y), Pointwise(FloatNear(2e-6f), Want(tokens, want)));
  ASSERT_TRUE(result.lse.has_value());
  EXPECT_EQ(result.lse->shape(), (Shape{7, kQueryHeads}));
  const CacheAttendResult first =
      Attend(cache, {.q = tokens.q.view(0, 2), .position = 0, .share_prefix = false});
  EXPECT_THAT(ValuesOf(first.y), Pointwise(FloatNear(2e-6f), FirstRows(2, Want(tokens))));
}

TEST_F(CacheTest, AppendsToSeveralLayersAtOnce) {
  const Tokens a = DrawTokens(1, 3), b = DrawTokens(2, 5);
  Cache cache = Create();
  const auto results = cache.Append({{0, a.k.view(), a.v.view()}, {1, b.k.view(), b.v.view()}});
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_THAT(*results, SizeIs(2));
  EXPECT_EQ((*results)[1].length, 5);
  EXPECT_THAT(cache.lengths(), ElementsAre(3, 5));
  ExpectFails(cache.Append({{0, a.k.view(), a.v.view()}, {1, b.k.view(), a.v.view()}}),
              absl::StatusCode::kInvalidArgument, "");
  EXPECT_THAT(cache.Refresh()->lengths, ElementsAre(3, 5));
}

TEST_F(CacheTest, ARaggedBatchEqualsItsItems) {
  const Tokens tokens = DrawTokens(3, 6);
  std::vector<Cache> caches, alone;
  for (int n = 0; n < 3; ++n) {
    caches.push_back(Create());
    for (int32_t layer : {0, 1}) Append(caches.back(), DrawTokens(10 + n, 4 + n), layer);
    absl::StatusOr<Cache> fork = caches.back().Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    alone.push_back(*std::move(fork));
  }
  // Items of 1, 2 and 3 rows; the second appends nothing.
  const std::vector<CacheItem> items = {{&caches[0], 1, 1}, {&caches[1], 2, 0}, {&caches[2], 3, 2}};
  const absl::StatusOr<CacheAttendResult> batch = AttendCaches(items, {.q = tokens.q.view(),
                                                                       .k = tokens.k.view(0, 3),
                                                                       .v = tokens.v.view(0, 3),
                                                                       .wants_lse = true,
                                                                       .share_prefix = false});
  ASSERT_TRUE(batch.ok()) << batch.status();
  const CacheAttendResult first = Attend(alone[0], {.q = tokens.q.view(0, 1),
                                                    .k = tokens.k.view(0, 1),
                                                    .v = tokens.v.view(0, 1),
                                                    .wants_lse = true,
                                                    .share_prefix = false});
  const CacheAttendResult second =
      Attend(alone[1], {.q = tokens.q.view(1, 3), .wants_lse = true, .share_prefix = false});
  const CacheAttendResult third = Attend(alone[2], {.q = tokens.q.view(3, 6),
                                                    .k = tokens.k.view(1, 3),
                                                    .v = tokens.v.view(1, 3),
                                                    .wants_lse = true,
                                                    .share_prefix = false});
  std::vector<float> y, lse;
  for (const CacheAttendResult* one : {&first, &second, &third}) {
    for (float value : ValuesOf(one->y)) y.push_back(value);
    for (float value : ValuesOf(*one->lse)) lse.push_back(value);
  }
  EXPECT_THAT(ValuesOf(batch->y), ElementsAreArray(y));
  EXPECT_THAT(ValuesOf(*batch->lse), ElementsAreArray(lse));
  EXPECT_THAT(caches[0].lengths(), ElementsAre(5, 4));
  EXPECT_THAT(caches[1].lengths(), ElementsAre(5, 5));
  EXPECT_THAT(caches[2].lengths(), ElementsAre(8, 6));
  ASSERT_THAT(batch->items, SizeIs(3));
  EXPECT_EQ(batch->items[2].length, 8);
}

TEST_F(CacheTest, AnItemOfABatchMayFailAlone) {
  const Tokens tokens = DrawTokens(4, 2);
  Cache alive = Create(), closed = Create();
  ASSERT_TRUE(CloseCaches(*client_, {closed.id()}).ok());
  const std::vector<CacheItem> items = {{&closed, 1, 1}, {&alive, 1, 1}};
  CacheAttendCall call{.q = tokens.q.view(), .k = tokens.k.view(), .v = tokens.v.view()};
  ExpectFails(AttendCaches(items, call), absl::StatusCode::kNotFound, "closed");
  EXPECT_THAT(alive.lengths(), ElementsAre(0, 0));
  call.partial_success = true;
  const absl::StatusOr<CacheAttendResult> result = AttendCaches(items, call);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(absl::IsNotFound(result->items[0].status));
  EXPECT_EQ(ReasonOf(result->items[0].status), "closed");
  EXPECT_TRUE(result->items[1].status.ok());
  EXPECT_THAT(alive.lengths(), ElementsAre(1, 0));
  EXPECT_THAT(closed.lengths(), ElementsAre(0, 0));
}

TEST_F(CacheTest, ABatchNeedsCachesOfOneClient) {
  const Tokens tokens = DrawTokens(4, 2);
  const std::unique_ptr<Client> other_client = Connect();
  Cache cache = Create();
  absl::StatusOr<Cache> other = CreateCache(*other_client, TwoLayers());
  ASSERT_TRUE(other.ok()) << other.status();
  const CacheAttendCall call{.q = tokens.q.view()};
  const auto mixed = AttendCaches({{&cache, 1, 0}, {&*other, 1, 0}}, call);
  EXPECT_TRUE(absl::IsInvalidArgument(mixed.status()));
  EXPECT_THAT(mixed.status().message(), HasSubstr("items[1]"));
  EXPECT_TRUE(absl::IsInvalidArgument(AttendCaches({}, call).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(AttendCaches({{nullptr, 1, 0}}, call).status()));
  CacheAttendCall with_position = call;
  with_position.position = 0;
  EXPECT_THAT(std::string(AttendCaches({{&cache, 1, 0}}, with_position).status().message()),
              HasSubstr("position is set in the call"));
}

TEST_F(CacheTest, ForksAndTruncatesIndependently) {
  const Tokens tokens = DrawTokens(5, 6);
  Cache cache = Create();
  Append(cache, tokens, 0);
  Append(cache, tokens, 1);
  absl::StatusOr<Cache> fork = cache.Fork({.length = 4});
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_NE(fork->id(), cache.id());
  EXPECT_THAT(fork->lengths(), ElementsAre(4, 4));
  EXPECT_EQ(fork->generation(), 1u);

  EXPECT_TRUE(cache.Truncate(2).ok());
  EXPECT_THAT(cache.lengths(), ElementsAre(2, 2));
  EXPECT_EQ(cache.generation(), 2u);
  Append(cache, DrawTokens(6, 3));
  EXPECT_THAT(cache.lengths(), ElementsAre(5, 2));
  ExpectFails<CacheInfo>(cache.Truncate(3), absl::StatusCode::kOutOfRange, "");
  EXPECT_THAT(cache.lengths(), ElementsAre(5, 2));

  const CacheAttendResult kept = Attend(*fork, {.q = tokens.q.view(0, 4)});
  EXPECT_THAT(ValuesOf(kept.y), Pointwise(FloatNear(2e-6f), FirstRows(4, Want(tokens))));
}

TEST_F(CacheTest, UpdatesSeveralCachesInOneCall) {
  const Tokens tokens = DrawTokens(5, 6);
  Cache cache = Create(), other = Create();
  Append(cache, tokens, 0);
  Append(cache, tokens, 1);
  const std::string gone = other.id();
  CacheChanges wrong = {
      .forks = {&cache}, .truncates = {{&cache, 4}, {&other, 1}}, .closes = {&other}};
  const size_t before = ListCaches(*client_)->size();
  ExpectFails(UpdateCaches(wrong), absl::StatusCode::kOutOfRange, "");
  EXPECT_THAT(*ListCaches(*client_), SizeIs(before));
  EXPECT_THAT(cache.lengths(), ElementsAre(4, 4));
  wrong.closes.push_back(&other);
  ExpectFails(UpdateCaches(wrong), absl::StatusCode::kInvalidArgument, "");

  const auto forks = UpdateCaches(
      {.forks = {&cache, &other, &cache}, .truncates = {{&cache, 2}}, .closes = {&other}});
  ASSERT_TRUE(forks.ok()) << forks.status();
  ASSERT_THAT(*forks, SizeIs(3));
  EXPECT_THAT((*forks)[0].lengths(), ElementsAre(4, 4));
  EXPECT_EQ((*forks)[0].shapes(), cache.shapes());
  EXPECT_THAT((*forks)[1].lengths(), ElementsAre(0, 0));
  EXPECT_THAT(cache.lengths(), ElementsAre(2, 2));
  EXPECT_EQ(cache.generation(), 3u);
  EXPECT_EQ(ReasonOf(Find(gone)), "closed");
  EXPECT_TRUE(absl::IsFailedPrecondition(UpdateCaches({.forks = {&other}}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(UpdateCaches({}).status()));
}

TEST_F(CacheTest, ErrorsHaveAReason) {
  const Tokens tokens = DrawTokens(7, 2), other = DrawTokens(8, 2);
  Cache cache = Create();
  const CacheInfo empty = *cache.Refresh();
  Append(cache, tokens);

  Cache stale = BorrowCache(*client_, empty);
  ExpectFails(stale.Append(0, other.k.view(), other.v.view()), absl::StatusCode::kAborted,
              "conflict");
  EXPECT_THAT(stale.lengths(), ElementsAre(0, 0));
  const auto same = stale.Append(0, tokens.k.view(), tokens.v.view());
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_TRUE(same->applied_before);
  EXPECT_THAT(stale.lengths(), ElementsAre(2, 0));

  ASSERT_TRUE(cache.Truncate(0).ok());
  ExpectFails(stale.Append(0, tokens.k.view(), tokens.v.view()), absl::StatusCode::kAborted,
              "generation");
  ASSERT_TRUE(stale.Refresh().ok());
  EXPECT_EQ(stale.generation(), 2u);
  EXPECT_THAT(stale.lengths(), ElementsAre(0, 0));

  CacheOptions large = TwoLayers();
  large.reserve_tokens = int64_t{1} << 40;
  ExpectFails(CreateCache(*client_, large), absl::StatusCode::kResourceExhausted, "pages");
  ExpectFails(GetCaches(*client_, {"nobody"}), absl::StatusCode::kNotFound, "unknown");
  EXPECT_EQ(ReasonOf(absl::NotFoundError("no reason")), "");
}

TEST_F(CacheTest, InvalidCallsNameTheField) {
  const Tokens tokens = DrawTokens(9, 2);
  Cache cache = Create();
  const auto message = [](const auto& result) { return std::string(result.status().message()); };
  EXPECT_EQ(message(cache.Append(2, tokens.k.view(), tokens.v.view())),
            "layer is 2; the cache has 2 layers");
  EXPECT_EQ(message(cache.Attend({.layer = -1, .q = tokens.q.view()})),
            "layer is -1; the cache has 2 layers");
  TensorView cut = tokens.v.view();
  cut.data.remove_suffix(4);
  EXPECT_THAT(message(cache.Append(0, tokens.k.view(), cut)), HasSubstr("parts[0].v"));
  EXPECT_THAT(message(cache.Attend({.q = tokens.q.view(), .k = tokens.k.view(), .v = cut})),
              HasSubstr("v "));
  EXPECT_THAT(message(cache.Attend({.q = TensorView{.shape = {int64_t{1} << 31, 0, 0}}})),
              HasSubstr("q has 2147483648 rows"));
  EXPECT_THAT(message(cache.Append(0, TensorView(), TensorView())), HasSubstr("parts[0]"));
  const std::unique_ptr<Client> small = Connect({.max_message_bytes = 300});
  Cache borrowed = BorrowCache(*small, *cache.Refresh());
  ExpectFails(borrowed.Append(0, tokens.k.view(), tokens.v.view()),
              absl::StatusCode::kResourceExhausted, "");
  EXPECT_THAT(cache.Refresh()->lengths, ElementsAre(0, 0));
}

TEST_F(CacheTest, ANameFindsTheCacheAgain) {
  CacheOptions named = TwoLayers();
  named.name = "ANameFindsTheCacheAgain";
  Cache cache = Create(named);
  Append(cache, DrawTokens(1, 3));
  Cache again = Create(named);
  EXPECT_EQ(again.id(), cache.id());
  EXPECT_THAT(again.lengths(), ElementsAre(3, 0));
  EXPECT_THAT(again.shapes(), SizeIs(1));
  EXPECT_EQ(again.dtype(), DType::kFloat32);
  named.dtype = DType::kFloat16;
  ExpectFails(CreateCache(*client_, named), absl::StatusCode::kAlreadyExists, "");
  const Cache unnamed = Create(), other = Create();
  EXPECT_NE(unnamed.id(), other.id());
}

TEST_F(CacheTest, ListsCaches) {
  CacheOptions options = TwoLayers();
  std::vector<Cache> caches;
  for (const char* name : {"list/a", "list/b", "other"}) {
    options.name = name;
    caches.push_back(Create(options));
  }
  Append(caches[1], DrawTokens(1, 3));
  const absl::StatusOr<std::vector<CacheInfo>> listed = ListCaches(*client_, "list/");
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_THAT(*listed, SizeIs(2));
  EXPECT_EQ((*listed)[0].name, "list/a");
  const CacheInfo& info = (*listed)[1];
  EXPECT_EQ(info.id, caches[1].id());
  EXPECT_THAT(info.lengths, ElementsAre(3, 0));
  EXPECT_EQ(info.generation, 1u);
  EXPECT_GT(info.bytes, 0);
  EXPECT_EQ(info.shared_bytes, 0);
  EXPECT_EQ(info.lease, std::chrono::minutes(10));
  EXPECT_GT(info.expires_in, std::chrono::minutes(9));
  ASSERT_THAT(info.shapes, SizeIs(1));
  EXPECT_EQ(info.shapes[0].layers, 2);
  EXPECT_EQ(info.shapes[0].value_head_size, kValueSize);

  const absl::StatusOr<FoundCaches> found = GetCaches(*client_, {"nobody", caches[2].id()});
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_THAT(found->caches, SizeIs(1));
  ASSERT_THAT(found->missing, SizeIs(1));
  EXPECT_EQ(found->missing[0].id, "nobody");
  EXPECT_EQ(found->missing[0].reason, "unknown");
}

TEST_F(CacheTest, ListsMoreCachesThanAPageHas) {
  CacheOptions options = TwoLayers();
  std::vector<Cache> caches;
  for (int n = 0; n < 1001; ++n) {
    options.name = absl::StrCat("pages/", n);
    caches.push_back(Create(options));
  }
  const absl::StatusOr<std::vector<CacheInfo>> listed = ListCaches(*client_, "pages/");
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_THAT(*listed, SizeIs(1001));
  EXPECT_EQ(listed->back().id, caches.back().id());
}

TEST_F(CacheTest, DestructionClosesAndReleaseDoesNot) {
  std::string destroyed, assigned, released, borrowed;
  {
    Cache cache = Create(), next = Create();
    destroyed = next.id();
    assigned = cache.id();
    cache = std::move(next);
    EXPECT_EQ(ReasonOf(Find(assigned)), "closed");
    EXPECT_TRUE(Find(destroyed).ok());
    EXPECT_EQ(cache.id(), destroyed);
    Cache kept = Create();
    borrowed = kept.id();
    const Cache borrower = BorrowCache(*client_, *kept.Refresh());
    released = kept.Release();
    EXPECT_EQ(released, borrowed);
  }
  EXPECT_EQ(ReasonOf(Find(destroyed)), "closed");
  EXPECT_TRUE(Find(released).ok());
  EXPECT_TRUE(CloseCaches(*client_, {released}).ok());
}

TEST_F(CacheTest, AnEmptyHandleSaysSo) {
  const Tokens tokens = DrawTokens(1, 1);
  Cache cache = Create();
  const std::string id = cache.id();
  EXPECT_TRUE(cache.Close().ok());
  EXPECT_EQ(ReasonOf(Find(id)), "closed");
  for (const absl::Status& status :
       {cache.Close(), cache.Truncate(0), cache.Renew().status(), cache.Refresh().status(),
        cache.Fork().status(), cache.Attend({.q = tokens.q.view()}).status(),
        cache.Append(0, tokens.k.view(), tokens.v.view()).status()}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("closed, released or moved from"));
  }
  Cache closed_elsewhere = Create();
  ASSERT_TRUE(CloseCaches(*client_, {closed_elsewhere.id()}).ok());
  EXPECT_TRUE(closed_elsewhere.Close().ok());
}

// `abandoned` shows that leases of this length run out: it is made last and expires first.
TEST_F(CacheTest, LeasesAreRenewedWhileTheirHandlesLive) {
  CacheOptions options = TwoLayers();
  options.lease = seconds(2);
  const double expired = ReadMetric(*server_, "rapt_kv_expired_total");
  Cache cache = Create(options);
  absl::StatusOr<Cache> fork = cache.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  Cache closed_elsewhere = Create(options);  // does not keep the others from being renewed
  ASSERT_TRUE(CloseCaches(*client_, {closed_elsewhere.id()}).ok());
  const std::string abandoned = Create(options).Release();
  WaitForMetric(*server_, "rapt_kv_expired_total", expired + 1);
  EXPECT_EQ(ReasonOf(Find(abandoned)), "expired");
  EXPECT_TRUE(Find(cache.id()).ok());
  EXPECT_TRUE(Find(fork->id()).ok());
  // Used caches are renewed by their calls, and then again by the thread.
  Append(cache, DrawTokens(1, 1));
  const std::string second = Create(options).Release();
  WaitForMetric(*server_, "rapt_kv_expired_total", expired + 2);
  EXPECT_TRUE(Find(cache.id()).ok());
  const absl::StatusOr<CacheInfo> renewed = cache.Renew();
  ASSERT_TRUE(renewed.ok()) << renewed.status();
  EXPECT_GT(renewed->expires_in, milliseconds(500));
}

TEST_F(CacheTest, AServerWithoutCachesSaysSo) {
  const ServerProcess server({"--threads=1", "--grace_period=0s"});
  const auto client = Client::Connect(server.grpc_address());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE(absl::IsUnimplemented(CreateCache(**client, TwoLayers()).status()));
}

TEST(CacheOfAServerThatEndsTest, TheReasonIsThatItRestarted) {
  auto server = std::make_unique<ServerProcess>(std::vector<std::string>{
      "--kv_cache_bytes=67108864", "--grace_period=0s", "--instance_name=restarts"});
  CacheInfo info;
  {
    const auto client = Client::Connect(server->grpc_address());
    ASSERT_TRUE(client.ok()) << client.status();
    absl::StatusOr<Cache> cache = CreateCache(**client, TwoLayers());
    ASSERT_TRUE(cache.ok()) << cache.status();
    info = *cache->Refresh();
    server.reset();
    // The destructor of `cache` finds no server, and gives up.
  }
  server = std::make_unique<ServerProcess>(std::vector<std::string>{
      "--kv_cache_bytes=67108864", "--grace_period=0s", "--instance_name=restarts"});
  const auto client = Client::Connect(server->grpc_address());
  ASSERT_TRUE(client.ok()) << client.status();
  Cache lost = BorrowCache(**client, info);
  const Tokens tokens = DrawTokens(1, 1);
  ExpectFails(lost.Append(0, tokens.k.view(), tokens.v.view()), absl::StatusCode::kNotFound,
              "restarted");
}

// Passes calls on to the real server. Loses the first reply of every method, after the server has
// done what was asked, and answers `code` instead.
class LossyServer final : public CacheProxy {
 public:
  LossyServer(const std::string& address, grpc::StatusCode code)
      : CacheProxy(address), code_(code) {}
  ~LossyServer() override { Stop(); }

  // The values of `at` of Append and Attend, in order.
  std::vector<int64_t> ats() const {
    MutexLock lock(mutex_);
    return ats_;
  }

  grpc::Status Create(grpc::ServerContext* context, const v1::CreateRequest* request,
                      v1::Cache* response) override {
    return Pass(*context, 0, &v1::CacheService::Stub::Create, *request, *response);
  }
  grpc::Status Fork(grpc::ServerContext* context, const v1::ForkRequest* request,
                    v1::Cache* response) override {
    return Pass(*context, 1, &v1::CacheService::Stub::Fork, *request, *response);
  }
  grpc::Status Truncate(grpc::ServerContext* context, const v1::TruncateRequest* request,
                        v1::Cache* response) override {
    return Pass(*context, 2, &v1::CacheService::Stub::Truncate, *request, *response);
  }
  grpc::Status Append(grpc::ServerContext* context, const v1::AppendRequest* request,
                      v1::AppendResponse* response) override {
    Note(request->parts(0).at());
    return Pass(*context, 3, &v1::CacheService::Stub::Append, *request, *response);
  }
  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendCachedRequest* request,
                      v1::AttendCachedResponse* response) override {
    Note(request->items(0).at());
    return Pass(*context, 4, &v1::CacheService::Stub::Attend, *request, *response);
  }
  grpc::Status Close(grpc::ServerContext* context, const v1::Ids* request,
                     v1::Caches* response) override {
    return Pass(*context, 5, &v1::CacheService::Stub::Close, *request, *response);
  }
  grpc::Status Update(grpc::ServerContext* context, const v1::UpdateRequest* request,
                      v1::UpdateResponse* response) override {
    return Pass(*context, 6, &v1::CacheService::Stub::Update, *request, *response);
  }
  grpc::Status Get(grpc::ServerContext*, const v1::Ids* request, v1::Caches* response) override {
    grpc::ClientContext context;
    return stub().Get(&context, *request, response);
  }

 private:
  void Note(int64_t at) {
    MutexLock lock(mutex_);
    ats_.push_back(at);
  }

  template <typename Method, typename Request, typename Response>
  grpc::Status Pass(grpc::ServerContext& server_context, int number, Method method,
                    const Request& request, Response& response) {
    grpc::ClientContext context;
    const grpc::Status status = (stub().*method)(&context, request, &response);
    const std::string reason = test::ReasonOf(context);
    if (!reason.empty()) server_context.AddTrailingMetadata("rapt-reason", reason);
    MutexLock lock(mutex_);
    if (std::exchange(was_lost_[number], true)) return status;
    EXPECT_TRUE(status.ok()) << status.error_message();
    return {code_, "the reply is lost"};
  }

  const grpc::StatusCode code_;
  mutable Mutex mutex_;
  bool was_lost_[7] ABSL_GUARDED_BY(mutex_) = {};
  std::vector<int64_t> ats_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(CacheTest, RetriesAfterALostReplyChangeNothing) {
  LossyServer lossy(server_->grpc_address(), grpc::StatusCode::UNAVAILABLE);
  const Tokens tokens = DrawTokens(11, 5);
  const auto client =
      Client::Connect(lossy.address(), {.retries = {.initial_backoff = {}, .max_backoff = {}}});
  ASSERT_TRUE(client.ok()) << client.status();
  const size_t before = ListCaches(*client_)->size();
  absl::StatusOr<Cache> cache = CreateCache(**client, TwoLayers());
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_THAT(*ListCaches(*client_), SizeIs(before + 1));

  const auto appended = cache->Append(0, tokens.k.view(0, 3), tokens.v.view(0, 3));
  ASSERT_TRUE(appended.ok()) << appended.status();
  EXPECT_TRUE(appended->applied_before);
  EXPECT_EQ(appended->length, 3);
  const CacheAttendResult step =
      Attend(*cache, {.q = tokens.q.view(), .k = tokens.k.view(3, 5), .v = tokens.v.view(3, 5)});
  ASSERT_THAT(step.items, SizeIs(1));
  EXPECT_TRUE(step.items[0].applied_before);
  EXPECT_THAT(ValuesOf(step.y), Pointwise(FloatNear(2e-6f), Want(tokens)));
  EXPECT_THAT(lossy.ats(), ElementsAre(0, 0, 3, 3));

  absl::StatusOr<Cache> fork = cache->Fork({.length = 0});
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_THAT(*ListCaches(*client_), SizeIs(before + 2));
  EXPECT_TRUE(cache->Truncate(0).ok());
  EXPECT_EQ(cache->generation(), 2u);
  const auto copies = UpdateCaches({.forks = {&*fork}, .closes = {&*fork}});
  ASSERT_TRUE(copies.ok()) << copies.status();
  EXPECT_THAT(*ListCaches(*client_), SizeIs(before + 2));
  const absl::StatusOr<CacheInfo> info = cache->Refresh();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->generation, 2u);
  const std::string id = cache->id();
  EXPECT_TRUE(cache->Close().ok());
  EXPECT_EQ(ReasonOf(Find(id)), "closed");
}

TEST_F(CacheTest, ACallThatMayHaveBeenAppliedCanBeMadeAgain) {
  LossyServer lossy(server_->grpc_address(), grpc::StatusCode::DEADLINE_EXCEEDED);
  const Tokens tokens = DrawTokens(12, 4);
  const auto client = Client::Connect(lossy.address());
  ASSERT_TRUE(client.ok()) << client.status();
  Cache owner = Create();
  Cache cache = BorrowCache(**client, *owner.Refresh());
  const CacheAttendCall call{.q = tokens.q.view(), .k = tokens.k.view(), .v = tokens.v.view()};
  EXPECT_TRUE(absl::IsDeadlineExceeded(cache.Attend(call).status()));
  EXPECT_THAT(cache.lengths(), ElementsAre(0, 0));
  const CacheAttendResult again = Attend(cache, call);
  EXPECT_THAT(ValuesOf(again.y), Pointwise(FloatNear(2e-6f), Want(tokens)));
  EXPECT_THAT(cache.lengths(), ElementsAre(4, 0));
  EXPECT_THAT(owner.Refresh()->lengths, ElementsAre(4, 0));
}

// Answers Update without the results of the second fork, or of the truncation, and counts Close.
class ShortAnswers final : public CacheProxy {
 public:
  using CacheProxy::CacheProxy;
  ~ShortAnswers() override { Stop(); }

  void LoseAFork() { loses_fork_ = true; }
  int closes() const { return closes_; }

  grpc::Status Update(grpc::ServerContext*, const v1::UpdateRequest* request,
                      v1::UpdateResponse* response) override {
    grpc::ClientContext context;
    grpc::Status status = stub().Update(&context, *request, response);
    loses_fork_ ? response->mutable_forks()->RemoveLast() : response->clear_truncates();
    return status;
  }
  grpc::Status Close(grpc::ServerContext*, const v1::Ids* request, v1::Caches* response) override {
    ++closes_;
    grpc::ClientContext context;
    return stub().Close(&context, *request, response);
  }

 private:
  std::atomic<bool> loses_fork_{false};
  std::atomic<int> closes_{0};
};

TEST_F(CacheTest, AnUpdateHasAResultForEachChange) {
  ShortAnswers proxy(server_->grpc_address());
  const auto client = Client::Connect(proxy.address());
  ASSERT_TRUE(client.ok()) << client.status();
  Cache owner = Create();
  Cache cache = BorrowCache(**client, *owner.Refresh());
  const size_t before = ListCaches(*client_)->size();
  EXPECT_TRUE(absl::IsInternal(
      UpdateCaches({.forks = {&cache, &cache}, .truncates = {{&cache, 0}}}).status()));
  EXPECT_EQ(proxy.closes(), 1);  // of both forks
  EXPECT_THAT(*ListCaches(*client_), SizeIs(before));
  proxy.LoseAFork();
  cache = BorrowCache(**client, *owner.Refresh());
  EXPECT_TRUE(absl::IsInternal(UpdateCaches({.forks = {&cache}}).status()));
}

// Passes on what it is asked, and keeps the answer of a step that appends nothing until Release().
class HeldAnswers final : public CacheProxy {
 public:
  using CacheProxy::CacheProxy;
  ~HeldAnswers() override { Stop(); }

  void WaitForQuery() { held_.WaitForNotification(); }
  void Release() { released_.Notify(); }

  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest* request,
                      v1::AppendResponse* response) override {
    grpc::ClientContext context;
    return stub().Append(&context, *request, response);
  }
  grpc::Status Attend(grpc::ServerContext*, const v1::AttendCachedRequest* request,
                      v1::AttendCachedResponse* response) override {
    grpc::ClientContext context;
    grpc::Status status = stub().Attend(&context, *request, response);
    held_.Notify();
    released_.WaitForNotification();
    return status;
  }

 private:
  absl::Notification held_, released_;
};

TEST_F(CacheTest, AQueryBesideAnAppendKeepsItsTokens) {
  HeldAnswers server(server_->grpc_address());
  const auto client = Client::Connect(server.address());
  ASSERT_TRUE(client.ok()) << client.status();
  Cache owner = Create();
  const Tokens tokens = DrawTokens(14, 3);
  ASSERT_TRUE(owner.Append(0, tokens.k.view(), tokens.v.view()).ok());
  Cache cache = BorrowCache(**client, *owner.Refresh());
  std::thread query([&] { EXPECT_TRUE(cache.Attend({.q = tokens.q.view()}).ok()); });
  server.WaitForQuery();
  EXPECT_TRUE(cache.Append(0, tokens.k.view(), tokens.v.view()).ok());
  server.Release();
  query.join();
  EXPECT_THAT(cache.lengths(), ElementsAre(6, 0));
}

}  // namespace
}  // namespace rapt::client
