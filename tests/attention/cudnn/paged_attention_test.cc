// Pages on a device that is small, fails, or does not support a call. That results are right, too,
// for any lengths and sizes is tested by ragged_pages_test.cc.
#include "attention/cudnn/paged_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_device.h"
#include "tests/support/paged_caches.h"

namespace rapt::cudnn {
namespace {

using test::FakeDevice;
using test::LastRows;
using test::PagedCaches;
using test::PagedResult;
using ::testing::HasSubstr;

constexpr int64_t kArenaBytes = 1 << 20;
// Of SmallShape(): 2 heads of 16 + 8 numbers.
constexpr int64_t kRowBytes = 2 * 24 * 2;
constexpr int64_t kPageBytes = 64 * kRowBytes;

class PagedAttentionTest : public ::testing::Test {
 protected:
  void Start(int64_t page_memory_bytes = int64_t{16} * 16 * kPageBytes,
             int64_t arena_bytes = kArenaBytes, BackendOptions options = {}) {
    backend_.Start(
        std::make_unique<FakeDevice>(controls_, /*lanes=*/2, arena_bytes, page_memory_bytes),
        CpuBackend(), clock_, std::move(options));
  }

  PlanOptions Options(const std::string& backend = "cudnn") const {
    return {.backend = backend, .threads = 2, .has_lanes = true, .backends = &backends_};
  }

  // Runs the call, checks its results and returns the names of its backends.
  std::string Run(const RaggedCall& call, const PagedCaches& caches,
                  const std::string& backend = "cudnn") {
    const PagedResult result = RunPaged(call, caches, Options(backend));
    ExpectMatches(call, caches, result);
    return result.backends;
  }

  // Returns the routing that "auto" chooses.
  Routing Auto(const RaggedCall& call, const PagedCaches& caches) {
    return MakePlan(*MakeRaggedAttention(call, caches).value(), Options("auto"))->routing;
  }

  PagePool::Counts Pages() const { return backend_.state().pages; }

  FakeDevice::Controls controls_;
  test::FakeClock clock_;
  CudnnBackend backend_;
  const BackendSet backends_{{&backend_}};
  RaggedCall call_ = test::SmallShape();
  PagedCaches caches_{call_, 1};
};

TEST_F(PagedAttentionTest, AStepMovesOnlyTheTokensThatTheDeviceLacks) {
  Start();
  caches_.Add(130);
  caches_.Add(64);
  call_.items = LastRows(caches_, {1, 1});
  EXPECT_EQ(Run(call_, caches_), "cudnn");
  EXPECT_EQ(controls_.sent_page_bytes, 4 * kPageBytes) << "whole pages at first";
  EXPECT_EQ(controls_.runs, 1) << "items of one row share a run";
  Run(call_, caches_);
  EXPECT_EQ(controls_.sent_page_bytes, 4 * kPageBytes) << "nothing again";
  caches_.Append(0, 3);
  call_.items = LastRows(caches_, {1, 1});
  Run(call_, caches_);
  EXPECT_EQ(controls_.sent_page_bytes, 4 * kPageBytes + 3 * kRowBytes);
  caches_.Append(1, 1);
  call_.items = LastRows(caches_, {1, 1});
  Run(call_, caches_);
  EXPECT_EQ(controls_.sent_page_bytes, 5 * kPageBytes + 3 * kRowBytes) << "a new page";
  EXPECT_EQ(Pages().copied_bytes, controls_.sent_page_bytes);
  EXPECT_EQ(Pages().resident_bytes, 5 * kPageBytes);
}

TEST_F(PagedAttentionTest, ForksShareTheCopiesOfTheirPages) {
  Start();
  caches_.Add(200);
  caches_.Fork(0, 200);
  caches_.Fork(0, 128);
  call_.items = LastRows(caches_, {1, 1, 1});
  Run(call_, caches_);
  EXPECT_EQ(controls_.sent_page_bytes, 4 * kPageBytes);
  caches_.Append(1, 1);
  call_.items = LastRows(caches_, {1, 1, 1});
  Run(call_, caches_);
  EXPECT_EQ(controls_.sent_page_bytes, 5 * kPageBytes) << "the fork wrote a page of its own";
}

TEST_F(PagedAttentionTest, NeverReadsThePagesOfAFreedCache) {
  Start();
  const auto fresh = [&](uint64_t seed) {
    PagedCaches caches(call_, seed);
    caches.Add(100);
    call_.items = LastRows(caches, {1});
    Run(call_, caches);
  };
  // Memory of the host is used again.
  for (uint64_t seed = 1; seed < 30; ++seed) fresh(seed);
  EXPECT_EQ(Pages().hits, 0);
}

TEST_F(PagedAttentionTest, OldPagesMakeRoom) {
  Start(/*page_memory_bytes=*/16 * kPageBytes);
  ASSERT_EQ(PagePool(16 * kPageBytes).CapacityOf(kPageBytes), 16);
  for (int n = 0; n < 5; ++n) caches_.Add(6 * 64);
  RaggedCall one = call_;
  for (int round = 0; round < 2; ++round) {
    for (int64_t n = 0; n < 5; ++n) {
      std::vector<int64_t> rows(5, 0);
      rows[n] = 1;
      one.items = LastRows(caches_, rows);
      // Items without rows read nothing.
      for (int64_t other = 0; other < 5; ++other) {
        if (other != n) one.items[other].keys = one.items[other].position = 0;
      }
      EXPECT_EQ(Run(one, caches_), "cudnn");
    }
  }
  EXPECT_EQ(Pages().resident_bytes, 12 * kPageBytes + 4 * kPageBytes);
  EXPECT_GT(Pages().evictions, 0);
}

TEST_F(PagedAttentionTest, DeclinesACallWithMorePagesThanFit) {
  Start(/*page_memory_bytes=*/16 * kPageBytes);
  caches_.Add(17 * 64);
  call_.items = LastRows(caches_, {1});
  EXPECT_EQ(Run(call_, caches_), "cpu");
  EXPECT_THAT(std::string(backend_.ragged()->Supports(call_).message()),
              HasSubstr("the call reads 17 pages of 6144 bytes; the device holds 16"));
  caches_.Fork(0, 8 * 64);
  caches_.Truncate(0, 10 * 64);
  call_.items = LastRows(caches_, {1, 1});
  EXPECT_FALSE(backend_.ragged()->Supports(call_).ok());
  call_.prefixes = {{.tokens = 8 * 64, .items = {0, 1}}};
  EXPECT_EQ(Run(call_, caches_), "cudnn") << "pages of a prefix count once";
}

TEST_F(PagedAttentionTest, DividesACallThatExceedsALane) {
  Start(/*page_memory_bytes=*/int64_t{16} * 64 * kPageBytes, /*arena_bytes=*/12 << 10);
  for (int n = 0; n < 40; ++n) caches_.Add(10);
  call_.items = LastRows(caches_, std::vector<int64_t>(40, 1));
  EXPECT_EQ(Run(call_, caches_), "cudnn");
  EXPECT_GT(controls_.runs, 1);
  EXPECT_LE(controls_.most_bytes, 12 << 10);
  PagedCaches one(call_, 2);
  one.Add(500);
  call_.items = LastRows(one, {500});
  EXPECT_EQ(Run(call_, one), "cpu");
  EXPECT_THAT(std::string(backend_.ragged()->Supports(call_).message()),
              HasSubstr("an item exceeds the"));
}

TEST_F(PagedAttentionTest, SendsMorePagesThanALaneHoldsInParts) {
  Start(/*page_memory_bytes=*/int64_t{16} * 16 * kPageBytes, /*arena_bytes=*/32 << 10);
  caches_.Add(20 * 64);
  call_.items = LastRows(caches_, {1});
  EXPECT_EQ(Run(call_, caches_), "cudnn");
  EXPECT_EQ(controls_.sent_page_bytes, 20 * kPageBytes);
}

TEST_F(PagedAttentionTest, TheCpuComputesWhatTheDeviceFailsTo) {
  Start();
  for (const int64_t tokens : {100, 30, 70}) caches_.Add(tokens);
  call_.items = LastRows(caches_, {1, 30, 1});
  for (int failures = 1; failures <= 2; ++failures) {  // while sending, and while running
    SCOPED_TRACE(failures);
    controls_.failures = 1;
    EXPECT_EQ(Run(call_, caches_), "cudnn+cpu");
    clock_.Advance(DeviceHealth::kFirstBackoff);
    EXPECT_EQ(Run(call_, caches_), "cudnn") << "it restarted and has all pages again";
    EXPECT_EQ(controls_.restarts, failures);
  }
  EXPECT_GE(backend_.state().fallback_pieces[static_cast<size_t>(FallbackReason::kDevice)], 2);
}

TEST_F(PagedAttentionTest, TheCpuComputesOneHeadsFirstItem) {
  Start();
  caches_.Add(50);
  call_.items = LastRows(caches_, {3});
  call_.heads_first = call_.lse_heads_first = true;
  controls_.failures = 1;
  const PagedResult result = RunPaged(call_, caches_, Options());
  EXPECT_EQ(result.backends, "cudnn+cpu");
  ExpectMatches(call_, caches_, result);
}

TEST_F(PagedAttentionTest, TheCpuComputesNumbersThatAreNotFinite) {
  Start();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  caches_.Add(100);
  caches_.AppendNumber(0, kInfinity);
  caches_.Add(20);
  call_.items = LastRows(caches_, {1, 1});
  call_.items[0].position -= 1;  // sees all but the last token
  EXPECT_EQ(Run(call_, caches_), "cudnn") << "the last token is not sent";
  call_.items[0].position += 1;
  EXPECT_EQ(RunPaged(call_, caches_, Options()).backends, "cudnn+cpu");
  EXPECT_EQ(RunPaged(call_, caches_, Options()).backends, "cudnn+cpu") << "it is remembered";
  EXPECT_EQ(backend_.state().fallback_pieces[static_cast<size_t>(FallbackReason::kNumbers)], 2);
  EXPECT_TRUE(backend_.state().healthy);
}

TEST_F(PagedAttentionTest, TheCpuComputesWithoutKernelsOrMemoryForThem) {
  Start();
  caches_.Add(100);
  call_.items = LastRows(caches_, {1});
  controls_.workspace_bytes = kArenaBytes;
  EXPECT_EQ(Run(call_, caches_), "cudnn+cpu");
  EXPECT_EQ(backend_.state().fallback_pieces[static_cast<size_t>(FallbackReason::kMemory)], 1);
  controls_.declines = true;
  call_.items = LastRows(caches_, {2});
  EXPECT_EQ(Run(call_, caches_), "cudnn+cpu");
  EXPECT_EQ(backend_.state().fallback_pieces[static_cast<size_t>(FallbackReason::kKernels)], 1);
}

TEST_F(PagedAttentionTest, AutoChoosesTheDeviceOnceItsKernelsAreCompiled) {
  Start();
  caches_.Add(100);
  call_.items = LastRows(caches_, {1});
  const Routing before = Auto(call_, caches_);
  EXPECT_EQ(NamesOf(before), "cpu");
  ASSERT_NE(before.declined, nullptr);
  EXPECT_TRUE(before.declined_for_now);
  MakeRaggedAttention(call_, caches_).value()->PrepareOn(*before.declined);
  Run(call_, caches_);  // waits for the kernels
  EXPECT_EQ(controls_.compilations, 1);
  EXPECT_EQ(NamesOf(Auto(call_, caches_)), "cudnn");
  controls_.failures = 1;
  caches_.Append(0, 1);
  call_.items = LastRows(caches_, {1});
  EXPECT_EQ(Run(call_, caches_, "auto"), "cudnn+cpu");
  EXPECT_TRUE(Auto(call_, caches_).declined_for_now);
}

TEST_F(PagedAttentionTest, AutoLeavesSmallCallsToTheCpu) {
  Start(int64_t{16} * 16 * kPageBytes, kArenaBytes, {.min_flops = 1e9});
  caches_.Add(100);
  call_.items = LastRows(caches_, {1});
  Run(call_, caches_);
  const Routing routing = Auto(call_, caches_);
  EXPECT_EQ(NamesOf(routing), "cpu");
  EXPECT_EQ(routing.declined, nullptr) << "a choice is no fallback";
}

TEST_F(PagedAttentionTest, ADeviceWithoutMemoryForPagesIsNotAsked) {
  Start(/*page_memory_bytes=*/0);
  caches_.Add(100);
  call_.items = LastRows(caches_, {1});
  EXPECT_EQ(Run(call_, caches_), "cpu");
  EXPECT_EQ(Auto(call_, caches_).declined, nullptr);
}

TEST_F(PagedAttentionTest, NeedsThreadsForItsLanes) {
  Start();
  caches_.Add(100);
  call_.items = LastRows(caches_, {1});
  PlanOptions options = Options();
  options.has_lanes = false;
  EXPECT_EQ(RunPaged(call_, caches_, options).backends, "cpu");
}

struct Declined {
  const char* name;
  std::function<void(RaggedCall&)> change;
  const char* reason;
};

void PrintTo(const Declined& declined, std::ostream* out) { *out << declined.name; }

class PagedAttentionDeclinesTest : public PagedAttentionTest,
                                   public ::testing::WithParamInterface<Declined> {};

TEST_P(PagedAttentionDeclinesTest, ByName) {
  Start();
  caches_.Add(100);
  call_.items = LastRows(caches_, {2});
  ASSERT_TRUE(backend_.ragged()->Supports(call_).ok());
  GetParam().change(call_);
  const absl::Status status = backend_.ragged()->Supports(call_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().reason));
  const Routing routing = Auto(call_, caches_);
  EXPECT_EQ(NamesOf(routing), "cpu");
  EXPECT_EQ(routing.declined, &backend_);
  EXPECT_FALSE(routing.declined_for_now);
}

INSTANTIATE_TEST_SUITE_P(
    , PagedAttentionDeclinesTest,
    ::testing::Values(
        Declined{"Fp64", [](RaggedCall& c) { c.dtype = DType::kFloat64; }, "pages of FP64"},
        Declined{"EightBits", [](RaggedCall& c) { c.q8_0 = true; }, "keys and values in 8 bits"},
        Declined{"OddHeadSize", [](RaggedCall& c) { c.head_size = 12; }, "a head size of 12"},
        Declined{"LargeHeadSize", [](RaggedCall& c) { c.value_head_size = 264; },
                 "a head size of 264"},
        Declined{"Softcap", [](RaggedCall& c) { c.softcap = 30; }, "a softcap over pages"},
        Declined{"HeadSink", [](RaggedCall& c) { c.head_sink = DType::kFloat32; }, "head_sink"},
        Declined{"OtherOutput", [](RaggedCall& c) { c.output = DType::kFloat32; },
                 "outputs of another type, FP32"},
        Declined{"TinyScale", [](RaggedCall& c) { c.scale = 1e-31; }, "a scale"},
        Declined{"Sinks",
                 [](RaggedCall& c) { c.items[0].left_window = 50, c.items[0].first_keys = 4; },
                 "first_keys with a window"},
        Declined{"AWindowBeyondTheTokens",
                 [](RaggedCall& c) {
                   c.items[0] = {1, 100, 120, 0, 50};
                 },
                 "rows before the first token or beyond the last"},
        Declined{"RowsBeyondTheTokens", [](RaggedCall& c) { c.items[0].position = 99; },
                 "rows before the first token or beyond the last"},
        Declined{"RowsBeforeTheTokens", [](RaggedCall& c) { c.items[0].position = -1; },
                 "rows before the first token or beyond the last"},
        Declined{"PagesOfOddSizes", [](RaggedCall& c) { c.page_rows = 48; }, "pages of 48 tokens"}),
    [](const auto& info) { return std::string(info.param.name); });

// Calls on shared pages from several threads, which fill, evict and fail.
TEST_F(PagedAttentionTest, ServesSeveralThreads) {
  Start(/*page_memory_bytes=*/16 * kPageBytes);
  for (const int64_t tokens : {300, 500, 64, 400}) caches_.Add(tokens);
  caches_.Fork(1, 450);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([this, thread] {
      for (int n = 0; n < 20; ++n) {
        std::vector<int64_t> rows(5, 0);
        rows[(thread + n) % 5] = 1;
        rows[(thread + 2 * n) % 5] = 1;
        RaggedCall call = call_;
        call.items = LastRows(caches_, rows);
        for (RaggedItem& item : call.items) {
          if (item.rows == 0) item.keys = item.position = 0;
        }
        if (n == 10) controls_.failures = 1;
        clock_.Advance(std::chrono::milliseconds(200));
        Run(call, caches_);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(Pages().evictions, 0);
}

}  // namespace
}  // namespace rapt::cudnn
