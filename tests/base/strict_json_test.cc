#include "base/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string ErrorOf(absl::string_view text, JsonNumberSyntax numbers = JsonNumberSyntax::kFinite) {
  const absl::StatusOr<nlohmann::json> json = ParseStrictJson(text, numbers);
  EXPECT_EQ(json.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(json.status().message());
}

TEST(StrictJsonTest, ReadsWhatItsWriterWrote) {
  for (const char* text :
       {"null", "true", "-1", "18446744073709551615", "1.5", "\"\"", "[]", "{}",
        R"({"a":[1,{"b":[]},"c"],"d":{"a":{"a":null}},"e":-9223372036854775808})"}) {
    EXPECT_EQ(ParseStrictJson(text).value().dump(), text);
  }
  EXPECT_EQ(ParseStrictJson(" \t\r\n{ } \n").value().dump(), "{}");
  EXPECT_EQ(ParseStrictJson(R"("\u0000")").value(), std::string(1, '\0'));
}

TEST(StrictJsonTest, NothingFollowsTheDocument) {
  using namespace std::string_literals;
  for (const std::string& more : {"]"s, "{}"s, "1"s, ","s, "\0"s, "\0]]]]garbage"s, " \0"s}) {
    EXPECT_THAT(ErrorOf("{}" + more), HasSubstr("byte")) << more;
  }
  EXPECT_EQ(ErrorOf("{}\0"s), "the JSON is invalid: line 1, column 3 (byte 3): a NUL byte");
  EXPECT_EQ(ErrorOf("\0{}"s), "the JSON is invalid: line 1, column 1 (byte 1): a NUL byte");
  EXPECT_EQ(ErrorOf("[1,\n\"a\0\"]"s),
            "the JSON is invalid: line 2, column 3 (byte 7): a NUL byte");
}

TEST(StrictJsonTest, ErrorsTellTheirPlace) {
  EXPECT_THAT(ErrorOf(""),
              StartsWith("the JSON is invalid: line 1, column 1 (byte 1): syntax error"));
  EXPECT_THAT(ErrorOf("{\n  \"a\": 1,\n  \"b\": x\n}"),
              HasSubstr(": line 3, column 8 (byte 20): "));
  EXPECT_THAT(ErrorOf("[1,\n2"), HasSubstr(": line 2, column 2 (byte 6): "));
  EXPECT_EQ(ErrorOf("[1e400]"),
            "the JSON is invalid: line 1, column 6 (byte 6): number overflow parsing '1e400'");
  EXPECT_LE(ErrorOf("\"" + std::string(1 << 20, 'a')).size(), 400U);
}

TEST(StrictJsonTest, ANameOccursOnceInAnObject) {
  EXPECT_EQ(ErrorOf(R"({"a":1,"b":2,"a":1})"), "the JSON is invalid: a is given twice");
  EXPECT_EQ(ErrorOf(R"({"inputs":[{"n":1},{"shape":[],"shape":[]}]})"),
            "the JSON is invalid: inputs.shape is given twice");
  EXPECT_EQ(ErrorOf(R"({"a":{"b":{"x":1}},"c":{},"a":0})"),
            "the JSON is invalid: a is given twice");
  EXPECT_EQ(ErrorOf(R"({"k":1,"\u006b":2})"), "the JSON is invalid: k is given twice");
  EXPECT_EQ(ErrorOf(R"({"":1,"":2})"), "the JSON is invalid: \"\" is given twice");
  EXPECT_LE(ErrorOf(absl::StrCat("{\"", std::string(1000, 'n'), "\":1,\"", std::string(1000, 'n'),
                                 "\":2}"))
                .size(),
            200U);
  EXPECT_TRUE(ParseStrictJson(R"([{"a":1},{"a":{"a":[{"a":1}]}},{"A":1,"a":1}])").ok());
}

TEST(StrictJsonTest, DepthAndMembersAreBounded) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(ParseStrictJson(nested(kMaxJsonDepth)).ok());
  EXPECT_THAT(ErrorOf(nested(kMaxJsonDepth + 1)), EndsWith("nested more than 64 deep"));
  const auto object = [](size_t members) {
    std::string text = "{";
    for (size_t n = 0; n < members; ++n) absl::StrAppend(&text, n > 0 ? "," : "", "\"", n, "\":0");
    return text + "}";
  };
  const std::string most = object(kMaxJsonMembers);
  EXPECT_EQ(ParseStrictJson(most).value().size(), kMaxJsonMembers);
  EXPECT_TRUE(ParseStrictJson(absl::StrCat("[", most, ",", most, "]")).ok());
  EXPECT_THAT(ErrorOf(absl::StrCat("{\"a\":", most, "}")), HasSubstr("more than 131072 members"));
}

TEST(StrictJsonTest, ReadsInfinityAndNaNWhereTheyAreAllowed) {
  const auto json = ParseStrictJson(
      R"({"NaN": [NaN, -Infinity, "Infinity \" NaN", Infinity, 1], "Infinity": {"a": NaN}})",
      JsonNumberSyntax::kNonFinite);
  ASSERT_TRUE(json.ok()) << json.status();
  const nlohmann::json& list = json->at("NaN");
  EXPECT_TRUE(std::isnan(list[0].get<double>()));
  EXPECT_EQ(list[1], -std::numeric_limits<double>::infinity());
  EXPECT_EQ(list[2], "Infinity \" NaN");
  EXPECT_EQ(list[3], std::numeric_limits<double>::infinity());
  EXPECT_EQ(list[4], 1);
  EXPECT_TRUE(std::isnan(json->at("Infinity").at("a").get<double>()));

  for (const char* text : {"{NaN: 1}", "1Infinity", "NaNa", "-NaN", "+Infinity", "Inf", "nan",
                           "[NaN Infinity]", "[1, NaN"}) {
    EXPECT_THAT(ErrorOf(text, JsonNumberSyntax::kNonFinite), HasSubstr("line 1, column")) << text;
  }
  EXPECT_EQ(ErrorOf("{\"a\":1,\n NaN:1}", JsonNumberSyntax::kNonFinite),
            "the JSON is invalid: line 2, column 2 (byte 10): NaN in place of a name");
  for (const char* text : {"NaN", "Infinity", "-Infinity"}) ErrorOf(text);
}

// A handler may end reading.
TEST(StrictJsonTest, AHandlerEndsReading) {
  class TwoNumbers final : public JsonHandler {
   public:
    int numbers = 0;

   private:
    bool null() override { return true; }
    bool boolean(bool) override { return true; }
    bool number_integer(number_integer_t) override { return true; }
    bool number_unsigned(number_unsigned_t) override { return ++numbers < 2; }
    bool number_float(number_float_t, const string_t&) override { return true; }
    bool string(string_t&) override { return true; }
    bool start_object(size_t) override { return true; }
    bool key(string_t&) override { return true; }
    bool end_object() override { return true; }
    bool start_array(size_t) override { return true; }
    bool end_array() override { return true; }
    void OnInvalid(absl::string_view why) override { ADD_FAILURE() << why; }
  };
  TwoNumbers handler;
  EXPECT_FALSE(ReadStrictJson("[1,2,3,x", handler));
  EXPECT_EQ(handler.numbers, 2);
  EXPECT_TRUE(ReadStrictJson("[-1,\"2\"]", handler));
}

}  // namespace
}  // namespace rapt
