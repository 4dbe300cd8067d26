// Heat maps in a terminal.
#ifndef RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_
#define RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace rapt {

// What standard output can show.
struct Terminal {
  bool has_colour = false;  // 24-bit; a terminal that is not dumb, and NO_COLOR is not set
  size_t columns = 80;

  static Terminal OfStdout();
};

// Lines of text, all `columns` wide on the screen.
struct TextBlock {
  size_t columns = 0;
  std::vector<std::string> lines;
};

// Weights in percent, [labels, labels] row-major, row and column labels alike. In colour by
// background, otherwise by shade. A weight of 0 shows as a dot.
TextBlock DrawTerminalHeatMap(std::string_view title, absl::Span<const std::string> labels,
                              absl::Span<const double> weights, bool has_colour);

// Side by side where `columns` allow it, else one above the other.
std::string Arrange(const TextBlock& left, const TextBlock& right, size_t columns);

// Code points of UTF-8, which for our labels is columns on the screen.
size_t DisplayWidth(std::string_view text);

// `text` and as many spaces as make it `width` wide.
std::string PadRight(std::string_view text, size_t width);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_
