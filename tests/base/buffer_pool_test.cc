#include "base/buffer_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

constexpr int64_t kMiB = 1 << 20;

class BufferPoolTest : public ::testing::Test {
 protected:
  test::FakeClock clock_;
  BufferPool pool_{64 * kMiB, clock_};
};

TEST_F(BufferPoolTest, ABufferIsAlignedAndHoldsWhatIsWritten) {
  for (int64_t bytes : {int64_t{1}, int64_t{63}, int64_t{4096}, int64_t{100'000}, 5 * kMiB + 1}) {
    const PooledBuffer buffer = pool_.Take(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % PooledBuffer::kAlignment, 0u) << bytes;
    EXPECT_EQ(buffer.size(), bytes);
    std::memset(buffer.data(), 7, static_cast<size_t>(bytes));
  }
  EXPECT_EQ(pool_.Take(0).data(), nullptr);
}

TEST_F(BufferPoolTest, AClassIsAtMostAnEighthLarger) {
  for (int64_t bytes = 1; bytes < int64_t{1} << 60; bytes = bytes * 5 / 4 + 1) {
    const int64_t size = BufferPool::SizeOfClass(bytes);
    EXPECT_GE(size, bytes);
    EXPECT_LE(size - bytes, std::max<int64_t>(bytes / 8, 4096)) << bytes;
    EXPECT_EQ(BufferPool::SizeOfClass(size), size) << bytes;
  }
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(BufferPool::SizeOfClass(kMax), kMax);
}

TEST_F(BufferPoolTest, ReusesPagesWithinAClass) {
  const std::byte* const first = pool_.Take(4 * kMiB).data();
  EXPECT_EQ(pool_.Take(4 * kMiB - 100).data(), first);
  EXPECT_EQ(pool_.idle_bytes(), 4 * kMiB);
}

TEST_F(BufferPoolTest, EvictsIdleBuffersToStayWithinItsCapacity) {
  for (int n = 0; n < 3; ++n) {
    const PooledBuffer a = pool_.Take(16 * kMiB);
    const PooledBuffer b = pool_.Take(20 * kMiB);
  }
  EXPECT_EQ(pool_.idle_bytes(), 36 * kMiB);
  const PooledBuffer large = pool_.Take(40 * kMiB);
  EXPECT_LE(pool_.idle_bytes(), 24 * kMiB);
}

TEST_F(BufferPoolTest, ManySmallBuffersEvictIdleOnes) {
  pool_.Take(60 * kMiB);
  EXPECT_EQ(pool_.idle_bytes(), 60 * kMiB);
  std::vector<PooledBuffer> small;
  for (int n = 0; n < 5 * 32; ++n) small.push_back(pool_.Take(32 * 1024));
  EXPECT_EQ(pool_.idle_bytes(), 0);
}

TEST_F(BufferPoolTest, TrimUnmapsOldIdleBuffers) {
  pool_.Take(4 * kMiB);
  clock_.Advance(std::chrono::seconds(10));
  pool_.Take(2 * kMiB);
  pool_.Trim(clock_.Now() - std::chrono::seconds(5));
  EXPECT_EQ(pool_.idle_bytes(), 2 * kMiB);
  pool_.Trim(Instant::max());
  EXPECT_EQ(pool_.idle_bytes(), 0);
}

TEST_F(BufferPoolTest, ServesManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int n = 0; n < 500; ++n) {
        const PooledBuffer buffer = pool_.Take(kMiB + (n % 7) * 100'000);
        std::memset(buffer.data(), t, 64);
        std::this_thread::yield();
        EXPECT_EQ(buffer.data()[63], static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(pool_.idle_bytes(), 64 * kMiB);
}

}  // namespace
}  // namespace rapt
