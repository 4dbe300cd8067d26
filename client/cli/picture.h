// A picture as a list of figures, and its renderers: SVG and HTML are written directly, so that
// text stays text, PNG by Cairo. Units are CSS pixels; y grows downwards.
#ifndef RAPT_CLIENT_CLI_PICTURE_H_
#define RAPT_CLIENT_CLI_PICTURE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace rapt {

// sRGB.
struct Colour {
  uint8_t red = 0;
  uint8_t green = 0;
  uint8_t blue = 0;

  bool operator==(const Colour&) const = default;
};

inline constexpr Colour kBlack = {0, 0, 0};
inline constexpr Colour kWhite = {255, 255, 255};

struct Rect {
  double x = 0, y = 0, width = 0, height = 0;
  Colour fill;
};

struct Line {
  double x1 = 0, y1 = 0, x2 = 0, y2 = 0;
  Colour colour;
};

struct Point {
  double x = 0, y = 0;
};

// A line through points, with round ends: a single point is a dot.
struct Polyline {
  std::vector<Point> points;  // at least one
  Colour colour;
  double width = 1;
};

enum class Anchor : uint8_t { kStart, kMiddle, kEnd };

struct Text {
  double x = 0, y = 0;  // the anchor, at half the height of capital letters
  std::string text;     // UTF-8
  double size = 0;
  Colour colour;
  Anchor anchor = Anchor::kStart;
  double rotation_degrees = 0;  // clockwise, about the anchor
  bool bold = false;
};

// A grid of colours, scaled to a rectangle without smoothing. Compact for many cells.
struct Pixels {
  double x = 0, y = 0, width = 0, height = 0;
  int columns = 0, rows = 0;
  std::vector<Colour> cells;  // row by row
};

using Figure = std::variant<Rect, Line, Polyline, Text, Pixels>;

// A grid whose cells show "row → column value" in the HTML under the pointer. Empty labels are
// omitted.
struct HoverGrid {
  double x = 0, y = 0, width = 0, height = 0;
  std::vector<std::string> row_labels, column_labels;
  std::vector<std::string> values;  // row by row
};

struct Picture {
  double width = 0, height = 0;
  std::string title;  // for the document, not drawn
  std::vector<Figure> figures;
  std::vector<HoverGrid> hover_grids;
};

// Distance from half the height of capital letters to the baseline, relative to the font size.
inline constexpr double kMiddleToBaseline = 0.36;

// Returns the width of `text` in the PNG. The SVG's fonts have about the same width.
double TextWidth(std::string_view text, double size, bool bold = false);

absl::StatusOr<std::string> RenderSvg(const Picture& picture);

// Returns one self-contained page with the SVG and a tooltip.
absl::StatusOr<std::string> RenderHtml(const Picture& picture);

// Renders two pixels per unit, for high-density screens and print.
absl::StatusOr<std::string> RenderPng(const Picture& picture);

using Renderer = absl::StatusOr<std::string> (*)(const Picture&);

// Returns the renderer for the end of the path that --output names.
absl::StatusOr<Renderer> RendererFor(std::string_view path);

// Encodes the grid alone, one pixel per cell.
absl::StatusOr<std::string> EncodePng(const Pixels& pixels);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_PICTURE_H_
