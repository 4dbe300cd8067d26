#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/figure_style.h"
#include "client/cli/figures.h"

namespace rapt {
namespace {

constexpr Colour kCurveColours[kMaxCurves] = {
    {0x2a, 0x78, 0x8e}, {0xd1, 0x49, 0x5b}, {0x7a, 0x51, 0x95}, {0xe6, 0x91, 0x2c},
    {0x3d, 0x8b, 0x40}, {0x55, 0x55, 0x55}, {0x1f, 0xb8, 0xd1}, {0xa0, 0x6a, 0x42}};

constexpr double kPlotWidth = 640;
constexpr double kPlotHeight = 260;
constexpr double kTop = kMargin + kTitleSize + 20;
constexpr double kStroke = 1.5;

// The finite values of the curves, with a border.
struct Range {
  Range(const AttentionFigure& figure, const std::vector<int64_t>& columns) {
    double least = std::numeric_limits<double>::infinity(), most = -least;
    for (const HeadWeights& head : figure.heads) {
      for (size_t row = 0; row < head.values.size(); row += figure.key_labels.size()) {
        for (const int64_t column : columns) {
          const double value = head.values[row + column];
          if (!std::isfinite(value)) continue;
          least = std::min(least, value);
          most = std::max(most, value);
        }
      }
    }
    if (least > most) least = most = 0;  // no finite value
    using Limits = std::numeric_limits<double>;
    const double border = most > least ? std::max(most / 20 - least / 20, Limits::min())
                                       : std::max(std::abs(most) / 20, 0.5);
    low = std::max(least - border, -Limits::max());
    high = std::min(most + border, Limits::max());
  }

  double low = 0, high = 1;
};

class CurveLayout : Plotter {
 public:
  CurveLayout(const AttentionFigure& figure, const std::vector<int64_t>& columns,
              CurveTitles titles)
      : Plotter(figure.title),
        figure_(figure),
        columns_(columns),
        titles_(std::move(titles)),
        range_(figure, columns),
        ticks_(Ticks(range_.low, range_.high)),
        spacing_(kPlotWidth / static_cast<double>(figure.query_labels.size())) {
    for (const std::string& label : figure.query_labels) row_labels_.push_back(Shorten(label));
    for (const int64_t column : columns) {
      column_labels_.push_back(Shorten(figure.key_labels[column]));
    }
    row_step_ = RoundStep((WidestLabel(row_labels_) + 12) / spacing_);
    double widest_tick = 0;
    for (const double tick : ticks_) {
      widest_tick = std::max(widest_tick, TextWidth(FormatTick(tick), kNoteSize));
    }
    left_ = kMargin + widest_tick + kLabelGap;
  }

  Picture Draw() && {
    DrawTitle();
    double y = kTop;
    for (const HeadWeights& head : figure_.heads) y = DrawPanel(head, y) + kPanelGap;
    const double legend =
        kPanelGap + kLegendLine + kLabelGap +
        std::max(WidestLabel(column_labels_), TextWidth(titles_.columns, kNoteSize));
    return std::move(*this).Finish(left_ + kPlotWidth + legend + kMargin,
                                   y - kPanelGap + kMargin / 2);
  }

 private:
  double X(size_t row) const { return left_ + (static_cast<double>(row) + 0.5) * spacing_; }
  double Y(double top, double value) const {
    // Differences of halves do not overflow.
    const double below = (range_.high / 2 - value / 2) / (range_.high / 2 - range_.low / 2);
    return top + kPlotHeight * below;
  }

  // Returns the bottom of the panel.
  double DrawPanel(const HeadWeights& head, double y) {
    if (!head.title.empty()) {
      Add(Text{left_, y + kPanelTitleSize / 2, head.title, kPanelTitleSize, kInk, Anchor::kStart, 0,
               true});
      y += kPanelTitleSize + 12;
    }
    DrawAxes(y);
    for (size_t n = 0; n < columns_.size(); ++n) DrawCurve(head, n, y);
    DrawLegend(y);
    AddHoverGrid(head, y);
    return y + kPlotHeight + kLabelGap + kLabelSize + kAxisTitleRoom;
  }

  void DrawAxes(double top) {
    for (const double tick : ticks_) {
      const double y = Y(top, tick);
      Add(Line{left_, y, left_ + kPlotWidth, y, tick == 0 ? kAxis : kGrid});
      Add(Text{left_ - kLabelGap, y, FormatTick(tick), kNoteSize, kInk, Anchor::kEnd});
    }
    const double bottom = top + kPlotHeight;
    Add(Line{left_, top, left_, bottom, kAxis});
    Add(Line{left_, bottom, left_ + kPlotWidth, bottom, kAxis});
    for (size_t row = 0; row < row_labels_.size(); row += row_step_) {
      Add(Line{X(row), bottom, X(row), bottom + 4, kAxis});
      Add(Text{X(row), bottom + kLabelGap + kLabelSize / 2, row_labels_[row], kLabelSize, kInk,
               Anchor::kMiddle});
    }
    Add(Text{left_ + kPlotWidth / 2, bottom + kLabelGap + kLabelSize + kAxisTitleRoom / 2,
             titles_.rows, kNoteSize, kFaintInk, Anchor::kMiddle});
  }

  void DrawCurve(const HeadWeights& head, size_t n, double top) {
    Polyline curve{{}, kCurveColours[n], kStroke};
    const auto end = [&] {
      if (!curve.points.empty()) Add(curve);
      curve.points.clear();
    };
    for (size_t row = 0; row < row_labels_.size(); ++row) {
      const double value = ValueOf(head, row, n);
      if (std::isfinite(value)) {
        curve.points.push_back({X(row), Y(top, value)});
      } else {
        end();
      }
    }
    end();
  }

  void DrawLegend(double top) {
    const double x = left_ + kPlotWidth + kPanelGap;
    Add(Text{x, top, titles_.columns, kNoteSize, kFaintInk});
    for (size_t n = 0; n < columns_.size(); ++n) {
      const double y = top + static_cast<double>(n + 1) * kLegendRow;
      Add(Polyline{{{x, y}, {x + kLegendLine, y}}, kCurveColours[n], kStroke});
      Add(Text{x + kLegendLine + kLabelGap, y, column_labels_[n], kLabelSize, kInk});
    }
  }

  // One column of cells for each row, with the values of all curves.
  void AddHoverGrid(const HeadWeights& head, double top) {
    HoverGrid hover{left_, top, kPlotWidth, kPlotHeight, {""}, figure_.query_labels, {}};
    for (size_t row = 0; row < row_labels_.size(); ++row) {
      std::vector<std::string> values;
      for (size_t n = 0; n < columns_.size(); ++n) {
        values.push_back(
            absl::StrFormat("%s: %.4g", figure_.key_labels[columns_[n]], ValueOf(head, row, n)));
      }
      hover.values.push_back(absl::StrJoin(values, ", "));
    }
    picture_.hover_grids.push_back(std::move(hover));
  }

  double ValueOf(const HeadWeights& head, size_t row, size_t n) const {
    return head.values[row * figure_.key_labels.size() + columns_[n]];
  }

  const AttentionFigure& figure_;
  const std::vector<int64_t>& columns_;
  const CurveTitles titles_;
  const Range range_;
  const std::vector<double> ticks_;
  const double spacing_;  // of the rows
  std::vector<std::string> row_labels_, column_labels_;
  int64_t row_step_ = 1;  // between drawn labels
  double left_ = 0;       // of the plot
};

}  // namespace

Picture DrawCurves(const AttentionFigure& figure, const std::vector<int64_t>& columns,
                   CurveTitles titles) {
  return CurveLayout(figure, columns, std::move(titles)).Draw();
}

}  // namespace rapt
