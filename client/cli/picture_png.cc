#include <cairo/cairo.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "client/cli/picture.h"

namespace rapt {
namespace {

constexpr int kPixelsPerUnit = 2;

struct DestroySurface {
  void operator()(cairo_surface_t* surface) const { cairo_surface_destroy(surface); }
};
struct DestroyContext {
  void operator()(cairo_t* context) const { cairo_destroy(context); }
};
using Surface = std::unique_ptr<cairo_surface_t, DestroySurface>;
using Context = std::unique_ptr<cairo_t, DestroyContext>;

Surface NewSurface(int width, int height) {
  return Surface(cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height));
}

void SetColour(cairo_t* cr, Colour colour) {
  cairo_set_source_rgb(cr, colour.red / 255.0, colour.green / 255.0, colour.blue / 255.0);
}

void SetFont(cairo_t* cr, double size, bool bold) {
  cairo_select_font_face(cr, "sans-serif", CAIRO_FONT_SLANT_NORMAL,
                         bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(cr, size);
}

Surface SurfaceFrom(const Pixels& pixels) {
  Surface surface = NewSurface(pixels.columns, pixels.rows);
  cairo_surface_flush(surface.get());
  unsigned char* row = cairo_image_surface_get_data(surface.get());
  const int stride = cairo_image_surface_get_stride(surface.get());
  const Colour* cell = pixels.cells.data();
  for (int y = 0; y < pixels.rows; ++y, row += stride) {
    uint32_t* out = reinterpret_cast<uint32_t*>(row);
    for (int x = 0; x < pixels.columns; ++x, ++cell) {
      out[x] = uint32_t{cell->red} << 16 | uint32_t{cell->green} << 8 | cell->blue;
    }
  }
  cairo_surface_mark_dirty(surface.get());
  return surface;
}

struct Painter {
  cairo_t* cr;

  void operator()(const Rect& rect) const {
    SetColour(cr, rect.fill);
    cairo_rectangle(cr, rect.x, rect.y, rect.width, rect.height);
    cairo_fill(cr);
  }
  void operator()(const Line& line) const {
    SetColour(cr, line.colour);
    cairo_set_line_width(cr, 1);
    cairo_move_to(cr, line.x1, line.y1);
    cairo_line_to(cr, line.x2, line.y2);
    cairo_stroke(cr);
  }
  void operator()(const Polyline& line) const {
    SetColour(cr, line.colour);
    cairo_set_line_width(cr, line.width);
    cairo_set_line_cap(cr, CAIRO_LINE_CAP_ROUND);
    cairo_set_line_join(cr, CAIRO_LINE_JOIN_ROUND);
    cairo_move_to(cr, line.points[0].x, line.points[0].y);
    for (const Point& point : line.points) cairo_line_to(cr, point.x, point.y);
    cairo_stroke(cr);
    cairo_set_line_cap(cr, CAIRO_LINE_CAP_BUTT);
  }
  void operator()(const Text& text) const {
    SetColour(cr, text.colour);
    SetFont(cr, text.size, text.bold);
    cairo_text_extents_t extents;
    cairo_text_extents(cr, text.text.c_str(), &extents);
    const double shift = text.anchor == Anchor::kStart    ? 0
                         : text.anchor == Anchor::kMiddle ? extents.x_advance / 2
                                                          : extents.x_advance;
    cairo_save(cr);
    cairo_translate(cr, text.x, text.y);
    cairo_rotate(cr, text.rotation_degrees * std::numbers::pi / 180);
    cairo_move_to(cr, -shift, text.size * kMiddleToBaseline);
    cairo_show_text(cr, text.text.c_str());
    cairo_restore(cr);
  }
  void operator()(const Pixels& pixels) const {
    const Surface surface = SurfaceFrom(pixels);
    cairo_save(cr);
    cairo_translate(cr, pixels.x, pixels.y);
    cairo_scale(cr, pixels.width / pixels.columns, pixels.height / pixels.rows);
    cairo_set_source_surface(cr, surface.get(), 0, 0);
    cairo_pattern_set_filter(cairo_get_source(cr), CAIRO_FILTER_NEAREST);
    cairo_paint(cr);
    cairo_restore(cr);
  }
};

cairo_status_t Append(void* out, const unsigned char* bytes, unsigned int count) {
  static_cast<std::string*>(out)->append(reinterpret_cast<const char*>(bytes), count);
  return CAIRO_STATUS_SUCCESS;
}

absl::StatusOr<std::string> Encode(cairo_surface_t* surface) {
  std::string png;
  const cairo_status_t status = cairo_surface_write_to_png_stream(surface, Append, &png);
  if (status != CAIRO_STATUS_SUCCESS) {
    return absl::InternalError(
        absl::StrCat("can't encode the picture: ", cairo_status_to_string(status)));
  }
  return png;
}

}  // namespace

double TextWidth(std::string_view text, double size, bool bold) {
  const Surface surface = NewSurface(1, 1);
  const Context context(cairo_create(surface.get()));
  SetFont(context.get(), size, bold);
  cairo_text_extents_t extents;
  cairo_text_extents(context.get(), std::string(text).c_str(), &extents);
  return extents.x_advance;
}

absl::StatusOr<std::string> EncodePng(const Pixels& pixels) {
  return Encode(SurfaceFrom(pixels).get());
}

absl::StatusOr<std::string> RenderPng(const Picture& picture) {
  const Surface surface = NewSurface(static_cast<int>(std::ceil(picture.width * kPixelsPerUnit)),
                                     static_cast<int>(std::ceil(picture.height * kPixelsPerUnit)));
  const Context context(cairo_create(surface.get()));
  cairo_scale(context.get(), kPixelsPerUnit, kPixelsPerUnit);
  SetColour(context.get(), kWhite);
  cairo_paint(context.get());
  for (const Figure& figure : picture.figures) std::visit(Painter{context.get()}, figure);
  if (const cairo_status_t status = cairo_status(context.get()); status != CAIRO_STATUS_SUCCESS) {
    return absl::InternalError(
        absl::StrCat("can't draw the picture: ", cairo_status_to_string(status)));
  }
  return Encode(surface.get());
}

}  // namespace rapt
