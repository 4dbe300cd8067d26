// A weight matrix in the order of projection_task.h.
#ifndef RAPT_ATTENTION_LAYER_PACKED_MATRIX_H_
#define RAPT_ATTENTION_LAYER_PACKED_MATRIX_H_

#include <cstddef>
#include <cstdint>

#include "attention/layer/layer.h"
#include "attention/layer/projection_task.h"
#include "attention/tensor_view.h"
#include "base/aligned_buffer.h"
#include "base/round_up.h"

namespace rapt {

// Non-owning.
struct PackedMatrix {
  DType dtype = DType::kFloat32;
  int64_t depth = 0;    // inputs
  int64_t columns = 0;  // outputs
  std::byte* panels = nullptr;

  int64_t panel_count() const { return CeilDiv(columns, kPanelColumns); }
  // The rows of a panel.
  int64_t panel_depth() const {
    return dtype == DType::kBFloat16 ? RoundUp(depth, kPairDepth) : depth;
  }
  int64_t panel_bytes() const { return panel_depth() * kPanelColumns * SizeOf(dtype); }
};

// Returns memory for packed weights: in huge pages, if the system has them, because reading takes
// fewer misses of the address cache. Throws std::bad_alloc.
AlignedBuffer MemoryForWeights(int64_t bytes);

// Packs a panel. REQUIRES: the matrix has the type and shape of `to`.
void PackPanel(const LinearWeights& weights, int64_t panel, const PackedMatrix& to);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_PACKED_MATRIX_H_
