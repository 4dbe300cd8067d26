// The pictures of `rapt plot`, `rapt compare` and `rapt memory`.
#ifndef RAPT_CLIENT_CLI_FIGURES_H_
#define RAPT_CLIENT_CLI_FIGURES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/picture.h"
#include "rapt/reports.h"

namespace rapt {

// One head's weights or scores, [queries, keys], row-major. -inf is a masked key.
struct HeadWeights {
  std::string title;  // above the panel; may be empty
  std::vector<double> values;
};

// The names of a table's rows and columns.
struct HeadTable {
  std::vector<std::string> rows, columns;
};

// Heads of the same shape, drawn side by side on one colour scale.
struct AttentionFigure {
  std::string title;
  std::vector<std::string> query_labels;  // one per row
  std::vector<std::string> key_labels;    // one per column
  std::vector<HeadWeights> heads;
  std::optional<HeadTable> table = std::nullopt;  // of the heads, row by row
};

// Draws a grid of cells per head, with values where cells are large enough. A matrix larger than
// the panel's resolution is reduced to the largest value of each block, and the picture says so.
Picture DrawHeatMap(const AttentionFigure& figure);

// Draws the figure's table: a small picture for each head, without labels and values.
// REQUIRES: a table, with rows x columns heads.
Picture DrawHeadTable(const AttentionFigure& figure);

// Draws one query's attention as a bar per key. If there are too many keys, draws those with the
// largest values.
Picture DrawBars(const AttentionFigure& figure, int64_t query);

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

// Draws the memory in addition to Q, K, V and Y of the full score matrix, of the fused kernel, of
// LSH attention and of linear attention with its state. Both axes are logarithmic. An operator that
// does not take a length has no point there. REQUIRES: at least one estimate.
Picture DrawScaling(const client::MemoryEstimates& estimates, const std::string& title);

// Returns a figure with a column for each gradient, its norm over heads and head size, and a row
// for each position; NaN beyond a gradient's positions. It has no query labels. A reference is a
// .npy file, a member such as g.npz:dq, or an archive, of which dq, dk and dv are read; arrays are
// [S, D], [B, S, E] or [B, H, S, D], of which batch row `batch` is read. InvalidArgument names the
// file.
absl::StatusOr<AttentionFigure> LoadGradientFigure(const std::vector<std::string>& references,
                                                   int64_t batch, const std::string& dtype);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_FIGURES_H_
