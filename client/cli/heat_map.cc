#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/figure_style.h"
#include "client/cli/figures.h"

namespace rapt {
namespace {

constexpr Colour kNothing = {0xf0, 0xf0, 0xf0};  // a key without attention
constexpr Colour kNotANumber = {0xd6, 0x27, 0x28};

constexpr double kMaxCell = 48;
constexpr double kMinTickSpacing = 13;     // closer labels would touch
constexpr double kSparseTickSpacing = 26;  // spacing once some labels are omitted
constexpr double kShortLabelWidth = 40;    // labels up to this width stay horizontal
constexpr double kColourBarWidth = 14;
constexpr int kColourBarSteps = 128;
constexpr int64_t kMaxRectangles = 64;  // cells per side; beyond that, pixels
constexpr size_t kMaxBars = 40;

// Of colours by values.
enum class Growth : uint8_t { kLinear, kRoot };

// The scale of colours and numbers, shared by all panels.
class Scale {
 public:
  explicit Scale(const std::vector<HeadWeights>& heads, Growth growth = Growth::kLinear)
      : growth_(growth) {
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (const HeadWeights& head : heads) {
      for (const double value : head.values) {
        if (!std::isfinite(value)) continue;
        low = std::min(low, value);
        high = std::max(high, value);
      }
    }
    if (low > high) low = high = 0;  // no finite value
    are_weights_ = low >= 0;
    low_ = std::min(low, 0.0);
    high_ = high > low_ ? high : low_ + 1;
    const double largest = std::max(-low_, high_);
    decimals_ = largest < 0.1 ? 3 : largest < 10 ? 2 : largest < 100 ? 1 : 0;
  }

  double low() const { return low_; }
  double high() const { return high_; }
  double Share(double value) const {
    const double share = (value - low_) / (high_ - low_);
    return growth_ == Growth::kRoot ? std::sqrt(std::max(share, 0.0)) : share;
  }

  // True for a masked key or a weight of exactly zero.
  bool IsBlank(double value) const {
    return value == -std::numeric_limits<double>::infinity() || (are_weights_ && value == 0);
  }
  Colour ColourOf(double value) const {
    if (std::isnan(value)) return kNotANumber;
    return IsBlank(value) ? kNothing : Viridis(Share(value));
  }
  std::string Format(double value) const {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    return absl::StrFormat("%.*f", decimals_, value);
  }

 private:
  Growth growth_;
  double low_ = 0, high_ = 1;
  bool are_weights_ = true;
  int decimals_ = 2;
};

// One axis, divided into at most max_cells cells.
struct Axis {
  Axis(const std::vector<std::string>& element_labels, int64_t max_cells)
      : elements(static_cast<int64_t>(element_labels.size())),
        block(std::max<int64_t>((elements + max_cells - 1) / max_cells, 1)) {
    for (const std::string& label : element_labels) labels.push_back(Shorten(label));
    for (int64_t first = 0; first < elements; first += block) {
      const int64_t last = std::min(first + block, elements) - 1;
      ranges.push_back(first == last
                           ? element_labels[first]
                           : absl::StrCat(element_labels[first], "–", element_labels[last]));
    }
  }
  int64_t cells() const { return static_cast<int64_t>(ranges.size()); }
  // The middle of an element, in cells from the edge of the first one.
  double Middle(int64_t element) const { return (element + 0.5) / block; }

  int64_t elements;
  int64_t block;                    // elements in one cell
  std::vector<std::string> labels;  // of each element, truncated
  std::vector<std::string> ranges;  // of the elements of each cell, not truncated
};

// Returns the larger value. NaN wins, so that it stays visible in a block.
double Larger(double a, double b) { return std::isnan(a) || b < a ? a : b; }

std::vector<double> LargestOfBlocks(const std::vector<double>& values, int64_t keys,
                                    const Axis& rows, const Axis& columns) {
  std::vector<double> blocks(rows.cells() * columns.cells(),
                             -std::numeric_limits<double>::infinity());
  for (size_t at = 0; at < values.size(); ++at) {
    const int64_t i = static_cast<int64_t>(at) / keys, j = static_cast<int64_t>(at) % keys;
    double& block = blocks[i / rows.block * columns.cells() + j / columns.block];
    block = Larger(block, values[at]);
  }
  return blocks;
}

// The arrangement of panels. The more panels, the smaller each is.
struct PanelGrid {
  explicit PanelGrid(size_t panels)
      : columns(panels <= 3    ? std::max<size_t>(panels, 1)
                : panels == 4  ? 2
                : panels <= 16 ? 4
                               : 8) {
    extent = columns == 1   ? 640
             : columns == 2 ? 480
             : columns == 3 ? 400
             : columns == 4 ? 320
                            : 240;
  }
  size_t columns;
  double extent;  // maximum width and height of a panel's cells
};

double CellSize(int64_t cells, double extent) {
  const double size = std::min(extent / std::max<int64_t>(cells, 1), kMaxCell);
  return size >= 4 ? std::floor(size) : size;
}

// Matrices of numbers as colours.
class ColourPlotter : protected Plotter {
 protected:
  ColourPlotter(const AttentionFigure& figure, Growth growth)
      : Plotter(figure.title), figure_(figure), scale_(figure.heads, growth) {}

  void DrawPixels(const std::vector<double>& values, int64_t rows, int64_t columns,
                  const Point& corner, double width, double height) {
    Pixels pixels{
        corner.x, corner.y, width, height, static_cast<int>(columns), static_cast<int>(rows), {}};
    pixels.cells.reserve(values.size());
    for (const double value : values) pixels.cells.push_back(scale_.ColourOf(value));
    Add(std::move(pixels));
  }

  void AddHoverGrid(const std::vector<double>& values, const Axis& rows, const Axis& columns,
                    const Point& corner, double width, double height) {
    HoverGrid hover{corner.x, corner.y, width, height, rows.ranges, columns.ranges, {}};
    for (const double value : values) hover.values.push_back(absl::StrFormat("%.4g", value));
    picture_.hover_grids.push_back(std::move(hover));
  }

  // Returns its right and lower end.
  std::pair<double, double> DrawColourBar(double x, double y, double room) {
    const double height = std::clamp(room, 96.0, 320.0);
    Pixels bar{x, y, kColourBarWidth, height, 1, kColourBarSteps, {}};
    for (int step = 0; step < kColourBarSteps; ++step) {
      bar.cells.push_back(Viridis(1 - (step + 0.5) / kColourBarSteps));
    }
    Add(std::move(bar));
    double widest = 0;
    for (const double tick : Ticks(scale_.low(), scale_.high())) {
      const double level = y + height * (1 - scale_.Share(tick));
      const std::string label = FormatTick(tick);
      Add(Line{x + kColourBarWidth, level, x + kColourBarWidth + 4, level, kAxis});
      Add(Text{x + kColourBarWidth + 8, level, label, kNoteSize, kInk});
      widest = std::max(widest, TextWidth(label, kNoteSize));
    }
    return {x + kColourBarWidth + 8 + widest + kMargin, y + height};
  }

  const AttentionFigure& figure_;
  const Scale scale_;
};

std::string NoteOfBlocks(const Axis& rows, const Axis& columns) {
  if (rows.block == 1 && columns.block == 1) return "";
  return absl::StrFormat("each cell is the largest of %d × %d", rows.block, columns.block);
}

class HeatMapLayout : ColourPlotter {
 public:
  explicit HeatMapLayout(const AttentionFigure& figure)
      : ColourPlotter(figure, Growth::kLinear),
        grid_(figure.heads.size()),
        rows_(figure.query_labels, static_cast<int64_t>(grid_.extent)),
        columns_(figure.key_labels, static_cast<int64_t>(grid_.extent)) {
    cell_width_ = CellSize(columns_.cells(), grid_.extent);
    cell_height_ = CellSize(rows_.cells(), grid_.extent);
    // Cells are square unless that would leave too little room for the labels of the longer side.
    cell_width_ = std::min(cell_width_, std::max(cell_height_, 20.0));
    cell_height_ = std::min(cell_height_, std::max(cell_width_, 20.0));

    const double widest_key = WidestLabel(columns_.labels);
    const double key_spacing = cell_width_ / columns_.block;
    keys_level_ = widest_key <= std::max(key_spacing - 4, kShortLabelWidth);
    key_step_ = 1;
    if (!keys_level_) {
      // Slanted labels fit closer together than horizontal ones, but not as close as lines of text.
      key_step_ = RoundStep(kMinTickSpacing * 1.2 / key_spacing);
    } else if (widest_key > key_spacing - 4) {
      key_step_ = RoundStep((widest_key + 12) / key_spacing);
    }
    key_label_room_ = (keys_level_ ? kLabelSize : widest_key * std::sqrt(0.5) + kLabelSize) + 6;
    const double query_spacing = cell_height_ / rows_.block;
    query_step_ =
        query_spacing >= kMinTickSpacing ? 1 : RoundStep(kSparseTickSpacing / query_spacing);
    left_ = kMargin + kAxisTitleRoom + WidestLabel(rows_.labels) + kLabelGap;
    if (!keys_level_) left_ = std::max(left_, kMargin + widest_key * std::sqrt(0.5));
    top_ = kMargin + kTitleSize + 16;
    if (!NoteOfBlocks(rows_, columns_).empty()) top_ += kNoteSize + 6;
    const bool titled = std::any_of(figure.heads.begin(), figure.heads.end(),
                                    [](const HeadWeights& head) { return !head.title.empty(); });
    panel_title_room_ = titled ? kPanelTitleSize + 12 : 0;
  }

  Picture Draw() && {
    DrawTitle(NoteOfBlocks(rows_, columns_));
    for (size_t panel = 0; panel < figure_.heads.size(); ++panel) DrawPanel(panel);
    const size_t across = std::min(grid_.columns, figure_.heads.size());
    const auto [width, height] = DrawColourBar(left_ + across * (CellsWidth() + kPanelGap),
                                               top_ + panel_title_room_, CellsHeight());
    const size_t rows = (figure_.heads.size() + grid_.columns - 1) / grid_.columns;
    return std::move(*this).Finish(
        width, std::max(height, top_ + rows * PanelHeight() - kPanelGap) + kMargin / 2);
  }

 private:
  double CellsWidth() const { return cell_width_ * columns_.cells(); }
  double CellsHeight() const { return cell_height_ * rows_.cells(); }
  double PanelHeight() const {
    return panel_title_room_ + CellsHeight() + key_label_room_ + kAxisTitleRoom + kPanelGap;
  }

  void DrawPanel(size_t panel) {
    const HeadWeights& head = figure_.heads[panel];
    const double x = left_ + (panel % grid_.columns) * (CellsWidth() + kPanelGap);
    const size_t grid_row = panel / grid_.columns;
    const double y = top_ + static_cast<double>(grid_row) * PanelHeight() + panel_title_room_;
    if (!head.title.empty()) {
      Add(Text{x + CellsWidth() / 2, y - 14, head.title, kPanelTitleSize, kInk, Anchor::kMiddle, 0,
               true});
    }
    const std::vector<double> values =
        LargestOfBlocks(head.values, figure_.key_labels.size(), rows_, columns_);
    if (rows_.cells() <= kMaxRectangles && columns_.cells() <= kMaxRectangles) {
      DrawRectangles(values, x, y);
    } else {
      DrawPixels(values, rows_.cells(), columns_.cells(), {x, y}, CellsWidth(), CellsHeight());
    }
    if (panel % grid_.columns == 0) DrawQueryLabels(x, y);
    DrawKeyLabels(x, y);
    AddHoverGrid(values, rows_, columns_, {x, y}, CellsWidth(), CellsHeight());
  }

  void DrawRectangles(const std::vector<double>& values, double x, double y) {
    const double gap = std::min(cell_width_, cell_height_) >= 12 ? 1 : 0;
    const double size = cell_width_ >= 40 ? 12 : 10;
    const double widest = std::max(TextWidth(scale_.Format(scale_.low()), size),
                                   TextWidth(scale_.Format(scale_.high()), size));
    const bool has_room = cell_height_ >= size + 4 && cell_width_ >= widest + 4;
    for (int64_t i = 0; i < rows_.cells(); ++i) {
      for (int64_t j = 0; j < columns_.cells(); ++j) {
        const double value = values[i * columns_.cells() + j];
        const double left = x + j * cell_width_, top = y + i * cell_height_;
        const Colour colour = scale_.ColourOf(value);
        Add(Rect{left, top, cell_width_ - gap, cell_height_ - gap, colour});
        if (!has_room || scale_.IsBlank(value)) continue;
        Add(Text{left + (cell_width_ - gap) / 2, top + (cell_height_ - gap) / 2,
                 scale_.Format(value), size, ReadableOn(colour), Anchor::kMiddle});
      }
    }
  }

  void DrawQueryLabels(double x, double y) {
    for (int64_t i = 0; i < rows_.elements; i += query_step_) {
      Add(Text{x - kLabelGap, y + rows_.Middle(i) * cell_height_, rows_.labels[i], kLabelSize, kInk,
               Anchor::kEnd});
    }
    Add(Text{kMargin + kNoteSize / 2, y + CellsHeight() / 2, "queries", kNoteSize, kFaintInk,
             Anchor::kMiddle, -90});
  }

  void DrawKeyLabels(double x, double y) {
    const double top = y + CellsHeight() + kLabelGap + (keys_level_ ? kLabelSize / 2 : 0);
    for (int64_t j = 0; j < columns_.elements; j += key_step_) {
      const double middle = x + columns_.Middle(j) * cell_width_;
      if (keys_level_) {
        Add(Text{middle, top, columns_.labels[j], kLabelSize, kInk, Anchor::kMiddle});
      } else {
        Add(Text{middle + 3, top, columns_.labels[j], kLabelSize, kInk, Anchor::kEnd, -45});
      }
    }
    Add(Text{x + CellsWidth() / 2, y + CellsHeight() + key_label_room_ + kAxisTitleRoom / 2, "keys",
             kNoteSize, kFaintInk, Anchor::kMiddle});
  }

  const PanelGrid grid_;
  const Axis rows_, columns_;
  double cell_width_ = 0, cell_height_ = 0;
  bool keys_level_ = false;
  int64_t key_step_ = 1, query_step_ = 1;  // between drawn labels
  double key_label_room_ = 0;
  double panel_title_room_ = 0;
  double left_ = 0, top_ = 0;  // of the first panel's cells, without its title
};

// Colours grow with the root of the values, so that small ones are seen in small pictures.
class HeadTableLayout : ColourPlotter {
 public:
  explicit HeadTableLayout(const AttentionFigure& figure)
      : ColourPlotter(figure, Growth::kRoot),
        rows_(figure.query_labels, kThumbnail),
        columns_(figure.key_labels, kThumbnail) {
    const auto longest = std::max(rows_.cells(), columns_.cells());
    width_ = kThumbnail * static_cast<double>(columns_.cells()) / static_cast<double>(longest);
    height_ = kThumbnail * static_cast<double>(rows_.cells()) / static_cast<double>(longest);
    left_ = kMargin + WidestLabel(figure.table->rows) + kLabelGap;
    step_ = std::max(width_, WidestLabel(figure.table->columns)) + kThumbnailGap;
    top_ = kMargin + kTitleSize + 32;
    if (!NoteOfBlocks(rows_, columns_).empty()) top_ += kNoteSize + 6;
  }

  Picture Draw() && {
    DrawTitle(NoteOfBlocks(rows_, columns_));
    const HeadTable& table = *figure_.table;
    for (size_t column = 0; column < table.columns.size(); ++column) {
      Add(Text{XOf(column) + width_ / 2, top_ - 12, table.columns[column], kLabelSize, kInk,
               Anchor::kMiddle});
    }
    for (size_t row = 0; row < table.rows.size(); ++row) {
      Add(Text{left_ - kLabelGap, YOf(row) + height_ / 2, table.rows[row], kLabelSize, kInk,
               Anchor::kEnd});
      for (size_t column = 0; column < table.columns.size(); ++column) DrawHead(row, column);
    }
    const auto [width, height] = DrawColourBar(XOf(table.columns.size()) + kThumbnailGap, top_,
                                               YOf(table.rows.size()) - top_);
    return std::move(*this).Finish(width, std::max(height, YOf(table.rows.size())) + kMargin);
  }

 private:
  static constexpr int64_t kThumbnail = 80;
  static constexpr double kThumbnailGap = 8;

  double XOf(size_t column) const { return left_ + static_cast<double>(column) * step_; }
  double YOf(size_t row) const {
    return top_ + static_cast<double>(row) * (height_ + kThumbnailGap);
  }

  void DrawHead(size_t row, size_t column) {
    const HeadWeights& head = figure_.heads[row * figure_.table->columns.size() + column];
    const Point corner{XOf(column), YOf(row)};
    const std::vector<double> values =
        LargestOfBlocks(head.values, columns_.elements, rows_, columns_);
    DrawPixels(values, rows_.cells(), columns_.cells(), corner, width_, height_);
    AddHoverGrid(values, rows_, columns_, corner, width_, height_);
  }

  const Axis rows_, columns_;
  double width_ = 0, height_ = 0;  // of a head
  double step_ = 0;                // from a column to the next
  double left_ = 0, top_ = 0;      // of the first head
};

// Returns the keys to draw, in order. If there are too many, takes those with the largest value in
// any head.
std::vector<size_t> KeysToDraw(const std::vector<HeadWeights>& heads, size_t first, size_t count) {
  std::vector<size_t> keys(count);
  std::iota(keys.begin(), keys.end(), size_t{0});
  if (count <= kMaxBars) return keys;
  std::vector<double> largest(count, -std::numeric_limits<double>::infinity());
  for (const HeadWeights& head : heads) {
    for (size_t j = 0; j < count; ++j) {
      const double value = head.values[first + j];
      largest[j] =
          std::isnan(value) ? std::numeric_limits<double>::infinity() : std::max(largest[j], value);
    }
  }
  std::stable_sort(keys.begin(), keys.end(),
                   [&largest](size_t a, size_t b) { return largest[a] > largest[b]; });
  keys.resize(kMaxBars);
  std::sort(keys.begin(), keys.end());
  return keys;
}

class BarLayout : Plotter {
 public:
  BarLayout(const AttentionFigure& figure, int64_t query)
      : Plotter(
            absl::StrFormat("%s: attention from “%s”", figure.title, figure.query_labels[query])),
        figure_(figure),
        first_(query * figure.key_labels.size()),
        keys_(KeysToDraw(figure.heads, first_, figure.key_labels.size())),
        scale_(RowsOf(figure, first_)),
        columns_(PanelGrid(figure.heads.size()).columns),
        bar_width_(columns_ == 1   ? 400
                   : columns_ <= 3 ? 260
                                   : 170) {
    for (const size_t key : keys_) {
      labels_.push_back(Shorten(figure.key_labels[key]));
      hover_labels_.push_back(
          absl::StrCat(figure.query_labels[query], " → ", figure.key_labels[key]));
    }
    left_ = kMargin + WidestLabel(labels_) + kLabelGap;
    value_room_ = std::max(TextWidth("masked", kNoteSize),
                           TextWidth(scale_.Format(-scale_.high()), kNoteSize)) +
                  12;
  }

  Picture Draw() && {
    const size_t keys = figure_.key_labels.size();
    DrawTitle(keys_.size() < keys ? absl::StrFormat("the %d largest of %d keys", keys_.size(), keys)
                                  : "");
    for (size_t panel = 0; panel < figure_.heads.size(); ++panel) DrawPanel(panel);
    const size_t rows = (figure_.heads.size() + columns_ - 1) / columns_;
    const size_t across = std::min(columns_, figure_.heads.size());
    return std::move(*this).Finish(left_ + across * PanelWidth() - kPanelGap + kMargin,
                                   kTop + rows * PanelHeight() - kPanelGap + kMargin);
  }

 private:
  static constexpr double kTop = kMargin + kTitleSize + 28;
  static constexpr double kRow = 24;
  static constexpr double kBar = 17;
  static constexpr double kPanelTitleRoom = 24;

  static std::vector<HeadWeights> RowsOf(const AttentionFigure& figure, size_t first) {
    std::vector<HeadWeights> rows;
    for (const HeadWeights& head : figure.heads) {
      const auto begin = head.values.begin() + first;
      rows.push_back({head.title, {begin, begin + figure.key_labels.size()}});
    }
    return rows;
  }

  double PanelWidth() const { return bar_width_ + value_room_ + kPanelGap; }
  double PanelHeight() const { return kPanelTitleRoom + keys_.size() * kRow + kPanelGap; }

  void DrawPanel(size_t panel) {
    const HeadWeights& head = figure_.heads[panel];
    const double x = left_ + (panel % columns_) * PanelWidth();
    const size_t grid_row = panel / columns_;
    const double y = kTop + static_cast<double>(grid_row) * PanelHeight() + kPanelTitleRoom;
    Add(Text{x, y - 14, head.title, kPanelTitleSize, kInk, Anchor::kStart, 0, true});
    const double zero = x + bar_width_ * std::clamp(scale_.Share(0), 0.0, 1.0);
    HoverGrid hover{x, y, bar_width_ + value_room_, keys_.size() * kRow, hover_labels_, {""}, {}};
    for (size_t row = 0; row < keys_.size(); ++row) {
      const double value = head.values[first_ + keys_[row]];
      const double middle = y + (row + 0.5) * kRow;
      const double end = std::isfinite(value) ? x + bar_width_ * scale_.Share(value) : zero;
      Add(Rect{std::min(zero, end), middle - kBar / 2, std::abs(end - zero), kBar,
               scale_.ColourOf(value)});
      const bool blank = scale_.IsBlank(value);
      const std::string number = !blank ? scale_.Format(value) : value == 0 ? "0" : "masked";
      Add(Text{std::max(zero, end) + 6, middle, number, kNoteSize, blank ? kFaintInk : kInk});
      if (panel % columns_ == 0) {
        Add(Text{x - kLabelGap, middle, labels_[row], kLabelSize, kInk, Anchor::kEnd});
      }
      hover.values.push_back(absl::StrFormat("%.4g", value));
    }
    Add(Line{zero, y, zero, y + keys_.size() * kRow, kAxis});
    picture_.hover_grids.push_back(std::move(hover));
  }

  const AttentionFigure& figure_;
  const size_t first_;  // the query's first value in each head
  const std::vector<size_t> keys_;
  const Scale scale_;
  const size_t columns_;
  const double bar_width_;
  std::vector<std::string> labels_, hover_labels_;
  double left_ = 0, value_room_ = 0;
};

}  // namespace

Picture DrawHeatMap(const AttentionFigure& figure) { return HeatMapLayout(figure).Draw(); }

Picture DrawHeadTable(const AttentionFigure& figure) { return HeadTableLayout(figure).Draw(); }

Picture DrawBars(const AttentionFigure& figure, int64_t query) {
  return BarLayout(figure, query).Draw();
}

}  // namespace rapt
