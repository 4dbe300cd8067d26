// Pictures of attention: which query looks at which key, and how much.
#ifndef RAPT_CLIENT_CLI_HEAT_MAP_H_
#define RAPT_CLIENT_CLI_HEAT_MAP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/picture.h"

namespace rapt {

// One head's weights or scores, [queries, keys], row-major. -inf is a masked key.
struct HeadWeights {
  std::string title;  // over its panel, empty for none
  std::vector<double> values;
};

// Heads of one shape, drawn side by side on one colour scale.
struct AttentionFigure {
  std::string title;
  std::vector<std::string> query_labels;  // one per row
  std::vector<std::string> key_labels;    // one per column
  std::vector<HeadWeights> heads;
};

// A grid of cells a head. Values are written into cells that have room for them. Matrices larger
// than the panel has pixels are drawn by the largest value of each block; the picture says so.
Picture DrawHeatMap(const AttentionFigure& figure);

// One query's attention as a bar a key. Of many keys, those with the largest values.
Picture DrawBars(const AttentionFigure& figure, int64_t query);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_HEAT_MAP_H_
