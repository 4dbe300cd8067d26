// Computes a call of a layer.
#ifndef RAPT_ATTENTION_LAYER_LAYER_OPERATOR_H_
#define RAPT_ATTENTION_LAYER_LAYER_OPERATOR_H_

#include <memory>

#include "attention/layer/layer_shape.h"
#include "attention/tensor_operator.h"

namespace rapt {

// Returns the problem of attention between the projections.
Problem AttentionOf(const LayerShape& shape);

// Returns whether the arrays between the projections and attention are below 2^50 bytes.
bool FitsMemory(const LayerShape& shape);

// REQUIRES: the problem is valid, and FitsMemory().
std::shared_ptr<const TensorOperator> MakeLayerOperator(const LayerShape& shape);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_OPERATOR_H_
