#include "attention/score/score_params.h"

#include <limits>

#include "attention/half.h"

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

// Returns a row of a mask or bias; never null. A row without columns hides every key.
const std::byte* MaskRow(const TensorView& view, int64_t b, int64_t h, int64_t i) {
  static constexpr std::byte kNoColumns{};
  return view.dims[3] == 0 ? &kNoColumns : view.Row(b, h, i);
}

}  // namespace

ScoreParams ScoreParamsOf(const Problem& p, const Arguments& a) {
  ScoreParams params = {};
  params.scale = p.effective_scale();
  params.softcap = p.softcap;
  if (p.mask) params.mask = MaskParamsOf(p, *p.mask, a.inputs[Role::kMask]);
  if (p.bias) params.bias = MaskParamsOf(p, *p.bias, a.inputs[Role::kBias]);
  return params;
}

double SinkOf(const Problem& p, const Arguments& a, int64_t h) {
  if (!p.head_sink) return -std::numeric_limits<double>::infinity();
  return LoadElement(a.inputs[Role::kHeadSink].Row(h, 0, 0), *p.head_sink, 0);
}

ScoreRow ScoreRowOf(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  const KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  return {.begin = visible.begin,
          .end = visible.end,
          .mask = p.mask ? MaskRow(a.inputs[Role::kMask], b, h, i) : nullptr,
          .bias = p.bias ? MaskRow(a.inputs[Role::kBias], b, h, i) : nullptr,
          .sink = SinkOf(p, a, h)};
}

}  // namespace rapt
