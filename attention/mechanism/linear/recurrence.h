// The definition of linear attention: the recurrence of each token, in float64.
//
//     S = e^g S + k u^T,   o = scale S^T q,   u = v, or beta (v - (e^g S)^T k)
//
// with features of q and k instead of themselves, and divided by scale q . z, z = sum k, if the
// call asks for that.
#ifndef RAPT_ATTENTION_MECHANISM_LINEAR_RECURRENCE_H_
#define RAPT_ATTENTION_MECHANISM_LINEAR_RECURRENCE_H_

#include "attention/mechanism/linear/linear_task.h"

namespace rapt {

extern const LinearKernel kRecurrence;

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LINEAR_RECURRENCE_H_
