// The roles under which the operators of this folder take their tensors; the output is kY.
#ifndef RAPT_ATTENTION_POSITIONS_TOKENS_H_
#define RAPT_ATTENTION_POSITIONS_TOKENS_H_

#include "attention/roles.h"

namespace rapt {

inline constexpr Role kTokens = Role::kQ;              // X
inline constexpr Role kTokenTable = Role::kBiasTable;  // table of positional_encoding

}  // namespace rapt

#endif  // RAPT_ATTENTION_POSITIONS_TOKENS_H_
