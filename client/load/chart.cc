#include "client/load/chart.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "client/console/text.h"

namespace rapt::load {
namespace {

constexpr double kWidth = 760, kHeight = 300;
constexpr double kLeft = 70, kRight = 150, kTop = 36, kBottom = 48;
constexpr size_t kColours = 6;

// Maps values to coordinates.
class PlotArea {
 public:
  explicit PlotArea(const Chart& chart) {
    double high = 0;
    for (const Line& line : chart.lines) {
      for (const auto& [x, y] : line.points) {
        low_x_ = !has_points_ ? x : std::min(low_x_, x);
        high_x_ = !has_points_ ? x : std::max(high_x_, x);
        has_points_ = true;
        high = std::max(high, y);
      }
    }
    if (high_x_ <= low_x_) high_x_ = low_x_ + 1;
    y_steps_ = RoundSteps(0, high > 0 ? high : 1, 5);
  }

  double X(double x) const {
    return kLeft + (x - low_x_) / (high_x_ - low_x_) * (kWidth - kLeft - kRight);
  }
  double Y(double y) const {
    return kHeight - kBottom - y / y_steps_.back() * (kHeight - kTop - kBottom);
  }

  bool has_points() const { return has_points_; }
  const std::vector<double>& y_steps() const { return y_steps_; }
  std::vector<Tick> XTicks() const {
    std::vector<Tick> ticks;
    for (const double x : RoundSteps(low_x_, high_x_, 8)) {
      if (x >= low_x_ && x <= high_x_) ticks.push_back({x, absl::StrFormat("%g", x)});
    }
    return ticks;
  }

 private:
  bool has_points_ = false;
  double low_x_ = 0, high_x_ = 1;
  std::vector<double> y_steps_;
};

void DrawAxes(const Chart& chart, const PlotArea& plot, std::string& svg) {
  const double bottom = kHeight - kBottom, right = kWidth - kRight;
  for (const double y : plot.y_steps()) {
    absl::StrAppendFormat(&svg,
                          "<line class='grid' x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f'/>"
                          "<text class='tick' x='%.1f' y='%.1f' text-anchor='end'>%g</text>\n",
                          kLeft, right, plot.Y(y), plot.Y(y), kLeft - 8, plot.Y(y) + 4, y);
  }
  for (const Tick& tick : chart.x_ticks.empty() ? plot.XTicks() : chart.x_ticks) {
    absl::StrAppendFormat(&svg,
                          "<line class='grid' x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f'/>"
                          "<text class='tick' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n",
                          plot.X(tick.at), plot.X(tick.at), bottom, bottom + 5, plot.X(tick.at),
                          bottom + 19, EscapeXml(tick.label));
  }
  absl::StrAppendFormat(&svg,
                        "<text class='title' x='%.1f' y='20'>%s</text>"
                        "<text class='tick' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>"
                        "<text class='tick' transform='translate(16 %.1f) rotate(-90)' "
                        "text-anchor='middle'>%s</text>\n",
                        kLeft, EscapeXml(chart.title), (kLeft + right) / 2, kHeight - 10,
                        EscapeXml(chart.x_label), (kTop + bottom) / 2, EscapeXml(chart.y_label));
}

void DrawLine(const Line& line, size_t index, const PlotArea& plot, std::string& svg) {
  const size_t colour = index % kColours;
  absl::StrAppendFormat(&svg, "<polyline style='stroke:var(--line%d)' points='", colour);
  for (const auto& [x, y] : line.points) {
    absl::StrAppendFormat(&svg, "%.1f,%.1f ", plot.X(x), plot.Y(y));
  }
  svg += "'/>\n";
  // The title shows a point's value under the pointer.
  for (const auto& [x, y] : line.points) {
    absl::StrAppendFormat(&svg,
                          "<circle style='fill:var(--line%d)' cx='%.1f' cy='%.1f' r='2'>"
                          "<title>%s: %.4g</title></circle>\n",
                          colour, plot.X(x), plot.Y(y), EscapeXml(line.name), y);
  }
  const double y = kTop + 8 + 20 * static_cast<double>(index);
  absl::StrAppendFormat(&svg,
                        "<line style='stroke:var(--line%d)' class='key' x1='%.1f' x2='%.1f' "
                        "y1='%.1f' y2='%.1f'/><text class='tick' x='%.1f' y='%.1f'>%s</text>\n",
                        colour, kWidth - kRight + 16, kWidth - kRight + 36, y, y,
                        kWidth - kRight + 42, y + 4, EscapeXml(line.name));
}

}  // namespace

std::vector<double> RoundSteps(double low, double high, int count) {
  const double rough = std::max(high - low, 1e-12) / count;
  const double magnitude = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * magnitude;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * magnitude >= rough * 0.999) {
      step = factor * magnitude;
      break;
    }
  }
  std::vector<double> steps;
  const double first = std::floor(low / step);
  for (double n = first; steps.empty() || steps.back() < high - step * 1e-9; ++n) {
    steps.push_back(n * step);
  }
  return steps;
}

std::string DrawSvg(const Chart& chart) {
  std::string svg = absl::StrFormat("<svg viewBox='0 0 %g %g' role='img' aria-label='%s'>\n",
                                    kWidth, kHeight, EscapeXml(chart.title));
  const PlotArea plot(chart);
  DrawAxes(chart, plot, svg);
  for (size_t i = 0; i < chart.lines.size(); ++i) DrawLine(chart.lines[i], i, plot, svg);
  if (!plot.has_points()) {
    absl::StrAppendFormat(
        &svg, "<text class='tick' x='%.1f' y='%.1f' text-anchor='middle'>no data</text>\n",
        (kLeft + kWidth - kRight) / 2, (kTop + kHeight - kBottom) / 2);
  }
  return svg + "</svg>\n";
}

}  // namespace rapt::load
