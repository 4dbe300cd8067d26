#include "base/crc32.h"

#include <gtest/gtest.h>

#include <string>

namespace rapt {
namespace {

// The check value of the algorithm's catalogues.
TEST(Crc32Test, IsThatOfZlib) { EXPECT_EQ(Crc32("123456789"), 0xCBF43926u); }

TEST(Crc32Test, GoesOnFromWhatCameBefore) {
  EXPECT_EQ(Crc32("56789", Crc32("1234")), Crc32("123456789"));
  EXPECT_EQ(Crc32("", Crc32("1234")), Crc32("1234"));
  EXPECT_EQ(Crc32(""), 0u);
}

TEST(Crc32Test, NoticesEveryBit) {
  const std::string text(100, 'x');
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(Crc32(flipped), Crc32(text)) << bit;
  }
}

}  // namespace
}  // namespace rapt
