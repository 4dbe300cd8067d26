#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/figure_style.h"
#include "client/cli/figures.h"

// Read by LeakSanitizer: fontconfig keeps its font cache until the process ends.
extern "C" const char* __lsan_default_suppressions() { return "leak:libfontconfig.so"; }

namespace rapt {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kMasked = -std::numeric_limits<double>::infinity();

AttentionFigure ThreeByTwo() {
  return {"Weights", {"the", "cat", "sat"}, {"le", "chat"}, {{"head 0", {.5, .5, .25, .75, 0, 1}}}};
}

std::vector<std::string> Numbers(int64_t count) {
  std::vector<std::string> labels;
  for (int64_t i = 0; i < count; ++i) labels.push_back(absl::StrCat(i));
  return labels;
}

template <typename T>
std::vector<T> All(const Picture& picture) {
  std::vector<T> found;
  for (const Figure& figure : picture.figures) {
    if (const T* one = std::get_if<T>(&figure)) found.push_back(*one);
  }
  return found;
}

std::vector<std::string> Words(const Picture& picture) {
  std::vector<std::string> words;
  for (const Text& text : All<Text>(picture)) words.push_back(text.text);
  return words;
}

TEST(HeatMapTest, ShowsTitleLabelsAndValues) {
  const std::vector<std::string> words = Words(DrawHeatMap(ThreeByTwo()));
  for (const char* word : {"Weights", "head 0", "the", "cat", "sat", "le", "chat", "queries",
                           "keys", "0.50", "0.25", "0.75", "1.00"}) {
    EXPECT_THAT(words, Contains(word));
  }
}

TEST(HeatMapTest, ColoursGrowWithTheValuesAndZeroIsBlank) {
  const std::vector<Rect> cells = All<Rect>(DrawHeatMap(ThreeByTwo()));
  ASSERT_EQ(cells.size(), 6);
  EXPECT_EQ(cells[0].fill, Viridis(.5));
  EXPECT_EQ(cells[2].fill, Viridis(.25));
  EXPECT_EQ(cells[5].fill, Viridis(1));
  EXPECT_NE(cells[4].fill, Viridis(0));
  EXPECT_THAT(Words(DrawHeatMap(ThreeByTwo())), Not(Contains("0.00")));
}

TEST(HeatMapTest, QueriesGoDownAndKeysAcross) {
  const std::vector<Rect> cells = All<Rect>(DrawHeatMap(ThreeByTwo()));
  EXPECT_LT(cells[0].x, cells[1].x);
  EXPECT_EQ(cells[0].y, cells[1].y);
  EXPECT_LT(cells[0].y, cells[2].y);
  EXPECT_EQ(cells[0].x, cells[2].x);
}

TEST(HeatMapTest, EverythingStaysWithinThePage) {
  AttentionFigure figure = ThreeByTwo();
  figure.key_labels = {"a label that is much longer than its cell is wide", "another such label"};
  for (int heads : {1, 3, 7}) {
    figure.heads.resize(heads, figure.heads[0]);
    const Picture picture = DrawHeatMap(figure);
    for (const Rect& rect : All<Rect>(picture)) {
      EXPECT_GE(rect.x, 0);
      EXPECT_LE(rect.x + rect.width, picture.width);
      EXPECT_LE(rect.y + rect.height, picture.height);
    }
    for (const Text& text : All<Text>(picture)) {
      if (text.rotation_degrees != 0) continue;
      const double width = TextWidth(text.text, text.size, text.bold);
      const double left = text.anchor == Anchor::kStart    ? text.x
                          : text.anchor == Anchor::kMiddle ? text.x - width / 2
                                                           : text.x - width;
      EXPECT_GE(left, 0) << text.text;
      EXPECT_LE(left + width, picture.width) << text.text;
      EXPECT_LE(text.y, picture.height) << text.text;
    }
  }
}

TEST(HeatMapTest, ScoresOfAnySignShareOneScaleAndMaskedKeysAreBlank) {
  const AttentionFigure figure = {"Scores", {"a"}, {"x", "y", "z"}, {{"", {-3, kMasked, 1}}}};
  const std::vector<Rect> cells = All<Rect>(DrawHeatMap(figure));
  EXPECT_EQ(cells[0].fill, Viridis(0));
  EXPECT_EQ(cells[2].fill, Viridis(1));
  EXPECT_THAT(Words(DrawHeatMap(figure)), Contains("-3.00"));
  EXPECT_THAT(Words(DrawHeatMap(figure)), Not(Contains("-inf")));
}

TEST(HeatMapTest, NotANumberStandsOut) {
  const AttentionFigure figure = {"", {"a"}, {"x", "y"}, {{"", {std::nan(""), 1}}}};
  EXPECT_THAT(Words(DrawHeatMap(figure)), Contains("NaN"));
}

TEST(HeatMapTest, HandlesFiguresWithoutFiniteValues) {
  const AttentionFigure figure = {"", {"a"}, {"x", "y"}, {{"", {std::nan(""), kMasked}}}};
  EXPECT_TRUE(RenderPng(DrawHeatMap(figure)).ok());
  EXPECT_TRUE(RenderPng(DrawBars(figure, 0)).ok());
}

TEST(HeatMapTest, LargeMatricesBecomePixelsWithoutValues) {
  AttentionFigure figure = {"", Numbers(100), Numbers(80), {{"", std::vector<double>(8000, .01)}}};
  const Picture picture = DrawHeatMap(figure);
  const std::vector<Pixels> grids = All<Pixels>(picture);
  ASSERT_EQ(grids.size(), 2);  // the colour bar is one as well
  EXPECT_EQ(grids[0].columns, 80);
  EXPECT_EQ(grids[0].rows, 100);
  EXPECT_EQ(grids[0].cells.size(), 8000);
  EXPECT_LT(All<Text>(picture).size(), 150);
}

TEST(HeatMapTest, HugeMatricesKeepTheLargestOfEachBlock) {
  constexpr int64_t kSize = 1500;
  AttentionFigure figure = {"", Numbers(kSize), Numbers(kSize), {{"", {}}}};
  figure.heads[0].values.assign(kSize * kSize, .001);
  figure.heads[0].values[700 * kSize + 1234] = 1;
  const Picture picture = DrawHeatMap(figure);
  const Pixels grid = All<Pixels>(picture)[0];
  EXPECT_LE(grid.columns, 640);
  EXPECT_EQ(std::count(grid.cells.begin(), grid.cells.end(), Viridis(1)), 1);
  EXPECT_EQ(grid.cells[(700 / 3) * grid.columns + 1234 / 3], Viridis(1));
  EXPECT_THAT(Words(picture), Contains(HasSubstr("largest of 3 × 3")));
  EXPECT_EQ(picture.hover_grids[0].row_labels[1], "3–5");
}

TEST(BarsTest, ShowOneQueryWithANumberEach) {
  const Picture picture = DrawBars(ThreeByTwo(), 1);
  const std::vector<Rect> bars = All<Rect>(picture);
  ASSERT_EQ(bars.size(), 2);
  EXPECT_NEAR(bars[1].width, bars[0].width * 3, 1e-9);
  EXPECT_THAT(Words(picture), Contains(HasSubstr("“cat”")));
  EXPECT_THAT(Words(picture), Contains("0.75"));
}

TEST(BarsTest, KeepTheLargestOfManyKeysInOrder) {
  AttentionFigure figure = {"", {"q"}, Numbers(100), {{"", {}}}};
  for (int64_t key = 0; key < 100; ++key) figure.heads[0].values.push_back(key / 100.0);
  const Picture picture = DrawBars(figure, 0);
  EXPECT_EQ(All<Rect>(picture).size(), 40);
  EXPECT_THAT(Words(picture), Contains("99"));
  EXPECT_THAT(Words(picture), Not(Contains("59")));
}

// The points of each curve, without the lines of the legend.
std::vector<Polyline> Curves(const Picture& picture, size_t columns) {
  std::vector<Polyline> lines = All<Polyline>(picture);
  lines.resize(lines.size() - columns);
  return lines;
}

TEST(CurvesTest, FollowTheColumnsOverTheRows) {
  const Picture picture = DrawCurves(ThreeByTwo(), {1, 0});
  const std::vector<Polyline> curves = Curves(picture, 2);
  ASSERT_EQ(curves.size(), 2);
  const std::vector<Point>& chat = curves[0].points;  // .5, .75, 1
  const std::vector<Point>& le = curves[1].points;    // .5, .25, 0
  ASSERT_EQ(chat.size(), 3);
  ASSERT_EQ(le.size(), 3);
  EXPECT_NEAR(chat[2].x - chat[1].x, chat[1].x - chat[0].x, 1e-9);
  EXPECT_GT(chat[1].x, chat[0].x);
  EXPECT_NEAR(chat[0].y, le[0].y, 1e-9);
  EXPECT_NEAR(chat[0].y - chat[2].y, le[2].y - le[0].y, 1e-9);
  EXPECT_LT(chat[2].y, chat[0].y);  // larger is higher
  EXPECT_NE(curves[0].colour, curves[1].colour);
}

TEST(CurvesTest, HaveAxesAndALegend) {
  const std::vector<std::string> words = Words(DrawCurves(ThreeByTwo(), {1}));
  for (const char* word : {"Weights", "head 0", "the", "cat", "sat", "positions", "dimensions",
                           "chat", "0.6", "0.8", "1"}) {
    EXPECT_THAT(words, Contains(word));
  }
  EXPECT_THAT(words, Not(Contains("le")));
}

TEST(CurvesTest, HeadsShareOneScale) {
  AttentionFigure figure = {"", Numbers(2), Numbers(1), {{"a", {0, 1}}, {"b", {0, .5}}}};
  const std::vector<Polyline> lines = All<Polyline>(DrawCurves(figure, {0}));
  ASSERT_EQ(lines.size(), 4);  // each panel has a legend
  const auto rise = [](const Polyline& line) { return line.points[0].y - line.points[1].y; };
  EXPECT_NEAR(rise(lines[0]), 2 * rise(lines[2]), 1e-9);
  EXPECT_GT(lines[2].points[0].y, lines[0].points[0].y);  // below
}

TEST(CurvesTest, ValuesThatAreNotFiniteInterruptACurve) {
  const AttentionFigure figure = {
      "", Numbers(6), Numbers(1), {{"", {kMasked, 1, 2, std::nan(""), 4, kMasked}}}};
  const std::vector<Polyline> curves = Curves(DrawCurves(figure, {0}), 1);
  ASSERT_EQ(curves.size(), 2);
  EXPECT_EQ(curves[0].points.size(), 2);
  EXPECT_EQ(curves[1].points.size(), 1);
}

TEST(CurvesTest, StayWithinThePage) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  for (const std::vector<double>& values :
       std::vector<std::vector<double>>{{0, 0, 0, 0},
                                        {1, -1, 1e-3, 5},
                                        {kMasked, kMasked, std::nan(""), kMasked},
                                        {-kLargest, kLargest, 0, 1},
                                        {0, std::numeric_limits<double>::denorm_min(), 0, 0},
                                        {1.5 + 0x3p-52, 1.5 + 0x4p-52, 1.5 + 0x3p-52, 1.5}}) {
    const AttentionFigure figure = {"A title", {"a", "b"}, {"x", "y"}, {{"", values}}};
    const Picture picture = DrawCurves(figure, {0, 1});
    for (const Polyline& line : All<Polyline>(picture)) {
      for (const Point& point : line.points) {
        EXPECT_GE(point.x, 0);
        EXPECT_LE(point.x, picture.width);
        EXPECT_GE(point.y, 0);
        EXPECT_LE(point.y, picture.height);
      }
    }
    EXPECT_TRUE(RenderPng(picture).ok());
  }
}

TEST(CurvesTest, ManyRowsHaveFewLabels) {
  AttentionFigure figure = {"", Numbers(5000), Numbers(1), {{"", std::vector<double>(5000, .1)}}};
  const Picture picture = DrawCurves(figure, {0});
  EXPECT_LT(All<Text>(picture).size(), 40);
  EXPECT_EQ(picture.hover_grids[0].values[4999], "0: 0.1");
}

TEST(CurvesTest, ASvgDrawsASinglePointAsADot) {
  const AttentionFigure figure = {"", {"0"}, {"0"}, {{"", {1}}}};
  const std::string svg = *RenderSvg(DrawCurves(figure, {0}));
  const Point dot = All<Polyline>(DrawCurves(figure, {0}))[0].points[0];
  const std::string text = absl::StrFormat("%g,%g", dot.x, dot.y);
  EXPECT_THAT(svg, HasSubstr("<polyline points=\"" + text + " " + text + "\""));
  EXPECT_THAT(svg, HasSubstr("stroke-linecap=\"round\""));
}

TEST(PictureTest, SvgAndHtmlEscapeLabels) {
  AttentionFigure figure = ThreeByTwo();
  figure.title = "a < b & \"c\"";
  figure.key_labels[0] = "</script><b>";
  const std::string svg = *RenderSvg(DrawHeatMap(figure));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; &quot;c&quot;"));
  EXPECT_THAT(svg, Not(HasSubstr("<b>")));
  const std::string html = *RenderHtml(DrawHeatMap(figure));
  EXPECT_THAT(html, Not(HasSubstr("<b>")));
  EXPECT_THAT(html, HasSubstr("\\u003c/script>\\u003cb>"));
  EXPECT_THAT(html, Not(HasSubstr("http-equiv")));
}

TEST(PictureTest, HtmlLoadsNothingFromElsewhere) {
  const std::string html = *RenderHtml(DrawHeatMap(ThreeByTwo()));
  EXPECT_THAT(html, Not(HasSubstr("src=")));
  EXPECT_THAT(html, Not(HasSubstr("<link")));
  EXPECT_THAT(html, HasSubstr("\"values\":[\"0.5\",\"0.5\",\"0.25\",\"0.75\",\"0\",\"1\"]"));
}

TEST(PictureTest, PngHasTwoPixelsAUnit) {
  const Picture picture = DrawHeatMap(ThreeByTwo());
  const absl::StatusOr<std::string> png = RenderPng(picture);
  ASSERT_TRUE(png.ok()) << png.status();
  ASSERT_EQ(png->substr(0, 8), "\x89PNG\r\n\x1a\n");
  const auto size_at = [&png](size_t at) {
    uint32_t size = 0;
    for (int i = 0; i < 4; ++i) size = size << 8 | static_cast<unsigned char>((*png)[at + i]);
    return size;
  };
  EXPECT_EQ(size_at(16), static_cast<uint32_t>(std::ceil(picture.width * 2)));
  EXPECT_EQ(size_at(20), static_cast<uint32_t>(std::ceil(picture.height * 2)));
}

TEST(ColourTest, ViridisRunsFromDarkToBrightAndStaysReadable) {
  EXPECT_EQ(Viridis(0), (Colour{0x44, 0x01, 0x54}));
  EXPECT_EQ(Viridis(1), (Colour{0xfd, 0xe7, 0x25}));
  EXPECT_EQ(Viridis(-1), Viridis(0));
  EXPECT_EQ(Viridis(2), Viridis(1));
  EXPECT_EQ(ReadableOn(Viridis(0)), kWhite);
  EXPECT_EQ(ReadableOn(Viridis(1)), kBlack);
  EXPECT_EQ(ReadableOn(kWhite), kBlack);
}

}  // namespace
}  // namespace rapt
