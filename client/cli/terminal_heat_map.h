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

// Lines of text, and how wide each is on the screen: escape sequences take no room.
class TextBlock {
 public:
  struct Line {
    std::string text;
    size_t columns = 0;
  };

  // A line without escape sequences.
  void Add(std::string text);
  void Add(std::string text, size_t columns);
  // `below`, after an empty line.
  void Append(const TextBlock& below);

  const std::vector<Line>& lines() const { return lines_; }
  size_t columns() const { return columns_; }  // of the widest line

 private:
  std::vector<Line> lines_;
  size_t columns_ = 0;
};

// Weights in percent, [labels, labels] row-major, row and column labels alike. In colour by
// background, otherwise by shade. A weight of 0 shows as a dot.
TextBlock DrawTerminalHeatMap(std::string_view title, absl::Span<const std::string> labels,
                              absl::Span<const double> weights, bool has_colour);

// Side by side where `columns` allow it, else one above the other.
std::string Arrange(const TextBlock& left, const TextBlock& right, size_t columns);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_TERMINAL_HEAT_MAP_H_
