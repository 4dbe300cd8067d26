#include "client/console/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rapt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr absl::string_view kColours[] = {"red", "green"};

struct Values {
  std::string output;
  int64_t count = 3;
  uint64_t seed = 0;
  double scale = 1;
  bool causal = false;
  std::vector<int64_t> window;
  std::optional<uint64_t> draws;
  std::optional<double> dropout;
  std::optional<std::string> mask;
  size_t colour = 0;
};

class CommandLineTest : public ::testing::Test {
 protected:
  absl::Status Parse(std::vector<std::string> arguments) {
    const absl::StatusOr<ParsedArguments> parsed = line_.Parse(arguments);
    if (parsed.ok()) operands_ = parsed->operands;
    return parsed.status();
  }

  Values values_;
  std::vector<std::string> operands_;
  CommandLine line_{.usage = "rapt try FILE -o FILE",
                    .summary = "Tries.",
                    .flags = {{"output", "FILE", "the output file", &values_.output, 'o', true},
                              {"count", "N", "how many", &values_.count},
                              {"seed", "N", "random seed", &values_.seed},
                              {"scale", "X", "scale factor", &values_.scale},
                              {"causal", "", "causal mask", &values_.causal},
                              {"window", "L,R", "window size", &values_.window},
                              {"draws", "N", "seed of the draws", &values_.draws},
                              {"dropout", "P", "probability", &values_.dropout},
                              {"mask", "FILE", "mask file", &values_.mask},
                              {"colour", "NAME", "red or green",
                               NamedChoice{kColours, [this](size_t n) { values_.colour = n; }}}},
                    .examples = {"rapt try x.npy -o y.npy"},
                    .max_operands = 1};
};

TEST_F(CommandLineTest, AcceptsValuesAfterASpaceOrAnEqualsSign) {
  ASSERT_TRUE(Parse({"--output", "y.npy", "--count=7", "--scale", "0.5"}).ok());
  EXPECT_EQ(values_.output, "y.npy");
  EXPECT_EQ(values_.count, 7);
  EXPECT_EQ(values_.scale, 0.5);
}

TEST_F(CommandLineTest, KeepsDefaultsOfAbsentFlags) {
  ASSERT_TRUE(Parse({"-o", "y"}).ok());
  EXPECT_EQ(values_.count, 3);
  EXPECT_FALSE(values_.causal);
  EXPECT_FALSE(values_.dropout.has_value());
  EXPECT_FALSE(values_.mask.has_value());
}

TEST_F(CommandLineTest, AChoiceIsOneOfItsNames) {
  ASSERT_TRUE(Parse({"-o", "y"}).ok());
  EXPECT_EQ(values_.colour, 0u);
  ASSERT_TRUE(Parse({"-o", "y", "--colour=green"}).ok());
  EXPECT_EQ(values_.colour, 1u);
  EXPECT_THAT(std::string(Parse({"-o", "y", "--colour", "Green"}).message()),
              AllOf(HasSubstr("--colour is 'Green'"), HasSubstr("red or green")));
}

TEST_F(CommandLineTest, SwitchesDoNotConsumeTheNextArgument) {
  ASSERT_TRUE(Parse({"--causal", "x.npy", "-o", "y"}).ok());
  EXPECT_TRUE(values_.causal);
  EXPECT_THAT(operands_, ElementsAre("x.npy"));
  ASSERT_TRUE(Parse({"--causal=false", "-o", "y"}).ok());
  EXPECT_FALSE(values_.causal);
}

TEST_F(CommandLineTest, NegativeNumbersAreValues) {
  ASSERT_TRUE(Parse({"-o", "y", "--window", "-1,0", "--scale", "-2.5"}).ok());
  EXPECT_THAT(values_.window, ElementsAre(-1, 0));
  EXPECT_EQ(values_.scale, -2.5);
}

TEST_F(CommandLineTest, TheLastOfRepeatedFlagsWins) {
  ASSERT_TRUE(Parse({"-o", "a", "--output=b", "--window=1,2", "--window=3"}).ok());
  EXPECT_EQ(values_.output, "b");
  EXPECT_THAT(values_.window, ElementsAre(3));
}

TEST_F(CommandLineTest, OnlyOperandsFollowTwoDashes) {
  ASSERT_TRUE(Parse({"-o", "y", "--", "--causal"}).ok());
  EXPECT_THAT(operands_, ElementsAre("--causal"));
  EXPECT_FALSE(values_.causal);
}

struct Refusal {
  std::string name;
  std::vector<std::string> arguments;
  std::string message;
};

class CommandLineRefusalTest : public CommandLineTest,
                               public ::testing::WithParamInterface<Refusal> {};

TEST_P(CommandLineRefusalTest, StatesTheError) {
  const absl::Status status = Parse(GetParam().arguments);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, CommandLineRefusalTest,
    ::testing::Values(
        Refusal{"Unknown", {"--wat"}, "unknown flag --wat; --help lists the flags"},
        Refusal{"Misspelt", {"--cuasal"}, "unknown flag --cuasal; did you mean --causal?"},
        Refusal{"MisspeltWithValue", {"--cout=3"}, "unknown flag --cout; did you mean --count?"},
        Refusal{"OneDash", {"-causal"}, "unknown flag -causal; did you mean --causal?"},
        Refusal{"NoValue", {"--count"}, "--count: 1 required N missing"},
        Refusal{"FlagAsValue", {"-o", "--causal"}, "--output needs a value: --output FILE"},
        Refusal{
            "NotANumber", {"-o", "y", "--count", "7x"}, "--count is '7x'; it takes a whole number"},
        Refusal{"TooLarge",
                {"-o", "y", "--count=9223372036854775808"},
                "--count is '9223372036854775808'; it takes a whole number"},
        Refusal{"Negative",
                {"-o", "y", "--seed=-1"},
                "--seed is '-1'; it takes a whole number of at least 0"},
        Refusal{"NegativeOptional",
                {"-o", "y", "--draws=-1"},
                "--draws is '-1'; it takes a whole number of at least 0"},
        Refusal{"NotADouble", {"-o", "y", "--dropout="}, "--dropout is ''; it takes a number"},
        Refusal{"NotABool",
                {"-o", "y", "--causal=maybe"},
                "--causal is 'maybe'; it takes true or false"},
        Refusal{"NotAList",
                {"-o", "y", "--window=1,,2"},
                "--window is '1,,2'; it takes whole numbers like 1,2,3"},
        Refusal{"Missing", {"x.npy"}, "--output is required"},
        Refusal{"TooManyOperands",
                {"-o", "y", "a", "b"},
                "unexpected argument 'b'; usage: rapt try FILE -o FILE"}),
    [](const auto& info) { return info.param.name; });

TEST_F(CommandLineTest, AcceptsEmptyValuesAndShortForms) {
  ASSERT_TRUE(Parse({"-oy", "--mask=", "x.npy"}).ok());
  EXPECT_EQ(values_.output, "y");
  EXPECT_EQ(values_.mask, "");
  ASSERT_TRUE(Parse({"-o=z", "x.npy"}).ok());
  EXPECT_EQ(values_.output, "z");
  EXPECT_THAT(operands_, ElementsAre("x.npy"));
}

TEST_F(CommandLineTest, AValueBehindAnEqualsSignMayBeginWithDashes) {
  ASSERT_TRUE(Parse({"-o=-a=b", "--mask=--causal"}).ok());
  EXPECT_EQ(values_.output, "-a=b");
  EXPECT_EQ(values_.mask, "--causal");
  EXPECT_FALSE(values_.causal);
  ASSERT_TRUE(Parse({"-o=--causal", "--mask=--mask=x"}).ok());
  EXPECT_EQ(values_.output, "--causal");
  EXPECT_EQ(values_.mask, "--mask=x");
}

TEST_F(CommandLineTest, AValueAfterItsFlagMayBeginWithOneDash) {
  ASSERT_TRUE(Parse({"-o", "-a=b", "--mask", "-o=z"}).ok());
  EXPECT_EQ(values_.output, "-a=b");
  EXPECT_EQ(values_.mask, "-o=z");
  EXPECT_THAT(operands_, IsEmpty());
}

TEST_F(CommandLineTest, AnEmptyValueTakesNothingFromTheNextArgument) {
  ASSERT_TRUE(Parse({"-o=", "x.npy", "--mask="}).ok());
  EXPECT_EQ(values_.output, "");
  EXPECT_EQ(values_.mask, "");
  EXPECT_THAT(operands_, ElementsAre("x.npy"));
  ASSERT_TRUE(Parse({"--output", "", "--mask", ""}).ok());
}

TEST_F(CommandLineTest, OperandsKeepTheirEqualsSigns) {
  ASSERT_TRUE(Parse({"-o", "y", "--", "-a=b"}).ok());
  EXPECT_THAT(operands_, ElementsAre("-a=b"));
  ASSERT_TRUE(Parse({"-o", "y", "--", "--"}).ok());
  EXPECT_THAT(operands_, ElementsAre("--"));
}

TEST_F(CommandLineTest, ALoneDashIsAnOperand) {
  ASSERT_TRUE(Parse({"-", "-o", "y"}).ok());
  EXPECT_THAT(operands_, ElementsAre("-"));
}

TEST_F(CommandLineTest, HelpNamesEveryFlagAndExampleWithinEightyColumns) {
  const std::string help = line_.Parse(std::vector<std::string>{"--help"})->text_to_print;
  EXPECT_THAT(help, StartsWith("usage: rapt try FILE -o FILE\n\nTries.\n"));
  for (const Flag& flag : line_.flags) {
    EXPECT_THAT(help, HasSubstr("--" + std::string(flag.name)));
    EXPECT_THAT(help, HasSubstr(std::string(flag.help)));
  }
  EXPECT_THAT(help, HasSubstr("\nexamples:\n  rapt try x.npy -o y.npy\n"));
  size_t start = 0;
  for (size_t end = help.find('\n'); end != std::string::npos; end = help.find('\n', start)) {
    EXPECT_LE(end - start, 80) << help.substr(start, end - start);
    start = end + 1;
  }
}

TEST_F(CommandLineTest, HelpIsAFlagOnlyBeforeTwoDashes) {
  const auto text = [this](const std::vector<std::string>& arguments) {
    return line_.Parse(arguments)->text_to_print;
  };
  EXPECT_THAT(text({"x", "--help"}), StartsWith("usage: "));
  EXPECT_THAT(text({"-h", "--wat"}), StartsWith("usage: "));
  EXPECT_THAT(text({"-oy", "--", "--help"}), IsEmpty());
}

}  // namespace
}  // namespace rapt
