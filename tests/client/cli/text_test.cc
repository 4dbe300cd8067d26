// Text read and written by the command line: labels, JSON, heat maps in a terminal.
#include "client/console/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <string>

#include "client/cli/labels.h"
#include "client/cli/terminal_heat_map.h"
#include "client/console/json.h"

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LabelsTest, SplitAtCommas) {
  EXPECT_THAT(*ParseLabels("--keys", "le,chat,été", 3), ElementsAre("le", "chat", "été"));
}

TEST(LabelsTest, AreNumbersByDefault) {
  EXPECT_THAT(*ParseLabels("--keys", "", 3), ElementsAre("0", "1", "2"));
}

TEST(LabelsTest, MustMatchTheNumberOfWeights) {
  EXPECT_EQ(ParseLabels("--keys", "a,b", 3).status().message(),
            "--keys has 2 labels; the weights need 3");
}

TEST(LabelsTest, MustBePrintableUtf8) {
  for (const char* bad : {"a\nb", "\xff", "\xc3", "\xed\xa0\x80", "\xe0\x80\x80",
                          "\xf4\x90\x80\x80", "\x7f", "\x80"}) {
    EXPECT_EQ(ParseLabels("--keys", bad, 1).status().message(),
              "label 0 of --keys is not printable UTF-8");
  }
  EXPECT_TRUE(ParseLabels("--keys", "日本,😀", 2).ok());
}

TEST(LabelsTest, OfAFileMayEndAsOnWindows) {
  const std::string path = ::testing::TempDir() + "labels.txt";
  std::ofstream(path, std::ios::binary) << "le\r\nchat\r\n";
  EXPECT_THAT(*ParseLabels("--keys", "@" + path, 2), ElementsAre("le", "chat"));
}

TEST(PrintableTest, ShowsControlCharactersAndBytesThatAreNotUtf8) {
  EXPECT_EQ(Printable("été 日本 😀 \\ '"), "été 日本 😀 \\ '");
  EXPECT_EQ(Printable("a\x1b[31m\r\n\t\x7f"), R"(a\x1b[31m\x0d\x0a\x09\x7f)");
  EXPECT_EQ(Printable(absl::string_view("\0", 1)), R"(\x00)");
  EXPECT_EQ(Printable("\xc2\x9b|\xc2\xa0"), "\\xc2\\x9b|\xc2\xa0");  // CSI in one character
  EXPECT_EQ(Printable("\xff|\xc3|\xed\xa0\x80"), R"(\xff|\xc3|\xed\xa0\x80)");
}

TEST(XmlTest, EscapesMarkupAndReplacesWhatXmlCannotContain) {
  EXPECT_EQ(EscapeXml("<a b=\"c\" d='e'>&été\t\n"),
            "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;été\t\n");
  constexpr char kReplaced[] = "a\uFFFDb";
  for (const char* bad : {"a\x01"
                          "b",
                          "a\x1f"
                          "b",
                          "a\uFFFE"
                          "b",
                          "a\uFFFF"
                          "b",
                          "a\xff"
                          "b"}) {
    EXPECT_EQ(EscapeXml(bad), kReplaced);
  }
  EXPECT_EQ(EscapeXml(absl::string_view("a\0b", 3)), kReplaced);
}

TEST(LabelsTest, AreFoundByNameBeforeNumber) {
  EXPECT_EQ(*FindLabel("--query", {"a", "0"}, "0"), 1);
  EXPECT_EQ(*FindLabel("--query", {"a", "b"}, "1"), 1);
  EXPECT_FALSE(FindLabel("--query", {"a", "b"}, "2").ok());
  EXPECT_FALSE(FindLabel("--query", {"a", "b"}, "-1").ok());
}

TEST(JsonTest, WritesNestedValues) {
  JsonWriter json;
  json.BeginObject().Key("a").BeginArray().Integer(1).Number(.5).Boolean(true).EndArray();
  json.Key("b").BeginObject().EndObject().Key("c").String("x").EndObject();
  EXPECT_EQ(json.Take(), R"({"a":[1,0.5,true],"b":{},"c":"x"})");
}

TEST(JsonTest, EscapesStringsAndWritesInfinityAsNull) {
  JsonWriter json;
  json.BeginArray().String("a\"b\\c\nd\x01").Number(std::numeric_limits<double>::infinity());
  EXPECT_EQ(json.EndArray().Take(), R"(["a\"b\\c\u000ad\u0001",null])");
}

const std::vector<std::string> kLabels = {"the₁", "cat"};
const std::vector<double> kWeights = {1, 0, .25, .75};

TEST(TerminalHeatMapTest, PlainTextHasNoEscapes) {
  const TextBlock map = DrawTerminalHeatMap("who", kLabels, kWeights, /*has_colour=*/false);
  ASSERT_EQ(map.lines().size(), 4);
  EXPECT_EQ(map.lines()[2].text, "the₁  █100    ·");
  EXPECT_EQ(map.lines()[3].text, " cat  ░ 25 ▓ 75");
  EXPECT_EQ(map.columns(), 15);
}

TEST(TerminalHeatMapTest, ColoursCellsByWeight) {
  const TextBlock map = DrawTerminalHeatMap("who", kLabels, kWeights, /*has_colour=*/true);
  EXPECT_THAT(map.lines()[2].text, HasSubstr("\x1b[48;2;253;231;37m\x1b[38;2;0;0;0m 100%\x1b[0m"));
  EXPECT_THAT(map.lines()[2].text, HasSubstr("·"));
  EXPECT_EQ(map.columns(), 15);
}

TEST(TerminalHeatMapTest, BlocksAreSideBySideIfTheyFit) {
  TextBlock left, right;
  left.Add("aé");
  left.Add("b");
  right.Add("c");
  EXPECT_EQ(Arrange(left, right, 7), "aé    c\nb\n");
  EXPECT_EQ(Arrange(left, right, 6), "aé\nb\n\nc\n");
}

}  // namespace
}  // namespace rapt
