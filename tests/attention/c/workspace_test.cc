// A run uses the workspace that its plan states: it writes no byte beyond it, leaves no large part
// of it unused, and allocates nothing. Every allocation of the process, including those of the
// shared library, goes through the functions below.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "rapt/attention.h"

namespace {

std::atomic<bool> g_counting{false};
std::atomic<int64_t> g_allocations{0};

void CountAllocation() {
  if (g_counting.load(std::memory_order_relaxed)) g_allocations.fetch_add(1);
}

}  // namespace

extern "C" {

// glibc's implementations.
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  CountAllocation();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  CountAllocation();
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  CountAllocation();
  return __libc_realloc(memory, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  CountAllocation();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, size_t alignment, size_t size) {
  CountAllocation();
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}

}  // extern "C"

namespace {

constexpr size_t kGuardBytes = 1 << 16;
constexpr unsigned char kUntouched = 0xA5;

// The effects of a run on its workspace.
struct Use {
  int64_t allocations = 0;
  bool guards_intact = false;
  size_t written_end = 0;  // one past the last modified byte
};

struct Shape {
  const char* name;
  int64_t threads;
  int32_t dtype;
  int64_t batch, query_heads, kv_heads, query_length, key_length, head_size;
  int32_t causal = 0;
  int32_t score_output = RAPT_NO_SCORES;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.name; }

rapt_problem ProblemOf(const Shape& shape) {
  rapt_problem p = {};
  p.struct_size = sizeof(p);
  p.dtype = shape.dtype;
  p.causal = shape.causal;
  p.batch = shape.batch;
  p.query_heads = shape.query_heads;
  p.kv_heads = shape.kv_heads;
  p.query_length = shape.query_length;
  p.key_length = shape.key_length;
  p.head_size = p.value_head_size = shape.head_size;
  p.score_output = shape.score_output;
  return p;
}

class WorkspaceTest : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const rapt_context_options options = {sizeof(options), GetParam().threads, nullptr, nullptr};
    ASSERT_EQ(rapt_context_create(&options, &context_, nullptr, 0), RAPT_OK);
    const rapt_problem p = ProblemOf(GetParam());
    ASSERT_EQ(rapt_plan_create(context_, &p, &plan_, nullptr, 0), RAPT_OK);
    const auto elements = [](int64_t b, int64_t h, int64_t s, int64_t e) {
      return static_cast<size_t>(b * h * s * e * 8);  // of the widest type
    };
    query_.resize(elements(p.batch, p.query_heads, p.query_length, p.head_size));
    key_.resize(elements(p.batch, p.kv_heads, p.key_length, p.head_size));
    output_.resize(query_.size());
    scores_.resize(elements(p.batch, p.query_heads, p.query_length, p.key_length));
  }

  void TearDown() override {
    rapt_plan_destroy(plan_);
    rapt_context_destroy(context_);
  }

  Use RunOnce() {
    const size_t bytes = rapt_plan_workspace_bytes(plan_);
    auto* block = static_cast<unsigned char*>(__libc_memalign(64, bytes + 2 * kGuardBytes));
    std::fill_n(block, bytes + 2 * kGuardBytes, kUntouched);
    unsigned char* const workspace = block + kGuardBytes;
    rapt_arguments a = {};
    a.struct_size = sizeof(a);
    a.query.data = query_.data();
    a.key.data = key_.data();
    a.value.data = key_.data();
    a.output.data = output_.data();
    a.scores.data = scores_.data();

    Use use;
    g_allocations = 0;
    g_counting = true;
    const rapt_code code = rapt_run(context_, plan_, &a, workspace, bytes, nullptr, 0);
    g_counting = false;
    EXPECT_EQ(code, RAPT_OK);
    use.allocations = g_allocations;
    const auto untouched = [](unsigned char byte) { return byte == kUntouched; };
    use.guards_intact = std::all_of(block, workspace, untouched) &&
                        std::all_of(workspace + bytes, workspace + bytes + kGuardBytes, untouched);
    use.written_end = bytes;
    while (use.written_end > 0 && untouched(workspace[use.written_end - 1])) --use.written_end;
    free(block);
    return use;
  }

  rapt_context* context_ = nullptr;
  rapt_plan* plan_ = nullptr;
  std::vector<unsigned char> query_, key_, output_, scores_;
};

TEST_P(WorkspaceTest, IsExactlyWhatARunNeeds) {
  const size_t planned = rapt_plan_workspace_bytes(plan_);
  const Use use = RunOnce();
  EXPECT_EQ(use.allocations, 0);
  EXPECT_TRUE(use.guards_intact) << "of " << planned << " bytes";
  // With several threads, some may start too late to do any work.
  if (GetParam().threads == 1) {
    EXPECT_GT(use.written_end, planned / 2);
  }
  std::printf("%s: %zu bytes planned, written up to %zu\n", rapt_plan_description(plan_), planned,
              use.written_end);
}

// The address space suffices for the stacks of only a few threads; those that started are joined.
TEST(ContextDeathTest, CreationFailsIfThreadsCannotBeStarted) {
  const auto create = [] {
    constexpr rlim_t kBytes = rlim_t{1} << 30;
    const rlimit limit = {kBytes, kBytes};
    setrlimit(RLIMIT_AS, &limit);
    const rapt_context_options options = {sizeof(options), 1024, nullptr, nullptr};
    rapt_context* context = nullptr;
    char message[RAPT_MESSAGE_BYTES] = "";
    const rapt_code code = rapt_context_create(&options, &context, message, sizeof(message));
    std::fprintf(stderr, "%s\n", message);
    std::_Exit(code == RAPT_RESOURCE_EXHAUSTED && context == nullptr ? 0 : 1);
  };
  EXPECT_EXIT(create(), testing::ExitedWithCode(0), "unavailable");
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, WorkspaceTest,
    testing::Values(Shape{"tiny", 1, RAPT_FP32, 1, 1, 1, 16, 16, 64},
                    Shape{"prefill", 1, RAPT_FP32, 1, 8, 8, 512, 512, 64},
                    Shape{"prefill_on_threads", 4, RAPT_FP32, 1, 8, 8, 512, 512, 128},
                    Shape{"prefill_bf16", 1, RAPT_BF16, 1, 8, 8, 512, 512, 64},
                    Shape{"prefill_fp16", 1, RAPT_FP16, 1, 8, 8, 512, 512, 64},
                    Shape{"prefill_fp64", 1, RAPT_FP64, 1, 2, 2, 512, 512, 64},
                    Shape{"causal", 2, RAPT_FP32, 1, 8, 8, 500, 500, 80, 1},
                    Shape{"decode", 2, RAPT_FP32, 4, 8, 2, 1, 1000, 128},
                    Shape{"decode_split_keys", 4, RAPT_BF16, 1, 1, 1, 1, 8192, 128},
                    Shape{"odd_sizes", 2, RAPT_FP32, 2, 3, 3, 37, 41, 33},
                    Shape{"weights", 2, RAPT_FP32, 1, 4, 4, 200, 300, 64, 0, RAPT_WEIGHTS}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
