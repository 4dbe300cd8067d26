// Contexts over several real servers, compared with attention to all tokens in float64.
#include "rapt/sharded_cache.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "tests/client/cpp/cache_proxy.h"
#include "tests/client/cpp/cache_tokens.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor.h"

namespace rapt::client {
namespace {

using test::CacheProxy;
using test::DrawTokens;
using test::ExpectFails;
using test::kKvHeads;
using test::kQueryHeads;
using test::kSize;
using test::kValueSize;
using test::Rows;
using test::ServerProcess;
using test::Tokens;
using test::TwoLayers;
using testing::AllOf;
using testing::DoubleNear;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pointwise;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rows of a type, and the numbers that it can say.
struct TypedRows {
  DType dtype;
  Shape shape;
  std::string bytes;
  std::vector<double> values;

  TensorView view(int64_t begin, int64_t end) const {
    const size_t row = bytes.size() / static_cast<size_t>(shape[0]);
    return {dtype,
            {end - begin, shape[1], shape[2]},
            {reinterpret_cast<const std::byte*>(bytes.data()) + static_cast<size_t>(begin) * row,
             static_cast<size_t>(end - begin) * row}};
  }
  TensorView view() const { return view(0, shape[0]); }
  double at(int64_t row, int64_t head, int64_t n) const {
    return values[static_cast<size_t>((row * shape[1] + head) * shape[2] + n)];
  }
};

TypedRows Convert(const Rows& rows, DType dtype) {
  TypedRows typed{dtype, rows.shape, {}, {}};
  const auto add = [&typed](const auto& element, double value) {
    typed.bytes.append(reinterpret_cast<const char*>(&element), sizeof element);
    typed.values.push_back(value);
  };
  for (const float value : rows.values) {
    if (dtype == DType::kFloat16) {
      const uint16_t half = test::EncodeHalf(value);
      add(half, test::DecodeHalf(half));
    } else if (dtype == DType::kBFloat16) {
      const uint16_t half = test::EncodeBFloat16(value);
      add(half, test::DecodeBFloat16(half));
    } else if (dtype == DType::kFloat64) {
      add(static_cast<double>(value), value);
    } else {
      add(value, value);
    }
  }
  return typed;
}

struct Context {
  TypedRows q, k, v;
};

Context DrawContext(int seed, int64_t tokens, DType dtype = DType::kFloat32) {
  const Tokens drawn = DrawTokens(seed, tokens);
  return {Convert(drawn.q, dtype), Convert(drawn.k, dtype), Convert(drawn.v, dtype)};
}

// What rows see, and how scores change.
struct Rules {
  int64_t keep_first = 0;
  int64_t keep_last = 0;
  std::optional<int64_t> left = {};
  double scale = 1 / std::sqrt(static_cast<double>(kSize));
  double softcap = 0;
  std::optional<float> sink = {};
};

struct Expected {
  std::vector<double> y, lse;
};

// Rows [begin, end) of q, of which row r is at position r, over tokens [0, tokens).
Expected Define(const Context& context, int64_t begin, int64_t end, int64_t tokens,
                const Rules& rules = {}) {
  Expected expected;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < kQueryHeads; ++head) {
      const int64_t kv_head = head / (kQueryHeads / kKvHeads);
      double sum = rules.sink ? std::exp(*rules.sink) : 0;
      std::vector<double> y(kValueSize);
      for (int64_t t = 0; t <= std::min(row, tokens - 1); ++t) {
        const bool is_recent = (rules.keep_last == 0 || row - t < rules.keep_last) &&
                               (!rules.left || row - t <= *rules.left);
        if (t >= rules.keep_first && !is_recent) continue;
        double score = 0;
        for (int64_t n = 0; n < kSize; ++n) {
          score += context.q.at(row, head, n) * context.k.at(t, kv_head, n);
        }
        score *= rules.scale;
        if (rules.softcap > 0) score = rules.softcap * std::tanh(score / rules.softcap);
        sum += std::exp(score);
        for (int64_t n = 0; n < kValueSize; ++n) {
          y[static_cast<size_t>(n)] += std::exp(score) * context.v.at(t, kv_head, n);
        }
      }
      for (const double value : y) expected.y.push_back(sum > 0 ? value / sum : 0);
      expected.lse.push_back(std::log(sum));
    }
  }
  return expected;
}

std::vector<double> ValuesOf(const Tensor& tensor) {
  if (tensor.dtype() == DType::kFloat64) {
    return {tensor.values<double>().begin(), tensor.values<double>().end()};
  }
  return {tensor.values<float>().begin(), tensor.values<float>().end()};
}

struct Tolerance {
  double y = 2e-6;
  double lse = 2e-6;
};

void ExpectNear(const absl::StatusOr<ShardedResult>& got, const Expected& want,
                const Tolerance& tolerance = {}) {
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_THAT(ValuesOf(got->y), Pointwise(DoubleNear(tolerance.y), want.y));
  EXPECT_THAT(ValuesOf(got->lse), Pointwise(DoubleNear(tolerance.lse), want.lse));
}

class ShardedCacheTest : public testing::Test {
 protected:
  static constexpr int kServers = 3;

  static void SetUpTestSuite() {
    for (auto& server : servers_) server = NewServer().release();
  }
  static void TearDownTestSuite() {
    for (auto& server : servers_) delete std::exchange(server, nullptr);
  }

  void SetUp() override {
    for (int n = 0; n < kServers; ++n) clients_[n] = Connect(servers_[n]->grpc_address());
  }

  static std::unique_ptr<ServerProcess> NewServer() {
    return std::make_unique<ServerProcess>(
        std::vector<std::string>{"--threads=1", "--kv_cache_bytes=67108864", "--grace_period=0s"});
  }
  static std::unique_ptr<Client> Connect(const std::string& address,
                                         const Options& options = {.connections = 1}) {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(address, options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  // Shards of 70, 64 and all other tokens.
  std::vector<Shard> ThreeShards() {
    return {{clients_[0].get(), 70}, {clients_[1].get(), 64}, {clients_[2].get()}};
  }

  static ShardedCache Create(const std::vector<Shard>& shards,
                             const CacheOptions& options = TwoLayers()) {
    absl::StatusOr<ShardedCache> context = CreateShardedCache(shards, options);
    EXPECT_TRUE(context.ok()) << context.status();
    return *std::move(context);
  }

  static void Append(ShardedCache& to, const Context& context, int64_t begin, int64_t end,
                     int32_t layer = 0) {
    const absl::Status status =
        to.Append({{layer, context.k.view(begin, end), context.v.view(begin, end)}});
    EXPECT_TRUE(status.ok()) << status;
  }

  // Appends tokens [begin, end) and attends with as many rows, and with `before` rows before them.
  static CacheAttendCall Step(const Context& context, int64_t begin, int64_t end,
                              int64_t before = 0) {
    return {.q = context.q.view(begin - before, end),
            .k = context.k.view(begin, end),
            .v = context.v.view(begin, end)};
  }

  static ServerProcess* servers_[kServers];
  std::unique_ptr<Client> clients_[kServers];
};

ServerProcess* ShardedCacheTest::servers_[] = {};

static_assert(!std::is_copy_constructible_v<ShardedCache> &&
              std::is_nothrow_move_assignable_v<ShardedCache>);

TEST_F(ShardedCacheTest, StepsEqualAttentionToAllTokens) {
  // Products of bf16, where the machine has them, round weights to bf16 and have lse within 3e-6.
  const struct {
    DType dtype;
    Tolerance tolerance;
  } kTypes[] = {{DType::kFloat32, {}},
                {DType::kFloat16, {}},
                {DType::kBFloat16, {0x1p-9, 5e-6}},
                {DType::kFloat64, {1e-13, 1e-13}}};
  for (const auto& type : kTypes) {
    SCOPED_TRACE(NameOf(type.dtype));
    const Context context = DrawContext(1, 200, type.dtype);
    CacheOptions options = TwoLayers();
    options.dtype = type.dtype;
    ShardedCache sharded = Create(ThreeShards(), options);
    Append(sharded, context, 0, 60, 1);
    // The next steps fill the first shard, the second, and cross to the third.
    int64_t at = 60;
    for (const int64_t count : {1, 9, 1, 62, 10, 1, 56}) {
      CacheAttendCall step = Step(context, at, at + count);
      step.layer = 1;
      const auto result = sharded.Attend(step);
      ExpectNear(result, Define(context, at, at + count, at + count), type.tolerance);
      at += count;
      EXPECT_THAT(sharded.lengths(), ElementsAre(0, at));
    }
    const auto first = sharded.Attend({.layer = 1, .q = context.q.view(0, 200)});
    ExpectNear(first, Define(context, 0, 200, 200), type.tolerance);
  }
}

TEST_F(ShardedCacheTest, ShardsOfEightBitsEqualOneCache) {
  const Context context = DrawContext(20, 150, DType::kFloat16);
  CacheOptions options = TwoLayers();
  options.dtype = DType::kFloat16;
  options.storage = CacheStorage::kInt8;
  ShardedCache sharded = Create(ThreeShards(), options);
  absl::StatusOr<Cache> one = CreateCache(*clients_[0], options);
  ASSERT_TRUE(one.ok()) << one.status();
  CacheAttendCall call = Step(context, 0, 150);
  call.wants_lse = true;
  call.output = DType::kFloat32;
  const auto want = one->Attend(call);
  ASSERT_TRUE(want.ok()) << want.status();
  ExpectNear(sharded.Attend(call), {ValuesOf(want->y), ValuesOf(*want->lse)});
}

TEST_F(ShardedCacheTest, EveryRowSeesTheTokensUpToItself) {
  const Context context = DrawContext(2, 160);
  ShardedCache sharded = Create(ThreeShards());
  Append(sharded, context, 0, 140);
  // Rows of all three shards, most of which do not stand in the shard that is asked.
  ExpectNear(sharded.Attend(Step(context, 140, 160, 140)), Define(context, 0, 160, 160));
  CacheAttendCall early{.q = context.q.view(10, 12), .position = 10};
  ExpectNear(sharded.Attend(early), Define(context, 10, 12, 160));
  early.position = 100;
  early.q = context.q.view(100, 101);
  ExpectNear(sharded.Attend(early), Define(context, 100, 101, 160));
}

TEST_F(ShardedCacheTest, AttributesMeanWhatTheyMeanForOneCache) {
  const Context context = DrawContext(3, 150);
  const std::vector<float> sink(kQueryHeads, 1.5F);
  CacheAttendCall call{.q = context.q.view(),
                       .head_sink = View<float>({kQueryHeads}, sink),
                       .scale = 0.7,
                       .softcap = 1.5,
                       .window = {.left = 80},
                       .share_prefix = false,
                       .priority = 1};
  ShardedCache sharded = Create(ThreeShards());
  Append(sharded, context, 0, 150);
  ExpectNear(
      sharded.Attend(call),
      Define(context, 0, 150, 150, {.left = 80, .scale = 0.7, .softcap = 1.5, .sink = 1.5F}));
}

TEST_F(ShardedCacheTest, WindowsCrossShards) {
  const Context context = DrawContext(4, 220);
  CacheOptions options = TwoLayers();
  options.shapes[0].keep_first = 75;
  options.shapes[0].keep_last = 40;
  options.first_position = 0;
  ShardedCache sharded = Create(ThreeShards(), options);
  const Rules rules{.keep_first = 75, .keep_last = 40};
  int64_t at = 0;
  for (const int64_t count : {60, 30, 1, 70, 1, 58}) {
    ExpectNear(sharded.Attend(Step(context, at, at + count)),
               Define(context, at, at + count, at + count, rules));
    at += count;
  }
}

TEST_F(ShardedCacheTest, PositionsMayBeginLater) {
  const Context context = DrawContext(5, 150);
  CacheOptions options = TwoLayers();
  options.first_position = 1000;
  options.shapes[0].keep_first = 1072;
  options.shapes[0].keep_last = 5;
  ShardedCache sharded = Create(ThreeShards(), options);
  ExpectNear(sharded.Attend(Step(context, 0, 150)),
             Define(context, 0, 150, 150, {.keep_first = 72, .keep_last = 5}));
  const auto second = sharded.Attend({.q = context.q.view(20, 30), .position = 1020});
  ExpectNear(second, Define(context, 20, 30, 150, {.keep_first = 72, .keep_last = 5}));
}

TEST_F(ShardedCacheTest, NoTokensGiveZeros) {
  const Context context = DrawContext(6, 4);
  const std::vector<float> sink(kQueryHeads, 0.5F);
  ShardedCache sharded = Create(ThreeShards());
  const auto nothing = sharded.Attend({.q = context.q.view(0, 2), .position = 0});
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_EQ(nothing->y.shape(), (Shape{2, kQueryHeads, kValueSize}));
  EXPECT_THAT(ValuesOf(nothing->y), Each(0));
  EXPECT_THAT(ValuesOf(nothing->lse), Each(-kInfinity));
  const auto sunk = sharded.Attend(
      {.q = context.q.view(0, 2), .head_sink = View<float>({kQueryHeads}, sink), .position = 0});
  ASSERT_TRUE(sunk.ok()) << sunk.status();
  EXPECT_THAT(ValuesOf(sunk->y), Each(0));
  EXPECT_THAT(ValuesOf(sunk->lse), Each(DoubleNear(0.5, 1e-6)));
  // Only the first shard has tokens; then a row sees none of them.
  Append(sharded, context, 0, 4);
  ExpectNear(sharded.Attend({.q = context.q.view(3, 4)}), Define(context, 3, 4, 4));
}

// Removes a cache behind the back of its handles.
void Lose(Client& client, const std::string& id) {
  const auto closed = CloseCaches(client, {id});
  EXPECT_TRUE(closed.ok()) << closed.status();
}

TEST_F(ShardedCacheTest, AFailingShardIsNamedAndOnlyItsRangeIsStoredAgain) {
  const Context context = DrawContext(7, 150);
  ShardedCache sharded = Create(ThreeShards());
  for (const int32_t layer : {0, 1}) Append(sharded, context, 0, 148, layer);
  const std::string lost = sharded.cache(1).id();
  Lose(*clients_[1], lost);
  const CacheAttendCall step = Step(context, 148, 149);
  const auto failed = sharded.Attend(step);
  ExpectFails(failed, absl::StatusCode::kNotFound, "closed");
  EXPECT_THAT(std::string(failed.status().message()),
              HasSubstr(absl::StrCat("shard 1, tokens 70 to 133, cache ", lost, ": ")));
  EXPECT_THAT(sharded.lengths(), ElementsAre(148, 148));

  absl::Status status = sharded.Rebuild(1, *clients_[0]);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(sharded.lengths(), ElementsAre(70, 70));
  const auto incomplete = sharded.Attend(step);
  ExpectFails(incomplete, absl::StatusCode::kFailedPrecondition, "");
  EXPECT_THAT(
      std::string(incomplete.status().message()),
      AllOf(HasSubstr("shard 1, tokens 70 to 133"), HasSubstr("it has 0 of 64 tokens of layer 0")));
  for (const auto& [begin, end] : {std::pair(70, 100), std::pair(100, 134)}) {
    status = sharded.Fill(1, {{0, context.k.view(begin, end), context.v.view(begin, end)},
                              {1, context.k.view(begin, end), context.v.view(begin, end)}});
    ASSERT_TRUE(status.ok()) << status;
  }
  // The last shard has had the new token since the step failed, and compares it.
  ExpectNear(sharded.Attend(step), Define(context, 148, 149, 149));
  EXPECT_THAT(sharded.lengths(), ElementsAre(149, 148));
}

TEST_F(ShardedCacheTest, AServerThatIsKilledIsNamed) {
  const Context context = DrawContext(8, 150);
  const std::unique_ptr<ServerProcess> victim = NewServer();
  const auto client =
      Connect(victim->grpc_address(), {.connections = 1, .retries = {.max_attempts = 1}});
  ShardedCache sharded = Create({{clients_[0].get(), 70}, {client.get(), 64}, {clients_[2].get()}});
  Append(sharded, context, 0, 149);
  ExpectNear(sharded.Attend({.q = context.q.view(148, 149)}), Define(context, 148, 149, 149));
  victim->Signal(SIGKILL);
  victim->Wait();
  const auto failed = sharded.Attend(Step(context, 149, 150));
  ExpectFails(failed, absl::StatusCode::kUnavailable, "");
  EXPECT_THAT(
      std::string(failed.status().message()),
      AllOf(HasSubstr("shard 1, tokens 70 to 133, cache "), HasSubstr(victim->grpc_address())));
  ASSERT_TRUE(sharded.Rebuild(1, *clients_[0]).ok());
  ASSERT_TRUE(sharded.Fill(1, {{0, context.k.view(70, 134), context.v.view(70, 134)}}).ok());
  ExpectNear(sharded.Attend(Step(context, 149, 150)), Define(context, 149, 150, 150));
}

TEST_F(ShardedCacheTest, TheLastShardIsNeededAgainToo) {
  const Context context = DrawContext(9, 80);
  ShardedCache sharded = Create({{clients_[0].get(), 70}, {clients_[1].get()}});
  Append(sharded, context, 0, 76);
  ASSERT_TRUE(sharded.Rebuild(1, *clients_[2]).ok());
  const auto shorter = sharded.Attend({.q = context.q.view(75, 76)});
  ExpectFails(shorter, absl::StatusCode::kFailedPrecondition, "");
  EXPECT_THAT(std::string(shorter.status().message()), HasSubstr("has 0 of 6 tokens of layer 0"));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      sharded.Append({{0, context.k.view(76, 77), context.v.view(76, 77)}})));
  ASSERT_TRUE(sharded.Fill(1, {{0, context.k.view(70, 76), context.v.view(70, 76)}}).ok());
  ExpectNear(sharded.Attend({.q = context.q.view(75, 76)}), Define(context, 75, 76, 76));
}

TEST_F(ShardedCacheTest, AShardMovesToAnotherServer) {
  const Context context = DrawContext(10, 150);
  CacheOptions options = TwoLayers();
  options.name = "AShardMovesToAnotherServer";
  ShardedCache sharded = Create({{clients_[0].get(), 70}, {clients_[1].get()}}, options);
  for (const int32_t layer : {0, 1}) Append(sharded, context, 0, 140, layer);
  const std::string before = sharded.cache(1).id();
  const auto from =
      ExportCache(*clients_[1], {.id = before, .generation = sharded.cache(1).generation()});
  const absl::Status moved = sharded.Rebuild(1, *clients_[2], *from);
  ASSERT_TRUE(moved.ok()) << moved;
  EXPECT_THAT(sharded.lengths(), ElementsAre(140, 140));
  ExpectFails(GetCaches(*clients_[1], {before}), absl::StatusCode::kNotFound, "closed");
  EXPECT_EQ(GetCaches(*clients_[2], {sharded.cache(1).id()})->caches[0].name,
            "AShardMovesToAnotherServer/1");
  ExpectNear(sharded.Attend(Step(context, 140, 150)), Define(context, 140, 150, 150));

  // The other shard begins elsewhere.
  const auto other = ExportCache(
      *clients_[0], {.id = sharded.cache(0).id(), .generation = sharded.cache(0).generation()});
  const absl::Status wrong = sharded.Rebuild(1, *clients_[1], *other);
  EXPECT_TRUE(absl::IsInvalidArgument(wrong)) << wrong;
  EXPECT_THAT(std::string(wrong.message()),
              HasSubstr("the cache begins at position 0; the shard begins at 70"));
  ExpectNear(sharded.Attend({.q = context.q.view(149, 150)}), Define(context, 149, 150, 150));
}

TEST_F(ShardedCacheTest, TruncatesAcrossShards) {
  const Context context = DrawContext(11, 150), other = DrawContext(12, 150);
  ShardedCache sharded = Create(ThreeShards());
  for (const int32_t layer : {0, 1}) Append(sharded, context, 0, 150, layer);
  const absl::Status long_cut = sharded.Truncate(151);
  EXPECT_TRUE(absl::IsOutOfRange(long_cut)) << long_cut;
  ASSERT_TRUE(sharded.Truncate(80).ok());
  EXPECT_THAT(sharded.lengths(), ElementsAre(80, 80));
  Context mixed = DrawContext(11, 150);
  for (int64_t token = 80; token < 150; ++token) {
    for (int64_t n = 0; n < kKvHeads * kSize; ++n) {
      const auto at = static_cast<size_t>(token * kKvHeads * kSize + n);
      mixed.k.values[at] = other.k.values[at];
    }
    for (int64_t n = 0; n < kKvHeads * kValueSize; ++n) {
      const auto at = static_cast<size_t>(token * kKvHeads * kValueSize + n);
      mixed.v.values[at] = other.v.values[at];
    }
  }
  const auto result = sharded.Attend(
      {.q = context.q.view(80, 150), .k = other.k.view(80, 150), .v = other.v.view(80, 150)});
  ExpectNear(result, Define(mixed, 80, 150, 150));
}

TEST_F(ShardedCacheTest, OtherTokensNeedATruncationAfterAFailedStep) {
  const Context context = DrawContext(13, 80), other = DrawContext(14, 80);
  ShardedCache sharded = Create({{clients_[0].get(), 70}, {clients_[1].get()}});
  Append(sharded, context, 0, 75);
  Lose(*clients_[0], sharded.cache(0).id());
  EXPECT_TRUE(absl::IsNotFound(sharded.Attend(Step(context, 75, 76)).status()));
  ASSERT_TRUE(sharded.Rebuild(0, *clients_[0]).ok());
  ASSERT_TRUE(sharded.Fill(0, {{0, context.k.view(0, 70), context.v.view(0, 70)}}).ok());
  ExpectFails(
      sharded.Attend(
          {.q = context.q.view(75, 76), .k = other.k.view(75, 76), .v = other.v.view(75, 76)}),
      absl::StatusCode::kAborted, "conflict");
  ASSERT_TRUE(sharded.Append({{1, context.k.view(0, 75), context.v.view(0, 75)}}).ok());
  ASSERT_TRUE(sharded.Truncate(75).ok());
  EXPECT_TRUE(
      sharded
          .Attend(
              {.q = context.q.view(75, 76), .k = other.k.view(75, 76), .v = other.v.view(75, 76)})
          .ok());
}

TEST_F(ShardedCacheTest, ANameFindsTheShardsAgain) {
  const Context context = DrawContext(15, 100);
  CacheOptions options = TwoLayers();
  options.name = "ANameFindsTheShardsAgain";
  ShardedCache first = Create(ThreeShards(), options);
  Append(first, context, 0, 90);
  ShardedCache second = Create(ThreeShards(), options);
  EXPECT_EQ(first.cache(1).id(), second.cache(1).id());
  EXPECT_THAT(second.lengths(), ElementsAre(90, 0));
  ExpectNear(second.Attend(Step(context, 90, 100)), Define(context, 90, 100, 100));
  const auto fewer = CreateShardedCache({{clients_[0].get(), 60}, {clients_[1].get()}}, options);
  EXPECT_FALSE(fewer.ok());
  // The caches are still there.
  ExpectNear(second.Attend({.q = context.q.view(99, 100)}), Define(context, 99, 100, 100));
}

TEST_F(ShardedCacheTest, AFailedRebuildLeavesTheCacheOfThisName) {
  const Context context = DrawContext(21, 80);
  CacheOptions options = TwoLayers();
  options.name = "AFailedRebuildLeavesTheCacheOfThisName";
  ShardedCache sharded = Create(ThreeShards(), options);
  Append(sharded, context, 0, 60);
  const auto found = GetCaches(*clients_[0], {sharded.cache(0).id()});
  ASSERT_TRUE(found.ok()) << found.status();
  Cache borrowed = BorrowCache(*clients_[0], found->caches[0]);
  ASSERT_TRUE(borrowed.Append(0, context.k.view(60, 80), context.v.view(60, 80)).ok());
  const absl::Status failed = sharded.Rebuild(0, *clients_[0]);
  EXPECT_TRUE(absl::IsInvalidArgument(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()),
              HasSubstr("the cache has 80 tokens; the shard holds 70"));
  ExpectNear(sharded.Attend({.q = context.q.view(59, 60)}), Define(context, 59, 60, 60));

  options.name += "/0";
  absl::StatusOr<Cache> elsewhere = CreateCache(*clients_[2], options);
  ASSERT_TRUE(elsewhere.ok()) << elsewhere.status();
  ASSERT_TRUE(elsewhere->Append(0, context.k.view(), context.v.view()).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(sharded.Rebuild(0, *clients_[2])));
  EXPECT_TRUE(elsewhere->Refresh().ok());
}

TEST_F(ShardedCacheTest, CopiesRestoreAContext) {
  const Context context = DrawContext(22, 150);
  ShardedCache saved = Create(ThreeShards()), restored = Create(ThreeShards());
  Append(saved, context, 0, 149);
  for (size_t n = 0; n < saved.shards(); ++n) {
    const auto from = ExportCache(
        *clients_[n], {.id = saved.cache(n).id(), .generation = saved.cache(n).generation()});
    const absl::Status rebuilt = restored.Rebuild(n, *clients_[n], *from);
    ASSERT_TRUE(rebuilt.ok()) << rebuilt;
  }
  EXPECT_THAT(restored.lengths(), ElementsAre(149, 0));
  ExpectNear(restored.Attend(Step(context, 149, 150)), Define(context, 149, 150, 150));
}

TEST_F(ShardedCacheTest, KnownShardsAreFilledInAnyOrder) {
  const Context context = DrawContext(16, 150);
  ShardedCache sharded = Create(ThreeShards());
  const auto fill = [&](size_t shard, int64_t begin, int64_t end) {
    return sharded.Fill(shard, {{0, context.k.view(begin, end), context.v.view(begin, end)}});
  };
  ASSERT_TRUE(fill(2, 134, 150).ok());
  ASSERT_TRUE(fill(0, 0, 70).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(sharded.Attend({.q = context.q.view(149, 150)}).status()));
  const absl::Status full = fill(1, 70, 140);
  EXPECT_TRUE(absl::IsOutOfRange(full)) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("it has room for 64 of 70 new tokens"));
  ASSERT_TRUE(fill(1, 70, 134).ok());
  ExpectNear(sharded.Attend({.q = context.q.view()}), Define(context, 0, 150, 150));
}

TEST_F(ShardedCacheTest, InvalidCallsNameTheField) {
  const Context context = DrawContext(17, 80, DType::kFloat16);
  CacheOptions options = TwoLayers();
  options.dtype = DType::kFloat16;
  const auto message = [](const auto& result) { return std::string(result.message()); };
  EXPECT_EQ(message(CreateShardedCache({}, options).status()),
            "shards has 0 entries; it must have 1 to 256");
  EXPECT_EQ(message(CreateShardedCache({{nullptr, 1}}, options).status()),
            "shards[0].server is null");
  EXPECT_EQ(
      message(
          CreateShardedCache({{clients_[0].get(), 0}, {clients_[1].get(), 0}}, options).status()),
      "shards[0].tokens is 0; it must be at least 1");
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(message(CreateShardedCache({{clients_[0].get(), most}, {clients_[1].get(), 1}}, options)
                        .status()),
            "the tokens of all shards, with first_position, exceed 64 bits");
  ShardedCache sharded = Create({{clients_[0].get(), 40}, {clients_[1].get(), 30}}, options);
  EXPECT_EQ(message(sharded.Attend({.layer = 2, .q = context.q.view()}).status()),
            "layer is 2; the caches have 2 layers");
  EXPECT_EQ(message(sharded.Append({})), "parts has 0 entries; it must have 1 to 1024");
  EXPECT_EQ(message(sharded.Append({{0, context.k.view(0, 2), context.v.view(0, 3)}})),
            "k has 2 tokens and v has 3; they must have as many");
  EXPECT_EQ(message(sharded.Append({{0, context.k.view(), context.v.view()}})),
            "the shards have room for 70 of 80 new tokens of layer 0");
  EXPECT_EQ(message(sharded.Attend({.q = context.q.view(), .output = DType::kFloat16}).status()),
            "output is FP16; it must be FP32 or absent, as results are merged");
  EXPECT_EQ(message(sharded.Truncate(-1)), "length is -1; it must be at least 0");
  EXPECT_EQ(message(sharded.Fill(2, {})), "shard is 2; there are 2");
  EXPECT_EQ(message(sharded.Rebuild(2, *clients_[0])), "shard is 2; there are 2");
  EXPECT_EQ(message(sharded.Append({{0, TensorView(), context.v.view()}})),
            "k has shape []; it must be [tokens, heads, size]");
  TensorView cut = context.k.view();
  cut.data.remove_suffix(1);
  EXPECT_THAT(message(sharded.Append({{0, cut, context.v.view()}})), HasSubstr("k "));
}

// Passes Create and Attend on to a real server; an Attend only once `together` have come.
class Meeting {
 public:
  explicit Meeting(int together) : together_(together) {}

  bool Wait() {
    MutexLock lock(mutex_);
    ++come_;
    changed_.SignalAll();
    while (come_ < together_) {
      if (!changed_.WaitFor(mutex_, std::chrono::seconds(30))) return false;
    }
    return true;
  }

 private:
  const int together_;
  Mutex mutex_;
  CondVar changed_;
  int come_ ABSL_GUARDED_BY(mutex_) = 0;
};

class Gate final : public CacheProxy {
 public:
  Gate(const std::string& address, Meeting& meeting) : CacheProxy(address), meeting_(meeting) {}
  ~Gate() override { Stop(); }

  grpc::Status Create(grpc::ServerContext* call, const v1::CreateRequest* request,
                      v1::Cache* response) override {
    grpc::ClientContext context;
    std::this_thread::sleep_for(pause);
    create_deadline = call->deadline();
    return stub().Create(&context, *request, response);
  }
  grpc::Status Get(grpc::ServerContext* call, const v1::Ids* request,
                   v1::Caches* response) override {
    grpc::ClientContext context;
    get_deadline = call->deadline();
    return stub().Get(&context, *request, response);
  }
  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest* request,
                      v1::AppendResponse* response) override {
    grpc::ClientContext context;
    grpc::Status status = stub().Append(&context, *request, response);
    return loses_appends ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost") : status;
  }
  grpc::Status Attend(grpc::ServerContext*, const v1::AttendCachedRequest* request,
                      v1::AttendCachedResponse* response) override {
    if (!meeting_.Wait()) return {grpc::StatusCode::INTERNAL, "the other call did not come"};
    grpc::ClientContext context;
    grpc::Status status = stub().Attend(&context, *request, response);
    if (breaks_lse) response->mutable_lse()->mutable_shape()->RemoveLast();
    return status;
  }

  bool breaks_lse = false;
  bool loses_appends = false;          // the replies
  std::chrono::milliseconds pause{0};  // of Create
  std::chrono::system_clock::time_point create_deadline, get_deadline;

 private:
  Meeting& meeting_;
};

TEST_F(ShardedCacheTest, ShardsAreAskedAtTheSameTime) {
  Meeting meeting(2);
  Gate a(servers_[0]->grpc_address(), meeting), b(servers_[1]->grpc_address(), meeting);
  const auto to_a = Connect(a.address()), to_b = Connect(b.address());
  const Context context = DrawContext(18, 75);
  ShardedCache sharded = Create({{to_a.get(), 70}, {to_b.get()}});
  Append(sharded, context, 0, 74);
  ExpectNear(sharded.Attend(Step(context, 74, 75)), Define(context, 74, 75, 75));
}

TEST_F(ShardedCacheTest, ACopyWithTokensOfAFailedCallDoesNotTakeThemTwice) {
  Meeting meeting(1);
  for (const int64_t before : {0, 3}) {
    SCOPED_TRACE(before);
    Gate gate(servers_[0]->grpc_address(), meeting);
    const auto to_gate =
        Connect(gate.address(), {.connections = 1, .retries = {.max_attempts = 1}});
    const Context context = DrawContext(23, before + 10);
    ShardedCache sharded = Create({{to_gate.get(), before + 5}, {clients_[1].get()}});
    if (before > 0) Append(sharded, context, 0, before);
    gate.loses_appends = true;
    const std::vector<CacheTokens> tokens = {
        {0, context.k.view(before, before + 10), context.v.view(before, before + 10)}};
    EXPECT_TRUE(absl::IsUnavailable(sharded.Append(tokens)));
    const auto from = ExportCache(
        *clients_[0], {.id = sharded.cache(0).id(), .generation = sharded.cache(0).generation()});
    const absl::Status moved = sharded.Rebuild(0, *clients_[2], *from);
    ASSERT_TRUE(moved.ok()) << moved;
    EXPECT_THAT(sharded.lengths(), ElementsAre(before, 0));
    const absl::Status again = sharded.Append(tokens);
    EXPECT_TRUE(again.ok()) << again;
    EXPECT_THAT(sharded.lengths(), ElementsAre(before + 10, 0));
    ExpectNear(sharded.Attend({.q = context.q.view()}),
               Define(context, 0, before + 10, before + 10));
  }
}

TEST_F(ShardedCacheTest, CallsOfARebuildHaveOneDeadline) {
  Meeting meeting(1);
  Gate gate(servers_[1]->grpc_address(), meeting);
  gate.pause = std::chrono::seconds(1);
  const auto to_gate = Connect(gate.address());
  ShardedCache sharded = Create({{clients_[0].get(), 70}, {clients_[1].get()}});
  // Of longer timeouts gRPC rounds the deadline to more.
  const absl::Status rebuilt = sharded.Rebuild(1, *to_gate, {.timeout = std::chrono::seconds(20)});
  ASSERT_TRUE(rebuilt.ok()) << rebuilt;
  EXPECT_LT(gate.get_deadline, gate.create_deadline + gate.pause / 2);
}

TEST_F(ShardedCacheTest, AMalformedPartIsNamed) {
  Meeting meeting(1);
  Gate bad(servers_[1]->grpc_address(), meeting);
  bad.breaks_lse = true;
  const auto to_bad = Connect(bad.address());
  const Context context = DrawContext(19, 75);
  ShardedCache sharded = Create({{clients_[0].get(), 70}, {to_bad.get()}});
  Append(sharded, context, 0, 75);
  const auto failed = sharded.Attend({.q = context.q.view(74, 75)});
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kInternal) << failed.status();
  EXPECT_THAT(std::string(failed.status().message()),
              AllOf(HasSubstr("shard 1, tokens 70 on, cache "), HasSubstr("malformed response")));
}

}  // namespace
}  // namespace rapt::client
