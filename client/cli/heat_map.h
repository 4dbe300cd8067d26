// Pictures of attention weights.
#ifndef RAPT_CLIENT_CLI_HEAT_MAP_H_
#define RAPT_CLIENT_CLI_HEAT_MAP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/picture.h"

namespace rapt {

// One head's weights or scores, [queries, keys], row-major. -inf is a masked key.
struct HeadWeights {
  std::string title;  // above the panel; may be empty
  std::vector<double> values;
};

// Heads of the same shape, drawn side by side on one colour scale.
struct AttentionFigure {
  std::string title;
  std::vector<std::string> query_labels;  // one per row
  std::vector<std::string> key_labels;    // one per column
  std::vector<HeadWeights> heads;
};

// Draws a grid of cells per head, with values where cells are large enough. A matrix larger than
// the panel's resolution is reduced to the largest value of each block, and the picture says so.
Picture DrawHeatMap(const AttentionFigure& figure);

// Draws one query's attention as a bar per key. If there are too many keys, draws those with the
// largest values.
Picture DrawBars(const AttentionFigure& figure, int64_t query);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_HEAT_MAP_H_
