// A request's tensors into the packed ones of a graph, and its results back. Both run on the host:
// what cuDNN leaves undefined never reaches a caller.
#ifndef RAPT_SERVER_ATTENTION_CUDNN_STAGING_H_
#define RAPT_SERVER_ATTENTION_CUDNN_STAGING_H_

#include <cstddef>

#include "server/attention/cudnn/device.h"
#include "server/attention/cudnn/graph.h"
#include "server/attention/problem.h"

namespace rapt::cudnn {

// Writes everything that the graph of the problem reads into the arena, padding as zeros. False
// where the numbers are such that only a CPU gives the definition's answer: a NaN or an infinity in
// Q, K or V, which on the device reaches rows that must not see it, or a row whose bias is nowhere
// above -1e30, which the device takes for masked.
bool StageInputs(const Problem& problem, const SdpaGraph& graph, const ArenaLayout& layout,
                 const Arguments& arguments, std::byte* arena);

// Writes the outputs, or folds them into the state where the problem folds. Rows that see no key
// are zeros with an lse of -inf, whatever the device made of them.
void TakeOutputs(const Problem& problem, const SdpaGraph& graph, const ArenaLayout& layout,
                 const Arguments& arguments, const std::byte* arena);

}  // namespace rapt::cudnn

#endif  // RAPT_SERVER_ATTENTION_CUDNN_STAGING_H_
