// Heat maps in a terminal.
#ifndef RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_
#define RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace rapt {

// The capabilities of standard output.
struct Terminal {
  bool has_colour = false;  // 24-bit colour: a terminal that is not dumb, and NO_COLOR is unset
  size_t columns = 80;

  static Terminal OfStdout();
};

// Lines of text and their widths on the screen, without escape sequences.
class TextBlock {
 public:
  struct Line {
    std::string text;
    size_t columns = 0;
  };

  // Adds a line without escape sequences.
  void Add(std::string text);
  void Add(std::string text, size_t columns);
  // Adds an empty line, then `below`.
  void Append(const TextBlock& below);

  const std::vector<Line>& lines() const { return lines_; }
  size_t columns() const { return columns_; }  // of the widest line

 private:
  std::vector<Line> lines_;
  size_t columns_ = 0;
};

// Draws weights in percent, [labels, labels] row-major, with the same labels for rows and columns.
// Uses background colours, or shades without colour. A weight of 0 is a dot.
TextBlock DrawTerminalHeatMap(std::string_view title, absl::Span<const std::string> labels,
                              absl::Span<const double> weights, bool has_colour);

// Places the blocks side by side if `columns` allow it, otherwise one above the other.
std::string Arrange(const TextBlock& left, const TextBlock& right, size_t columns);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_
