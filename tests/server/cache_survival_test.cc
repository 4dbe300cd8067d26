// What rapt.v1.CacheService of the real rapt-server must survive: the end of a lease during a long
// call, forks and truncations in every order, hostile numbers, a kill in mid-append, and SIGTERM
// under load.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <limits>
#include <memory>
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
using Stub = v1::CacheService::Stub;

constexpr int64_t kCacheBytes = 64 << 20, kBudgetBytes = 256 << 20, kOthers = 128 << 20;

class CacheSurvivalTest : public ::testing::Test, protected CacheCaller {
 protected:
  static void SetUpTestSuite() {
    server_ = new ServerProcess({"--threads=2", absl::StrCat("--kv_cache_bytes=", kCacheBytes),
                                 absl::StrCat("--memory_budget_bytes=", kBudgetBytes),
                                 "--grace_period=0s"});
    memory_ = new MemoryWatch(server_->pid());
  }
  static void TearDownTestSuite() {
    if (kRssIsMeaningful) {
      EXPECT_LE(memory_->peak(), kCacheBytes + kBudgetBytes + kOthers);
    }
    delete memory_;
    delete server_;
  }

  void SetUp() override { stub_ = StubOf(*server_); }

  static v1::Ids IdOf(const v1::Cache& cache) {
    v1::Ids ids;
    ids.add_caches(cache.id());
    return ids;
  }

  v1::Cache Fork(const v1::Cache& parent, int64_t length, int64_t lease_ms = 0) {
    v1::ForkRequest request;
    request.set_cache(parent.id());
    request.set_generation(parent.generation());
    request.set_length(length);
    request.set_lease_ms(lease_ms);
    v1::Cache fork;
    const grpc::Status status = Call(&Stub::Fork, request, fork);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return fork;
  }

  static ServerProcess* server_;
  static MemoryWatch* memory_;
};

ServerProcess* CacheSurvivalTest::server_ = nullptr;
MemoryWatch* CacheSurvivalTest::memory_ = nullptr;

TEST_F(CacheSurvivalTest, ALongCallOutlivesTheLeaseOfItsCache) {
  constexpr int64_t kTokens = 30000, kLeaseMs = 30;
  Rng rng(1);
  const v1::Cache parent = CreateCache(CreateOf(1));
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(parent, 0, 0, RandomTokens(kTokens, rng)), appended).ok());
  v1::Caches caches;
  // A call that the lease outlived is repeated with more rows.
  bool outlived = false;
  for (int rows = 500; !outlived; rows *= 2) {
    ASSERT_LE(rows, 64000);
    v1::AttendCachedRequest request = AttendOf(parent, 0, kTokens, {}, rows, rng);
    v1::AttendCachedResponse want, got;
    ASSERT_TRUE(Attend(request, want).ok());
    const v1::Cache fork = Fork(parent, kTokens, kLeaseMs);
    request.mutable_items(0)->set_cache(fork.id());
    grpc::Status status;
    std::atomic<bool> has_returned{false};
    std::thread caller([&] {
      grpc::ClientContext context;
      status = stub_->Attend(&context, request, &got);
      has_returned = true;
    });
    while (Call(&Stub::Get, IdOf(fork), caches).ok()) std::this_thread::yield();
    EXPECT_EQ(reason_, "expired");
    outlived = !has_returned;
    caller.join();
    if (status.error_code() == StatusCode::NOT_FOUND) {  // it came too late
      outlived = false;
      continue;
    }
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(got.y().data(), want.y().data());
  }
  ASSERT_TRUE(Call(&Stub::Close, IdOf(parent), caches).ok());
  WaitForMetric(*server_, "rapt_kv_used_bytes", 0);
}

TEST_F(CacheSurvivalTest, AForkAndItsParentPartInEveryOrder) {
  enum class Step { kAppendToParent, kAppendToFork, kTruncateParent };
  Rng rng(2);
  for (const int64_t prompt : {70, 128}) {
    for (const int64_t cut : {0, 64, 65}) {
      std::vector<Step> order = {Step::kAppendToParent, Step::kAppendToFork, Step::kTruncateParent};
      do {
        SCOPED_TRACE(absl::StrCat("prompt ", prompt, ", cut ", cut, ", order ",
                                  static_cast<int>(order[0]), static_cast<int>(order[1]),
                                  static_cast<int>(order[2])));
        v1::Cache parent = CreateCache(CreateOf(1));
        LayerModel parent_model{RandomTokens(prompt, rng)};
        v1::AppendResponse appended;
        ASSERT_TRUE(Append(AppendOf(parent, 0, 0, parent_model.tokens), appended).ok());
        const v1::Cache fork = Fork(parent, prompt);
        LayerModel fork_model = parent_model;
        const auto append = [&](const v1::Cache& cache, LayerModel& model) {
          const Tokens more = RandomTokens(3, rng);
          const grpc::Status status =
              Append(AppendOf(cache, 0, model.tokens.count(), more), appended);
          ASSERT_TRUE(status.ok()) << status.error_message();
          model.tokens.Add(more);
        };
        const auto expect = [&](const v1::Cache& cache, const LayerModel& model) {
          const int64_t length = model.tokens.count();
          if (length == 0) return;
          const v1::AttendCachedRequest request = AttendOf(cache, 0, length, {}, 1, rng);
          v1::AttendCachedResponse response;
          ASSERT_TRUE(Attend(request, response).ok());
          const std::vector<float> q = Values(request.q());
          ExpectClose(response.y(), Define(model, length, 0, length - 1, 1, q.data(), {}).y, "y");
        };
        for (const Step step : order) {
          if (step == Step::kAppendToParent) append(parent, parent_model);
          if (step == Step::kAppendToFork) append(fork, fork_model);
          if (step == Step::kTruncateParent) {
            v1::TruncateRequest request;
            request.set_cache(parent.id());
            request.set_generation(parent.generation());
            request.set_length(cut);
            ASSERT_TRUE(Call(&Stub::Truncate, request, parent).ok());
            parent_model.tokens.Resize(cut);
          }
          expect(parent, parent_model);
          expect(fork, fork_model);
        }
        v1::Caches closed;
        v1::Ids both = IdOf(parent);
        both.add_caches(fork.id());
        ASSERT_TRUE(Call(&Stub::Close, both, closed).ok());
        if (HasFatalFailure()) return;
      } while (std::next_permutation(order.begin(), order.end()));
    }
  }
}

TEST_F(CacheSurvivalTest, HostileNumbersAreRefusedAndChangeNothing) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Rng rng(5);
  const v1::Cache cache = CreateCache(CreateOf(1));
  LayerModel model{RandomTokens(10, rng)};
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(cache, 0, 0, model.tokens), appended).ok());
  const double used = ReadMetric(*server_, "rapt_kv_used_bytes");
  const auto refused = [&](const grpc::Status& status, const std::string& what) {
    const StatusCode codes[] = {StatusCode::INVALID_ARGUMENT, StatusCode::OUT_OF_RANGE,
                                StatusCode::RESOURCE_EXHAUSTED, StatusCode::ABORTED};
    EXPECT_THAT(codes, ::testing::Contains(status.error_code()))
        << what << ": " << status.error_message();
  };
  for (const int64_t number :
       {kLeast, int64_t{-1}, (int64_t{1} << 40) + 1, int64_t{1} << 62, kMost}) {
    const auto text = [&](const char* field) { return absl::StrCat(field, " ", number); };
    const auto create = [&](const char* field, const auto& change) {
      v1::CreateRequest request = CreateOf(1);
      change(request);
      v1::Cache made;
      refused(Create(request, made), text(field));
    };
    // Sizes whose bytes can be counted are no error before a token comes.
    const int64_t size = number > 0 ? std::max(number, int64_t{1} << 62) : number;
    create("kv_heads", [&](auto& r) { r.mutable_shapes(0)->set_kv_heads(size); });
    create("head_size", [&](auto& r) { r.mutable_shapes(0)->set_head_size(size); });
    create("value_head_size", [&](auto& r) { r.mutable_shapes(0)->set_value_head_size(size); });
    create("layers",
           [&](auto& r) { r.mutable_shapes(0)->set_layers(static_cast<int>(number | 1 << 20)); });
    create("reserve_tokens", [&](auto& r) { r.set_reserve_tokens(number); });
    v1::Cache answer;
    v1::ForkRequest fork;
    fork.set_cache(cache.id());
    fork.set_generation(1);
    fork.set_length(number);
    refused(Call(&Stub::Fork, fork, answer), text("fork length"));
    v1::TruncateRequest truncate;
    truncate.set_cache(cache.id());
    truncate.set_generation(1);
    truncate.set_length(number);
    refused(Call(&Stub::Truncate, truncate, answer), text("truncate length"));
    const Tokens one = RandomTokens(1, rng);
    v1::AppendRequest append = AppendOf(cache, 0, number, one);
    refused(Append(append, appended), text("at"));
    append.mutable_parts(0)->set_at(10);
    append.mutable_parts(0)->mutable_k()->mutable_shape()->Set(0, number);
    refused(Append(append, appended), text("tokens"));
    v1::AttendCachedRequest attend = AttendOf(cache, 0, number, {}, 1, rng);
    v1::AttendCachedResponse attended;
    refused(Attend(attend, attended), text("attend at"));
    attend.mutable_items(0)->set_at(10);
    attend.mutable_items(0)->set_rows(static_cast<int>(number | 1 << 20));
    refused(Attend(attend, attended), text("rows"));
    attend.mutable_q()->mutable_shape()->Set(0, number);
    refused(Attend(attend, attended), text("q rows"));
  }
  EXPECT_EQ(ReadMetric(*server_, "rapt_kv_used_bytes"), used);
  const v1::AttendCachedRequest request = AttendOf(cache, 0, 10, {}, 1, rng);
  v1::AttendCachedResponse response;
  ASSERT_TRUE(Attend(request, response).ok());
  const std::vector<float> q = Values(request.q());
  ExpectClose(response.y(), Define(model, 10, 0, 9, 1, q.data(), {}).y, "y");
  v1::Caches closed;
  ASSERT_TRUE(Call(&Stub::Close, IdOf(cache), closed).ok());
}

TEST_F(CacheSurvivalTest, AKillInMidAppendLeavesNothingBehind) {
  const std::vector<std::string> flags = {"--kv_cache_bytes=67108864", "--instance_name=again",
                                          "--grace_period=0s"};
  Rng rng(3);
  v1::Cache cache;
  const Tokens tokens = RandomTokens(40000, rng);
  {
    ServerProcess first(flags);
    stub_ = StubOf(first);
    cache = CreateCache(CreateOf(1));
    std::atomic<int> sent{0};
    grpc::Status status;
    std::thread caller([&] {
      v1::AppendResponse response;
      do {
        // Again and again the first tokens: the server compares them.
        const v1::AppendRequest request = AppendOf(cache, 0, 0, tokens);
        grpc::ClientContext context;
        ++sent;
        status = stub_->Append(&context, request, &response);
      } while (status.ok());
    });
    while (sent < 3) std::this_thread::yield();
    first.Signal(SIGKILL);
    first.Wait();
    caller.join();
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
  }
  const ServerProcess second(flags);
  stub_ = StubOf(second);
  v1::AppendResponse response;
  ExpectFails(Append(AppendOf(cache, 0, 0, tokens), response), StatusCode::NOT_FOUND, "restarted");
  EXPECT_EQ(ReadMetric(second, "rapt_kv_caches"), 0);
  EXPECT_EQ(ReadMetric(second, "rapt_kv_used_bytes"), 0);
  // Prefilled again, it answers.
  cache = CreateCache(CreateOf(1));
  ASSERT_TRUE(Append(AppendOf(cache, 0, 0, tokens), response).ok());
  const v1::AttendCachedRequest request = AttendOf(cache, 0, tokens.count(), {}, 1, rng);
  v1::AttendCachedResponse answer;
  ASSERT_TRUE(Attend(request, answer).ok());
  const std::vector<float> q = Values(request.q());
  ExpectClose(answer.y(),
              Define({tokens}, tokens.count(), 0, tokens.count() - 1, 1, q.data(), {}).y, "y");
}

TEST_F(CacheSurvivalTest, SigtermUnderLoadLosesNoStep) {
  constexpr int kCallers = 4;
  ServerProcess server({"--threads=2", "--kv_cache_bytes=67108864", "--grace_period=60s"});
  stub_ = StubOf(server);
  std::atomic<int> steps{0};
  std::atomic<bool> is_draining{false};
  std::vector<std::thread> callers;
  for (int n = 0; n < kCallers; ++n) {
    const v1::Cache cache = CreateCache(CreateOf(1));
    callers.emplace_back([&, n, cache] {
      const auto stub = StubOf(server);
      Rng rng(static_cast<uint64_t>(10 + n));
      LayerModel model;
      // Some steps after the server has refused a new cache, then the cache is closed.
      for (int left = 10; left > 0; left -= is_draining ? 1 : 0) {
        const Tokens next = RandomTokens(1, rng);
        const int64_t at = model.tokens.count();
        const v1::AttendCachedRequest request = AttendOf(cache, 0, at, next, 1, rng);
        model.tokens.Add(next);
        grpc::ClientContext context;
        v1::AttendCachedResponse response;
        const grpc::Status status = stub->Attend(&context, request, &response);
        ASSERT_TRUE(status.ok()) << status.error_message();
        const std::vector<float> q = Values(request.q());
        ExpectClose(response.y(), Define(model, at + 1, 0, at, 1, q.data(), {}).y, "y");
        ++steps;
      }
      grpc::ClientContext context;
      v1::Caches closed;
      EXPECT_TRUE(stub->Close(&context, IdOf(cache), &closed).ok());
    });
  }
  while (steps < 10 * kCallers) std::this_thread::yield();
  server.Terminate();
  v1::Cache refused;
  while (Create(CreateOf(1), refused).ok()) {
    v1::Caches closed;
    EXPECT_TRUE(Call(&Stub::Close, IdOf(refused), closed).ok());
  }
  EXPECT_EQ(reason_, "draining");
  is_draining = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(server.Wait(), 0);
}

}  // namespace
}  // namespace rapt::test
