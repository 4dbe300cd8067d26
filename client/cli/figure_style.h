// What the pictures share: colours, sizes in CSS pixels, labels and the ticks of axes.
#ifndef RAPT_CLIENT_CLI_FIGURE_STYLE_H_
#define RAPT_CLIENT_CLI_FIGURE_STYLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/colour.h"

namespace rapt {

inline constexpr Colour kInk = {0x22, 0x22, 0x22};
inline constexpr Colour kFaintInk = {0x77, 0x77, 0x77};
inline constexpr Colour kAxis = {0xbb, 0xbb, 0xbb};

inline constexpr double kMargin = 24;
inline constexpr double kTitleSize = 17;
inline constexpr double kPanelTitleSize = 13;
inline constexpr double kLabelSize = 12;
inline constexpr double kNoteSize = 11;
inline constexpr double kPanelGap = 28;
inline constexpr double kLabelGap = 8;  // between a label and what it names
inline constexpr double kAxisTitleRoom = 24;

// Returns the label, truncated with an ellipsis if it is too long.
std::string Shorten(const std::string& label);

// Returns the width of the widest label.
double WidestLabel(const std::vector<std::string>& labels);

// Returns round numbers within [low, high], at most six. REQUIRES: low < high.
std::vector<double> Ticks(double low, double high);
std::string FormatTick(double tick);

// Returns the first of 1, 2, 5, 10, 20, ... that is at least `step`.
int64_t RoundStep(double step);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_FIGURE_STYLE_H_
