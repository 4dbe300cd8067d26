#include "base/arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <limits>

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

class ArgumentsTest : public ::testing::Test {
 protected:
  ArgumentsTest() {
    app_.set_version_flag("--version", "1.2.3\n");
    AddFlag(app_, "-o,--output", false)->type_name("FILE");
    AddFlag(app_, "--max_size", false);
    AddFlag(app_, "--causal", true);
  }

  absl::StatusOr<ParsedArguments> Parse(const std::vector<std::string>& arguments) {
    return ParseArguments(app_, arguments);
  }

  std::vector<std::pair<std::string, std::string>> Flags(
      const std::vector<std::string>& arguments) {
    const absl::StatusOr<ParsedArguments> parsed = Parse(arguments);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    std::vector<std::pair<std::string, std::string>> flags;
    for (const GivenFlag& flag : parsed->flags) flags.emplace_back(flag.name, flag.value);
    return flags;
  }

  std::string Error(const std::vector<std::string>& arguments) {
    return std::string(Parse(arguments).status().message());
  }

  CLI::App app_;
};

TEST_F(ArgumentsTest, ReturnsTheFlagsInTheirOrder) {
  EXPECT_THAT(Flags({"--max_size=1", "-o", "a", "--causal", "--max_size", "2", "-o=b", "-oc"}),
              ElementsAre(Pair("max_size", "1"), Pair("output", "a"), Pair("causal", "true"),
                          Pair("max_size", "2"), Pair("output", "b"), Pair("output", "c")));
}

TEST_F(ArgumentsTest, KeepsWhatFollowsAnEqualsSign) {
  EXPECT_THAT(Flags({"--output=--causal", "--output=a=b", "--output==", "--causal=maybe"}),
              ElementsAre(Pair("output", "--causal"), Pair("output", "a=b"), Pair("output", "="),
                          Pair("causal", "maybe")));
}

TEST_F(ArgumentsTest, KeepsValuesOfOneDash) {
  EXPECT_THAT(Flags({"--max_size", "-1", "-o", "-", "-o", "-x", "-o", "-a=b", "-o", "-a==b"}),
              ElementsAre(Pair("max_size", "-1"), Pair("output", "-"), Pair("output", "-x"),
                          Pair("output", "-a=b"), Pair("output", "-a==b")));
}

TEST_F(ArgumentsTest, TakesEmptyValues) {
  const absl::StatusOr<ParsedArguments> parsed = Parse({"--output=", "x", "-o=", "y", "-o", ""});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  for (const GivenFlag& flag : parsed->flags) EXPECT_EQ(flag.value, "");
  EXPECT_EQ(parsed->flags.size(), 3);
  EXPECT_THAT(parsed->operands, ElementsAre("x", "y"));
}

TEST_F(ArgumentsTest, LeavesOperandsAsTheyAre) {
  const absl::StatusOr<ParsedArguments> parsed =
      Parse({"x=y", "-", "", "=", "--", "--", "-a=b", "--causal=no"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->operands,
              ElementsAre("x=y", "-", "", "=", "--", "--", "-a=b", "--causal=no"));
  EXPECT_THAT(parsed->flags, IsEmpty());
}

TEST_F(ArgumentsTest, NamesUnknownFlags) {
  EXPECT_EQ(Error({"--wat=3"}), "unknown flag --wat; --help lists the flags");
  EXPECT_EQ(Error({"--max-size=3"}), "unknown flag --max-size; did you mean --max_size?");
  EXPECT_EQ(Error({"-causal"}), "unknown flag -causal; did you mean --causal?");
  EXPECT_EQ(Error({"-w=3"}), "unknown flag -w; --help lists the flags");
  EXPECT_EQ(Error({"--=3"}), "unknown flag --; --help lists the flags");
}

TEST_F(ArgumentsTest, NamesFlagsWithoutTheirValue) {
  EXPECT_THAT(Error({"--output"}), HasSubstr("--output"));
  EXPECT_EQ(Error({"--output", "--causal"}), "--output needs a value: --output FILE");
  EXPECT_EQ(Error({"-o", "--max_size=1"}), "--output needs a value: --output FILE");
  EXPECT_EQ(Error({"-o", "--"}), "--output needs a value: --output FILE");
}

TEST_F(ArgumentsTest, HelpWinsOverErrors) {
  EXPECT_THAT(Parse({"--wat", "--help"})->text_to_print, HasSubstr("--max_size"));
}

TEST_F(ArgumentsTest, VersionWinsOverErrors) {
  EXPECT_EQ(Parse({"--version", "--wat"})->text_to_print, "1.2.3\n");
}

TEST(ParseValueTest, NamesWhatCameAndWhatIsAllowed) {
  bool truth = false;
  int64_t number = 0;
  uint64_t count = 0;
  double real = 0;
  std::string text;
  EXPECT_TRUE(ParseValue("--t", "true", truth).ok());
  EXPECT_TRUE(ParseValue("--n", "-9223372036854775808", number).ok());
  EXPECT_TRUE(ParseValue("--c", "18446744073709551615", count).ok());
  EXPECT_TRUE(ParseValue("--r", "-2.5", real).ok());
  EXPECT_TRUE(ParseValue("--s", "", text).ok());
  EXPECT_TRUE(truth);
  EXPECT_EQ(number, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(count, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(real, -2.5);
  EXPECT_EQ(ParseValue("--t", "", truth).message(), "--t is ''; it takes true or false");
  EXPECT_EQ(ParseValue("--n", "7x", number).message(), "--n is '7x'; it takes a whole number");
  EXPECT_EQ(ParseValue("RAPT_C", "-1", count).message(),
            "RAPT_C is '-1'; it takes a whole number of at least 0");
  EXPECT_EQ(ParseValue("--r", "1,5", real).message(), "--r is '1,5'; it takes a number");
}

TEST(NearestTest, FindsTyposButNotUnrelatedWords) {
  const std::vector<std::string_view> known = {"demo", "attend", "plot"};
  EXPECT_EQ(Nearest("dmeo", known), "demo");
  EXPECT_EQ(Nearest("atend", known), "attend");
  EXPECT_THAT(Nearest("frobnicate", known), IsEmpty());
}

}  // namespace
}  // namespace rapt
