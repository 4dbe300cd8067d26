// A picture as a list of figures, and what renders it: SVG and HTML by hand, so that text stays
// text, PNG by Cairo. Units are CSS pixels, y grows downwards.
#ifndef RAPT_CLIENT_CLI_PICTURE_H_
#define RAPT_CLIENT_CLI_PICTURE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/colour.h"

namespace rapt {

struct Rect {
  double x = 0, y = 0, width = 0, height = 0;
  Colour fill;
};

struct Line {
  double x1 = 0, y1 = 0, x2 = 0, y2 = 0;
  Colour colour;
};

enum class Anchor : uint8_t { kStart, kMiddle, kEnd };

struct Text {
  double x = 0, y = 0;  // the anchor, on the vertical middle of a line of capitals
  std::string text;     // UTF-8
  double size = 0;
  Colour colour;
  Anchor anchor = Anchor::kStart;
  double rotation_degrees = 0;  // clockwise, about the anchor
  bool bold = false;
};

// A grid of colours stretched over a rectangle without smoothing: many cells in few bytes.
struct Pixels {
  double x = 0, y = 0, width = 0, height = 0;
  int columns = 0, rows = 0;
  std::vector<Colour> cells;  // row by row
};

using Figure = std::variant<Rect, Line, Text, Pixels>;

// A grid whose cells tell "row → column value" when a reader of the HTML points at them. An empty
// label is left out.
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

// From the vertical middle of a line of capitals down to its baseline, in parts of the font size.
inline constexpr double kMiddleToBaseline = 0.36;

// How wide `text` is in the PNG; the SVG's fonts are about as wide.
double TextWidth(std::string_view text, double size, bool bold = false);

absl::StatusOr<std::string> RenderSvg(const Picture& picture);

// One page with the SVG and a tooltip inside; it loads nothing.
absl::StatusOr<std::string> RenderHtml(const Picture& picture);

// At two pixels a unit, for dense screens and print.
absl::StatusOr<std::string> RenderPng(const Picture& picture);

// The grid alone, one pixel a cell.
absl::StatusOr<std::string> EncodePng(const Pixels& pixels);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_PICTURE_H_
