#include "attention/layer/packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "attention/half.h"

namespace rapt {
namespace {

// The depth of a tile whose numbers stay in the first cache level while it is transposed.
constexpr int64_t kTileDepth = 16;

// Packs `columns` columns of numbers of Word, of which kInterleaved rows lie side by side.
template <typename Word, int64_t kInterleaved>
void PackColumns(const std::byte* weights, int64_t k_step, int64_t column_step, int64_t depth,
                 int64_t columns, std::byte* panel) {
  for (int64_t k0 = 0; k0 < depth; k0 += kTileDepth) {
    const int64_t end = std::min(k0 + kTileDepth, depth);
    for (int64_t n = 0; n < columns; ++n) {
      for (int64_t k = k0; k < end; ++k) {
        const auto value = LoadAs<Word>(weights, k * k_step + n * column_step);
        const int64_t place = k / kInterleaved * kPanelColumns + n;
        StoreAs<Word>(panel, place * kInterleaved + k % kInterleaved, value);
      }
    }
  }
}

}  // namespace

AlignedBuffer MemoryForWeights(int64_t bytes) {
  constexpr uintptr_t kPage = 4096;
  AlignedBuffer memory(static_cast<size_t>(bytes));
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t end = (begin + memory.size()) / kPage * kPage;
  if (first < end) madvise(memory.data() + (first - begin), end - first, MADV_HUGEPAGE);
  return memory;
}

void PackPanel(const LinearWeights& weights, int64_t panel, const PackedMatrix& to) {
  const WeightTensor& w = *weights.matrix;
  const int64_t stride = w.row_stride == 0 ? w.shape[1] : w.row_stride;
  const int64_t k_step = weights.transposed ? stride : 1;
  const int64_t column_step = weights.transposed ? 1 : stride;
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, to.columns - first);
  const std::byte* const from = w.data + first * column_step * SizeOf(w.dtype);
  std::byte* const out = to.panels + panel * to.panel_bytes();
  std::memset(out, 0, static_cast<size_t>(to.panel_bytes()));
  const auto pack = [&]<typename Word, int64_t kInterleaved>() {
    PackColumns<Word, kInterleaved>(from, k_step, column_step, to.depth, columns, out);
  };
  if (w.dtype == DType::kBFloat16) return pack.operator()<uint16_t, 2>();
  if (w.dtype == DType::kFloat16) return pack.operator()<uint16_t, 1>();
  if (w.dtype == DType::kFloat32) return pack.operator()<uint32_t, 1>();
  pack.operator()<uint64_t, 1>();
}

}  // namespace rapt
