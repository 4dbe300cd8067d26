#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "client/cli/picture.h"
#include "client/console/json.h"
#include "client/console/text.h"

namespace rapt {
namespace {

constexpr std::string_view kFonts = "Helvetica Neue, Helvetica, Arial, DejaVu Sans, sans-serif";

std::string Hex(Colour colour) {
  return absl::StrFormat("#%02x%02x%02x", colour.red, colour.green, colour.blue);
}

// Two decimals without trailing zeros: finer than any screen.
std::string Number(double value) {
  std::string text = absl::StrFormat("%.2f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string Box(double x, double y, double width, double height) {
  return absl::StrFormat("x=\"%s\" y=\"%s\" width=\"%s\" height=\"%s\"", Number(x), Number(y),
                         Number(width), Number(height));
}

std::string PointText(const Point& point) {
  return absl::StrCat(Number(point.x), ",", Number(point.y));
}

struct Element {
  absl::StatusOr<std::string> operator()(const Rect& rect) const {
    return absl::StrFormat("<rect %s fill=\"%s\"/>\n", Box(rect.x, rect.y, rect.width, rect.height),
                           Hex(rect.fill));
  }
  absl::StatusOr<std::string> operator()(const Line& line) const {
    return absl::StrFormat("<line x1=\"%s\" y1=\"%s\" x2=\"%s\" y2=\"%s\" stroke=\"%s\"/>\n",
                           Number(line.x1), Number(line.y1), Number(line.x2), Number(line.y2),
                           Hex(line.colour));
  }
  absl::StatusOr<std::string> operator()(const Polyline& line) const {
    // The first point twice: one point alone draws nothing.
    std::string points = PointText(line.points[0]);
    for (const Point& point : line.points) absl::StrAppend(&points, " ", PointText(point));
    return absl::StrFormat(
        "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"%s\" "
        "stroke-linecap=\"round\" stroke-linejoin=\"round\"/>\n",
        points, Hex(line.colour), Number(line.width));
  }
  absl::StatusOr<std::string> operator()(const Text& text) const {
    constexpr std::string_view kAnchors[] = {"start", "middle", "end"};
    std::string place;
    const double drop = text.size * kMiddleToBaseline;
    if (text.rotation_degrees == 0) {
      place = absl::StrFormat("x=\"%s\" y=\"%s\"", Number(text.x), Number(text.y + drop));
    } else {
      place = absl::StrFormat("y=\"%s\" transform=\"translate(%s %s) rotate(%s)\"", Number(drop),
                              Number(text.x), Number(text.y), Number(text.rotation_degrees));
    }
    return absl::StrFormat("<text %s font-size=\"%s\" fill=\"%s\" text-anchor=\"%s\"%s>%s</text>\n",
                           place, Number(text.size), Hex(text.colour),
                           kAnchors[static_cast<size_t>(text.anchor)],
                           text.bold ? " font-weight=\"bold\"" : "", EscapeXml(text.text));
  }
  absl::StatusOr<std::string> operator()(const Pixels& pixels) const {
    RAPT_ASSIGN_OR_RETURN(const std::string png, EncodePng(pixels));
    return absl::StrFormat(
        "<image %s preserveAspectRatio=\"none\" style=\"image-rendering:pixelated\" "
        "href=\"data:image/png;base64,%s\"/>\n",
        Box(pixels.x, pixels.y, pixels.width, pixels.height), absl::Base64Escape(png));
  }
};

// The tooltip follows the pointer. A frame marks the cell, and two bands mark its row and column.
constexpr std::string_view kPageStyle = R"(
body { margin: 0; background: #fff; font-family: Helvetica Neue, Helvetica, Arial, sans-serif; }
main { display: flex; justify-content: center; padding: 16px; }
svg { max-width: 100%; height: auto; }
#tip { position: fixed; display: none; padding: 6px 10px; border-radius: 4px; background: #222;
  color: #fff; font-size: 13px; pointer-events: none; white-space: nowrap; }
#tip b { font-size: 15px; }
.band { fill: #fff; fill-opacity: .18; pointer-events: none; }
.cell { fill: none; stroke: #fff; stroke-width: 2; pointer-events: none; }
)";

constexpr std::string_view kPageScript = R"(
const svg = document.querySelector('svg'), tip = document.getElementById('tip');
const mark = (name) => {
  const rect = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
  rect.setAttribute('class', name);
  svg.append(rect);
  return rect;
};
const row = mark('band'), column = mark('band'), cell = mark('cell');
const place = (rect, x, y, width, height) => {
  for (const [name, value] of Object.entries({x, y, width, height})) rect.setAttribute(name, value);
};
const hide = () => {
  tip.style.display = 'none';
  for (const rect of [row, column, cell]) rect.style.display = 'none';
};
svg.addEventListener('mouseleave', hide);
svg.addEventListener('mousemove', (event) => {
  const at = new DOMPoint(event.clientX, event.clientY)
                 .matrixTransform(svg.getScreenCTM().inverse());
  const grid = grids.find((g) => at.x >= g.x && at.x < g.x + g.width && at.y >= g.y &&
                                 at.y < g.y + g.height);
  if (!grid) return hide();
  const width = grid.width / grid.columns.length, height = grid.height / grid.rows.length;
  const i = Math.floor((at.y - grid.y) / height), j = Math.floor((at.x - grid.x) / width);
  place(row, grid.x, grid.y + i * height, grid.width, height);
  place(column, grid.x + j * width, grid.y, width, grid.height);
  place(cell, grid.x + j * width, grid.y + i * height, width, height);
  for (const rect of [row, column, cell]) rect.style.display = '';
  const value = document.createElement('b');
  value.textContent = grid.values[i * grid.columns.length + j];
  const names = [grid.rows[i], grid.columns[j]].filter((name) => name !== '');
  tip.replaceChildren(`${names.join(' \u2192 ')}  `, value);
  tip.style.display = 'block';
  const left = event.clientX + 14, overflow = left + tip.offsetWidth - window.innerWidth;
  tip.style.left = `${overflow > 0 ? left - overflow : left}px`;
  tip.style.top = `${event.clientY + 18}px`;
});
hide();
)";

std::string GridsAsJson(const Picture& picture) {
  JsonWriter json;
  json.BeginArray();
  for (const HoverGrid& grid : picture.hover_grids) {
    json.BeginObject();
    json.Key("x").Number(grid.x).Key("y").Number(grid.y);
    json.Key("width").Number(grid.width).Key("height").Number(grid.height);
    json.Key("rows").Strings(grid.row_labels);
    json.Key("columns").Strings(grid.column_labels);
    json.Key("values").Strings(grid.values);
    json.EndObject();
  }
  json.EndArray();
  // "</script>" in a label must not end the script.
  return absl::StrReplaceAll(json.Take(), {{"<", "\\u003c"}});
}

}  // namespace

absl::StatusOr<std::string> RenderSvg(const Picture& picture) {
  const std::string width = Number(picture.width), height = Number(picture.height);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%s\" height=\"%s\" "
      "viewBox=\"0 0 %s %s\" font-family=\"%s\">\n<title>%s</title>\n"
      "<rect width=\"%s\" height=\"%s\" fill=\"#ffffff\"/>\n",
      width, height, width, height, kFonts, EscapeXml(picture.title), width, height);
  for (const Figure& figure : picture.figures) {
    RAPT_ASSIGN_OR_RETURN(const std::string element, std::visit(Element{}, figure));
    svg.append(element);
  }
  svg.append("</svg>\n");
  return svg;
}

absl::StatusOr<std::string> RenderHtml(const Picture& picture) {
  RAPT_ASSIGN_OR_RETURN(const std::string svg, RenderSvg(picture));
  return absl::StrFormat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>%s</title>\n"
      "<style>%s</style>\n</head>\n<body>\n<main>\n%s</main>\n<div id=\"tip\"></div>\n"
      "<script>\nconst grids = %s;%s</script>\n</body>\n</html>\n",
      EscapeXml(picture.title), kPageStyle, svg, GridsAsJson(picture), kPageScript);
}

absl::StatusOr<Renderer> RendererFor(std::string_view path) {
  if (path.ends_with(".svg")) return RenderSvg;
  if (path.ends_with(".html")) return RenderHtml;
  if (path.ends_with(".png")) return RenderPng;
  return absl::InvalidArgumentError(
      absl::StrFormat("--output is '%s'; it must end in .svg, .html or .png", path));
}

}  // namespace rapt
