// Tensors of the operators of this folder; the output is Role::kY.
#ifndef RAPT_ATTENTION_POSITIONS_TOKENS_H_
#define RAPT_ATTENTION_POSITIONS_TOKENS_H_

#include "attention/roles.h"

namespace rapt {

inline constexpr Slot kTokens = Slot::Input(0);      // X
inline constexpr Slot kTokenTable = Slot::Input(1);  // table of positional_encoding

}  // namespace rapt

#endif  // RAPT_ATTENTION_POSITIONS_TOKENS_H_
