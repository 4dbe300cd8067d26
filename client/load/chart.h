// Line charts as SVG, for pages.
#ifndef RAPT_CLIENT_LOAD_CHART_H_
#define RAPT_CLIENT_LOAD_CHART_H_

#include <string>
#include <utility>
#include <vector>

namespace rapt::load {

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x rising, finite
};

struct Tick {
  double at = 0;
  std::string label;
};

struct Chart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<Tick> x_ticks = {};  // empty: round numbers
  std::vector<Line> lines = {};    // at most six have colours of their own
};

// Starts at 0 on the y axis. Colours are the page's variables --line0 to --line5, --ink, --grid.
std::string DrawSvg(const Chart& chart);

// Round numbers, about `count` of them, from 0 or below `low` to `high` or above.
std::vector<double> RoundSteps(double low, double high, int count);

// For text in HTML and SVG.
std::string EscapeHtml(const std::string& text);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_CHART_H_
