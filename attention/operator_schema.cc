#include "attention/operator_schema.h"

#include <algorithm>

#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"

namespace rapt {

absl::Span<const OperatorSchema* const> OperatorSchemas() {
  static constexpr const OperatorSchema* kAll[] = {&kRotaryEmbedding, &kPositionalEncoding,
                                                   &kLinearAttention, &kLshAttention};
  return kAll;
}

const OperatorSchema* FindOperator(absl::string_view name) {
  const auto all = OperatorSchemas();
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const OperatorSchema* schema) { return schema->name == name; });
  return found == all.end() ? nullptr : *found;
}

}  // namespace rapt
