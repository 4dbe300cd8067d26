// The rotation of one row, for any type and machine.
#ifndef RAPT_ATTENTION_ROTARY_ROTATE_H_
#define RAPT_ATTENTION_ROTARY_ROTATE_H_

#include "attention/rotary/rotary_row.h"

namespace rapt {

// A RotateFunction. Written for clarity, not speed; the kernels have their own for other types than
// kFloat64.
void RotateRow(const RotaryRow& row);

// Returns the fastest function for other types that this machine has.
RotateFunction FastestRotateRow();

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_ROTATE_H_
