// Line charts as SVG.
#ifndef RAPT_CLIENT_LOAD_CHART_H_
#define RAPT_CLIENT_LOAD_CHART_H_

#include <string>
#include <utility>
#include <vector>

namespace rapt::load {

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;  // sorted by x, finite
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
  std::vector<Line> lines = {};    // colours repeat after six
};

// The y axis starts at 0. Colours are the page's CSS variables --line0 to --line5, --ink and
// --grid.
std::string DrawSvg(const Chart& chart);

// Returns about `count` round numbers that cover `low` to `high`.
std::vector<double> RoundSteps(double low, double high, int count);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_CHART_H_
