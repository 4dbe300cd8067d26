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

// Rotates the gradient of a rotated row, `row.size` numbers, back in place: each pair (x, y) to
// (x cos + y sin, y cos - x sin). `row` has the angles; `from` and `to` are not used.
template <typename Real>
void RotateBack(const RotaryRow& row, Real* gradient);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_ROTATE_H_
