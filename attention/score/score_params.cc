#include "attention/score/score_params.h"

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
  params.relative = {.element = ElementOf(real), .step = 1, .count = p.total_keys()};
  return params;
}

}  // namespace rapt
