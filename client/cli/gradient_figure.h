// Gradients of attention by position, read from files.
#ifndef RAPT_CLIENT_CLI_GRADIENT_FIGURE_H_
#define RAPT_CLIENT_CLI_GRADIENT_FIGURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/heat_map.h"

namespace rapt {

// Returns a figure with a column for each gradient, its norm over heads and head size, and a row
// for each position; NaN beyond a gradient's positions. It has no query labels. A reference is a
// .npy file, a member such as g.npz:dq, or an archive, of which dq, dk and dv are read; arrays are
// [S, D], [B, S, E] or [B, H, S, D], of which batch row `batch` is read. InvalidArgument names the
// file.
absl::StatusOr<AttentionFigure> LoadGradientFigure(const std::vector<std::string>& references,
                                                   int64_t batch, const std::string& dtype);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_GRADIENT_FIGURE_H_
