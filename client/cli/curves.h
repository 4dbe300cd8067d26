// Pictures of how the columns of a matrix change over its rows, such as the dimensions of a
// positional encoding over the positions.
#ifndef RAPT_CLIENT_CLI_CURVES_H_
#define RAPT_CLIENT_CLI_CURVES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/heat_map.h"
#include "client/cli/picture.h"

namespace rapt {

inline constexpr size_t kMaxCurves = 8;  // more colours would be hard to tell apart

// What the columns and the rows are, beside their labels; empty: nothing.
struct CurveTitles {
  std::string columns = "dimensions", rows = "positions";
};

// Draws a curve for each of the columns, named by the figure's key labels, over its rows. The heads
// are panels one below the other, on one scale. A value that is not finite interrupts its curve.
// REQUIRES: from 1 to kMaxCurves columns, and at least one row.
Picture DrawCurves(const AttentionFigure& figure, const std::vector<int64_t>& columns,
                   CurveTitles titles = {});

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CURVES_H_
