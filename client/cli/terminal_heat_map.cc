#include "client/cli/terminal_heat_map.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/figure_style.h"

namespace rapt {
namespace {

constexpr size_t kCellColumns = 5;
constexpr size_t kGap = 4;  // between blocks side by side

std::string Spaces(size_t count) { return std::string(count, ' '); }

// Counts UTF-8 code points. These equal screen columns for the characters used here.
size_t DisplayWidth(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; });
}

std::string PadLeft(std::string_view text, size_t width) {
  const size_t used = DisplayWidth(text);
  return (used < width ? Spaces(width - used) : "") + std::string(text);
}

// If the padding is odd, shifts the text to the right, as numbers are aligned.
std::string Centre(std::string_view text, size_t width) {
  const size_t used = std::min(DisplayWidth(text), width);
  const size_t right = (width - used) / 2;
  return PadLeft(text, width - right) + Spaces(right);
}

std::string ColourCell(double weight) {
  if (weight == 0) return Centre("·", kCellColumns);
  const Colour back = Viridis(weight);
  const Colour front = ReadableOn(back);
  const std::string number = absl::StrFormat("%.0f%%", weight * 100);
  return absl::StrFormat("\x1b[48;2;%d;%d;%dm\x1b[38;2;%d;%d;%dm%s\x1b[0m", back.red, back.green,
                         back.blue, front.red, front.green, front.blue,
                         Centre(number, kCellColumns));
}

std::string PlainCell(double weight) {
  if (weight == 0) return PadLeft("·", kCellColumns);
  constexpr std::string_view kShades[] = {" ", "░", "▒", "▓", "█"};
  const size_t shade =
      std::min<size_t>(static_cast<size_t>(weight * std::size(kShades)), std::size(kShades) - 1);
  return PadLeft(absl::StrFormat("%s%3.0f", kShades[shade], weight * 100), kCellColumns);
}

}  // namespace

Terminal Terminal::OfStdout() {
  Terminal terminal;
  if (!isatty(STDOUT_FILENO)) return terminal;
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool is_dumb = term == nullptr || std::string_view(term) == "dumb";
  terminal.has_colour = !is_dumb && (no_color == nullptr || *no_color == '\0');
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  return terminal;
}

void TextBlock::Add(std::string text, size_t columns) {
  lines_.push_back({std::move(text), columns});
  columns_ = std::max(columns_, columns);
}

void TextBlock::Add(std::string text) {
  const size_t columns = DisplayWidth(text);
  Add(std::move(text), columns);
}

void TextBlock::Append(const TextBlock& below) {
  Add("");
  for (const Line& line : below.lines()) Add(line.text, line.columns);
}

TextBlock DrawTerminalHeatMap(std::string_view title, absl::Span<const std::string> labels,
                              absl::Span<const double> weights, bool has_colour) {
  size_t label_columns = 0;
  for (const std::string& label : labels) {
    label_columns = std::max(label_columns, DisplayWidth(label));
  }
  const size_t cells_columns = labels.size() * kCellColumns;
  const std::string indent = Spaces(label_columns + 1);
  TextBlock block;
  block.Add(indent + Centre(title, cells_columns));
  std::string header = indent;
  for (const std::string& label : labels) {
    header += has_colour ? Centre(label, kCellColumns) : PadLeft(label, kCellColumns);
  }
  block.Add(header);
  for (size_t i = 0; i < labels.size(); ++i) {
    std::string line = PadLeft(labels[i], label_columns) + " ";
    for (size_t j = 0; j < labels.size(); ++j) {
      const double weight = weights[i * labels.size() + j];
      line += has_colour ? ColourCell(weight) : PlainCell(weight);
    }
    block.Add(line, label_columns + 1 + cells_columns);
  }
  return block;
}

std::string Arrange(const TextBlock& left, const TextBlock& right, size_t columns) {
  std::string out;
  if (left.columns() + kGap + right.columns() > columns) {
    for (const TextBlock::Line& line : left.lines()) absl::StrAppend(&out, line.text, "\n");
    absl::StrAppend(&out, "\n");
    for (const TextBlock::Line& line : right.lines()) absl::StrAppend(&out, line.text, "\n");
    return out;
  }
  for (size_t i = 0; i < std::max(left.lines().size(), right.lines().size()); ++i) {
    const TextBlock::Line first = i < left.lines().size() ? left.lines()[i] : TextBlock::Line{};
    const TextBlock::Line second = i < right.lines().size() ? right.lines()[i] : TextBlock::Line{};
    std::string line = first.text + Spaces(left.columns() - first.columns + kGap) + second.text;
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace rapt
