#include <gtest/gtest.h>

#include <string>

#include "server/calls/call_headers.h"

namespace rapt {
namespace {

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

// Returns kTraceparent with `text` at `place`.
std::string With(size_t place, const std::string& text) {
  return std::string(kTraceparent).replace(place, text.size(), text);
}

TEST(TraceparentTest, AcceptsTheExampleOfTheSpecification) {
  EXPECT_TRUE(IsTraceparent(kTraceparent));
  EXPECT_TRUE(IsTraceparent(With(53, "00")));
}

TEST(TraceparentTest, AcceptsLaterVersions) {
  EXPECT_TRUE(IsTraceparent(With(0, "cc")));
  EXPECT_TRUE(IsTraceparent(With(0, "cc") + "-what-comes-then"));
  EXPECT_FALSE(IsTraceparent(With(0, "cc") + ".what-comes-then"));
  EXPECT_FALSE(IsTraceparent(std::string(kTraceparent) + "-more"))
      << "version 00 has a fixed length";
}

TEST(TraceparentTest, IgnoresInvalidValues) {
  EXPECT_FALSE(IsTraceparent(""));
  EXPECT_FALSE(IsTraceparent(std::string(kTraceparent).substr(0, 54)));
  EXPECT_FALSE(IsTraceparent(With(0, "ff"))) << "ff is an invalid version";
  EXPECT_FALSE(IsTraceparent(With(3, std::string(32, '0')))) << "a trace of zeros";
  EXPECT_FALSE(IsTraceparent(With(36, std::string(16, '0')))) << "a parent of zeros";
  for (const size_t place : {0, 3, 36, 53}) {
    EXPECT_FALSE(IsTraceparent(With(place, "A"))) << "upper case at " << place;
    EXPECT_FALSE(IsTraceparent(With(place, "g"))) << "not a digit at " << place;
    EXPECT_FALSE(IsTraceparent(With(place, " "))) << "a space at " << place;
  }
  for (const size_t place : {2, 35, 52}) {
    EXPECT_FALSE(IsTraceparent(With(place, "_"))) << "not a dash at " << place;
  }
}

TEST(TraceparentTest, ReturnsASingleValidValueAsVersion00) {
  EXPECT_EQ(TraceparentOf({kTraceparent}), kTraceparent);
  EXPECT_EQ(TraceparentOf({With(0, "cc") + "-more"}), kTraceparent)
      << "the part that version 00 defines";
  EXPECT_EQ(TraceparentOf({}), "");
  EXPECT_EQ(TraceparentOf({"invalid"}), "");
  EXPECT_EQ(TraceparentOf({kTraceparent, kTraceparent}), "");
}

}  // namespace
}  // namespace rapt
