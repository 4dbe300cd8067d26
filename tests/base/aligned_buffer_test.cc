#include "base/aligned_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace rapt {
namespace {

TEST(AlignedBufferTest, IsAlignedAndWritableToItsEnd) {
  for (const size_t size : {1, 63, 64, 65, 4097}) {
    AlignedBuffer buffer(size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % AlignedBuffer::kAlignment, 0u) << size;
    EXPECT_EQ(buffer.span().size(), size);
    std::memset(buffer.data(), 1, size);
  }
}

TEST(AlignedBufferTest, OfSizeZeroHoldsNothing) {
  EXPECT_EQ(AlignedBuffer().data(), nullptr);
  EXPECT_EQ(AlignedBuffer(0).data(), nullptr);
}

TEST(AlignedBufferTest, ThrowsForASizeThatCannotBeRoundedUp) {
  EXPECT_THROW(AlignedBuffer{std::numeric_limits<size_t>::max()}, std::bad_alloc);
}

TEST(AlignedBufferTest, MovesItsBytes) {
  AlignedBuffer source(10);
  const std::byte* bytes = source.data();
  const AlignedBuffer target = std::move(source);
  EXPECT_EQ(target.data(), bytes);
  EXPECT_EQ(target.size(), 10u);
}

}  // namespace
}  // namespace rapt
