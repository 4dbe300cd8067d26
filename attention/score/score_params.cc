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
  KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  // Keys beyond the last axis are hidden. A tensor without elements has no row to say so.
  const bool hides_all = (p.mask && p.mask->dims[3] == 0) || (p.bias && p.bias->dims[3] == 0);
  if (hides_all) visible = {};
  return {.begin = visible.begin,
          .end = visible.end,
          .mask = p.mask ? a.inputs[Role::kMask].Row(b, h, i) : nullptr,
          .bias = p.bias ? a.inputs[Role::kBias].Row(b, h, i) : nullptr,
          .sink = SinkOf(p, a, h)};
}

}  // namespace rapt
