// What the pictures share: colours, sizes in CSS pixels, titles, labels and the ticks of axes.
#ifndef RAPT_CLIENT_CLI_FIGURE_STYLE_H_
#define RAPT_CLIENT_CLI_FIGURE_STYLE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/picture.h"

namespace rapt {

inline constexpr Colour kInk = {0x22, 0x22, 0x22};
inline constexpr Colour kFaintInk = {0x77, 0x77, 0x77};
inline constexpr Colour kAxis = {0xbb, 0xbb, 0xbb};
inline constexpr Colour kGrid = {0xe8, 0xe8, 0xe8};

inline constexpr double kMargin = 24;
inline constexpr double kTitleSize = 17;
inline constexpr double kPanelTitleSize = 13;
inline constexpr double kLabelSize = 12;
inline constexpr double kNoteSize = 11;
inline constexpr double kPanelGap = 28;
inline constexpr double kLabelGap = 8;  // between a label and what it names
inline constexpr double kAxisTitleRoom = 24;
inline constexpr double kLegendLine = 20;
inline constexpr double kLegendRow = 20;

// A picture in the making, with its title at the top left.
class Plotter {
 protected:
  explicit Plotter(std::string title) { picture_.title = std::move(title); }

  template <typename T>
  void Add(T figure) {
    picture_.figures.emplace_back(std::move(figure));
  }
  // Draws the title and below it the note, unless that is empty.
  void DrawTitle(const std::string& note = "");
  // Returns the picture, `width` wide unless the title needs more.
  Picture Finish(double width, double height) &&;

  Picture picture_;
};

// Returns the label, truncated with an ellipsis if it is too long.
std::string Shorten(const std::string& label);

// Returns the width of the widest label.
double WidestLabel(const std::vector<std::string>& labels);

// Returns round numbers within [low, high], at most six. REQUIRES: low < high.
std::vector<double> Ticks(double low, double high);
std::string FormatTick(double tick);

// Returns the first of 1, 2, 5, 10, 20, ... that is at least `step`.
int64_t RoundStep(double step);

// The Viridis scale. Its lightness grows evenly, so equal steps look equal, also in grey and with
// colour blindness. `share` is clamped to [0, 1].
Colour Viridis(double share);

// Black or white, whichever is easier to read on `background`.
Colour ReadableOn(Colour background);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_FIGURE_STYLE_H_
