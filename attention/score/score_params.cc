#include "attention/score/score_params.h"

#include <algorithm>
#include <cstring>

namespace rapt {

Element ElementOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Element::kFloat16;
    case DType::kBFloat16:
      return Element::kBFloat16;
    case DType::kFloat64:
      return Element::kFloat64;
    case DType::kBool:
      return Element::kBool;
    default:
      return Element::kFloat32;
  }
}

namespace {

MaskParams MaskParamsOf(const Problem& p, const MaskShape& shape, const TensorView& view) {
  const bool broadcasts = shape.dims[3] == 1;
  return {.element = ElementOf(shape.dtype),
          .step = broadcasts ? 0 : view.strides[3],
          .count = broadcasts ? p.total_keys() : shape.dims[3]};
}

}  // namespace

ScoreParams ScoreParamsOf(const Problem& p, const Arguments& a, DType real) {
  ScoreParams params = {};
  params.scale = p.effective_scale();
  params.softcap = p.softcap;
  if (p.mask) params.mask = MaskParamsOf(p, *p.mask, a.inputs[Role::kMask]);
  if (p.bias) params.bias = MaskParamsOf(p, *p.bias, a.inputs[Role::kBias]);
  if (p.block_mask) {
    params.sparse.block_keys = *p.block_k;
    params.sparse.block_step = a.inputs[Role::kBlockMask].strides[3];
  }
  params.sparse.global_step = a.inputs[Role::kGlobalMask].strides[1];
  params.relative = {.element = ElementOf(real), .step = 1, .count = p.total_keys()};
  return params;
}

SparseRow SparseRowOf(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  SparseRow row = {.window_begin = 0,
                   .window_end = p.total_keys(),
                   .prefix_end = 0,
                   .global = nullptr,
                   .blocks = nullptr,
                   .selected = nullptr};
  if (p.block_mask) row.blocks = a.inputs[Role::kBlockMask].Row(b, h, i / *p.block_q);
  if (!p.has_exemptions()) return row;
  const TensorView& global = a.inputs[Role::kGlobalMask];
  if (p.has_global_mask) {
    const int64_t position = DiagonalKey(p, a.key_lengths, b, i);
    const bool exists = position >= 0 && position < p.total_keys();
    if (exists && *global.Row(b, position, 0) != std::byte{0}) return row;
    row.global = p.total_keys() > 0 ? global.Row(b, 0, 0) : nullptr;
  }
  const KeyRange window = WindowKeys(p, a.key_lengths, b, i);
  row.window_begin = window.begin;
  row.window_end = window.end;
  row.prefix_end = p.prefix_keys - (p.section ? p.section->first_key : 0);
  return row;
}

int64_t SelectedWords(const Problem& p) { return (p.total_keys() + 63) / 64; }

void SetSelectedBits(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i,
                     uint64_t* bits) {
  std::fill_n(bits, SelectedWords(p), 0);
  const TensorView& indices = a.inputs[Role::kSelectedIndices];
  const int64_t head = p.selected->heads == 1 ? 0 : h / p.group_size();
  const std::byte* row = indices.Row(b, head, i);
  for (int64_t n = 0; n < p.selected->count; ++n) {
    int32_t key;
    std::memcpy(&key, row + n * indices.strides[3] * int64_t{sizeof(key)}, sizeof(key));
    if (key >= 0 && key < p.total_keys()) bits[key / 64] |= uint64_t{1} << (key % 64);
  }
}

}  // namespace rapt
