#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/figure_style.h"
#include "client/cli/figures.h"
#include "client/console/text.h"

namespace rapt {
namespace {

constexpr double kPlotWidth = 560;
constexpr double kPlotHeight = 320;
constexpr double kTop = kMargin + kTitleSize + 28;
constexpr double kStroke = 2;
constexpr double kDot = 6;
constexpr int kMostTicks = 12;

using Bytes = std::optional<int64_t>;

Bytes Of(const client::OperatorEstimate& estimate) {
  if (!estimate.refusal.empty()) return std::nullopt;
  return estimate.workspace_bytes + estimate.state_bytes;
}

struct Algorithm {
  const char* name;
  Colour colour;
  Bytes (*bytes)(const client::MemoryEstimate& estimate);
};

constexpr Algorithm kAlgorithms[] = {
    {"standard", {0xd1, 0x49, 0x5b}, [](const auto& e) { return Bytes(e.standard_bytes); }},
    {"fused", {0x2a, 0x78, 0x8e}, [](const auto& e) { return Bytes(e.fused_bytes); }},
    {"LSH", {0xe6, 0x91, 0x2c}, [](const auto& e) { return Of(e.lsh); }},
    {"linear (FAVOR+)", {0x7a, 0x51, 0x95}, [](const auto& e) { return Of(e.linear); }},
};

// A logarithmic axis between powers of two.
struct Axis {
  void Include(double value) {
    const double power = std::log2(std::max(value, 1.0));
    low = std::min(low, std::floor(power));
    high = std::max(high, std::ceil(power));
  }
  // From 0 to 1. An axis of one value has it in the middle.
  double Place(double value) const {
    const double power = std::log2(std::max(value, 1.0));
    return high > low ? (power - low) / (high - low) : 0.5;
  }
  std::vector<int64_t> Ticks() const {
    const int step = static_cast<int>(high - low) / kMostTicks + 1;
    std::vector<int64_t> ticks;
    for (int power = static_cast<int>(low); power <= static_cast<int>(high); power += step) {
      if (power < 63) ticks.push_back(int64_t{1} << power);
    }
    return ticks;
  }

  double low = 63, high = 0;
};

class Chart : Plotter {
 public:
  Chart(const client::MemoryEstimates& estimates, const std::string& title)
      : Plotter(title), estimates_(estimates.estimates) {
    // A curve is drawn from left to right.
    std::sort(estimates_.begin(), estimates_.end(),
              [](const auto& a, const auto& b) { return a.length < b.length; });
    for (const client::MemoryEstimate& estimate : estimates_) {
      lengths_.Include(static_cast<double>(estimate.length));
      for (const Algorithm& algorithm : kAlgorithms) {
        const Bytes bytes = algorithm.bytes(estimate);
        if (bytes) bytes_.Include(static_cast<double>(*bytes));
      }
    }
    double widest = 0;
    for (const int64_t tick : bytes_.Ticks()) {
      widest = std::max(widest, TextWidth(HumanBytes(tick), kNoteSize));
    }
    left_ = kMargin + widest + kLabelGap;
  }

  Picture Draw() && {
    DrawTitle();
    DrawAxes();
    for (const Algorithm& algorithm : kAlgorithms) DrawCurve(algorithm);
    const double widest = DrawLegend();
    AddHoverGrid();
    return std::move(*this).Finish(
        left_ + kPlotWidth + kPanelGap + kLegendLine + kLabelGap + widest + kMargin,
        kTop + kPlotHeight + kLabelGap + kLabelSize + kAxisTitleRoom + kMargin / 2);
  }

 private:
  double X(int64_t length) const {
    return left_ + kPlotWidth * lengths_.Place(static_cast<double>(length));
  }
  double Y(int64_t bytes) const {
    return kTop + kPlotHeight * (1 - bytes_.Place(static_cast<double>(bytes)));
  }

  void DrawAxes() {
    const double bottom = kTop + kPlotHeight;
    for (const int64_t tick : bytes_.Ticks()) {
      Add(Line{left_, Y(tick), left_ + kPlotWidth, Y(tick), kGrid});
      Add(Text{left_ - kLabelGap, Y(tick), HumanBytes(tick), kNoteSize, kInk, Anchor::kEnd});
    }
    for (const int64_t tick : lengths_.Ticks()) {
      Add(Line{X(tick), bottom, X(tick), bottom + 4, kAxis});
      Add(Text{X(tick), bottom + kLabelGap + kLabelSize / 2, absl::StrCat(tick), kLabelSize, kInk,
               Anchor::kMiddle});
    }
    Add(Line{left_, kTop, left_, bottom, kAxis});
    Add(Line{left_, bottom, left_ + kPlotWidth, bottom, kAxis});
    Add(Text{left_ + kPlotWidth / 2, bottom + kLabelGap + kLabelSize + kAxisTitleRoom / 2, "length",
             kNoteSize, kFaintInk, Anchor::kMiddle});
  }

  void DrawCurve(const Algorithm& algorithm) {
    Polyline curve{{}, algorithm.colour, kStroke};
    for (const client::MemoryEstimate& estimate : estimates_) {
      const Bytes bytes = algorithm.bytes(estimate);
      if (!bytes) continue;
      curve.points.push_back({X(estimate.length), Y(*bytes)});
      Add(Polyline{{curve.points.back()}, algorithm.colour, kDot});
    }
    if (!curve.points.empty()) Add(std::move(curve));
  }

  // Returns the width of the widest name.
  double DrawLegend() {
    const double x = left_ + kPlotWidth + kPanelGap;
    double y = kTop;
    double widest = 0;
    for (const Algorithm& algorithm : kAlgorithms) {
      Add(Polyline{{{x, y}, {x + kLegendLine, y}}, algorithm.colour, kStroke});
      Add(Text{x + kLegendLine + kLabelGap, y, algorithm.name, kLabelSize, kInk});
      widest = std::max(widest, TextWidth(algorithm.name, kLabelSize));
      y += kLegendRow;
    }
    return widest;
  }

  // A column of equal width for each length.
  void AddHoverGrid() {
    HoverGrid hover{left_, kTop, kPlotWidth, kPlotHeight, {""}, {}, {}};
    for (const client::MemoryEstimate& estimate : estimates_) {
      hover.column_labels.push_back(absl::StrCat(estimate.length));
      std::vector<std::string> values;
      for (const Algorithm& algorithm : kAlgorithms) {
        const Bytes bytes = algorithm.bytes(estimate);
        values.push_back(absl::StrCat(algorithm.name, ": ", bytes ? HumanBytes(*bytes) : "-"));
      }
      hover.values.push_back(absl::StrJoin(values, ", "));
    }
    picture_.hover_grids.push_back(std::move(hover));
  }

  std::vector<client::MemoryEstimate> estimates_;
  Axis lengths_, bytes_;
  double left_ = 0;  // of the plot
};

}  // namespace

Picture DrawScaling(const client::MemoryEstimates& estimates, const std::string& title) {
  return Chart(estimates, title).Draw();
}

}  // namespace rapt
