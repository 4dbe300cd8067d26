// Attention and its backward pass as operators with tables.
#ifndef RAPT_ATTENTION_ATTENTION_SCHEMA_H_
#define RAPT_ATTENTION_ATTENTION_SCHEMA_H_

#include "absl/status/statusor.h"
#include "attention/operator.h"
#include "attention/operator_schema.h"

namespace rapt {

// The ONNX operator Attention with extensions. `alignment` is ONNX's by default.
const OperatorSchema& AttentionSchema();

// Its gradients: of Q, K and V unless others are asked for.
const OperatorSchema& AttentionBackwardSchema();

// REQUIRES: the call is of one of the two.
const OperatorCall& AttentionOf(const SchemaCall& call);
// As Bind(), without the copy of its outputs.
absl::StatusOr<ResolvedCall> ResolveAttention(const SchemaCall& call);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ATTENTION_SCHEMA_H_
