// Positional encoding: Y = X + PE, of sines and cosines (Vaswani et al. 2017) or from a table.
#ifndef RAPT_ATTENTION_POSITIONS_POSITIONAL_ENCODING_H_
#define RAPT_ATTENTION_POSITIONS_POSITIONAL_ENCODING_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/operator_schema.h"
#include "attention/positions/tokens.h"
#include "attention/tensor_operator.h"

namespace rapt {

inline constexpr double kDefaultBase = 10000;

extern const OperatorSchema kPositionalEncoding;

struct PositionalEncodingCall {
  // kTokens is X, [..., S, E]; kTokenTable is a table of learned encodings, [M, E] with M >= S, in
  // FP32 or X's type.
  InputMap<std::optional<TensorSpec>> inputs;
  // Without a table, token s has PE[p, 2i] = sin(p * base^(-2i / E)), PE[p, 2i + 1] = cos(the
  // same), where p is first_position + s.
  std::optional<double> base = std::nullopt;  // absent: kDefaultBase
  int64_t first_position = 0;                 // at least 0
};

// Returns InvalidArgument with the tensor or attribute, its value and the allowed values.
absl::StatusOr<std::shared_ptr<const TensorOperator>> MakePositionalEncoding(
    const PositionalEncodingCall& call);

// Writes the encoding of a position, of sines and cosines.
void SinusoidalEncoding(double base, int64_t position, absl::Span<double> out);

}  // namespace rapt

#endif  // RAPT_ATTENTION_POSITIONS_POSITIONAL_ENCODING_H_
