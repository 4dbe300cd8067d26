// A chart of the memory of attention against the length of the sequence, by algorithm.
#ifndef RAPT_CLIENT_CLI_SCALING_H_
#define RAPT_CLIENT_CLI_SCALING_H_

#include <string>

#include "client/cli/picture.h"
#include "rapt/reports.h"

namespace rapt {

// Draws the memory in addition to Q, K, V and Y of the full score matrix, of the fused kernel, of
// LSH attention and of linear attention with its state. Both axes are logarithmic. An operator that
// does not take a length has no point there. REQUIRES: at least one estimate.
Picture DrawScaling(const client::MemoryEstimates& estimates, const std::string& title);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_SCALING_H_
