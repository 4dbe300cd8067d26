#ifndef RAPT_ATTENTION_REFERENCE_REFERENCE_BACKEND_H_
#define RAPT_ATTENTION_REFERENCE_REFERENCE_BACKEND_H_

#include "attention/backend.h"

namespace rapt {

// The definition in float64, one query row at a time. Written for clarity, not speed.
const Backend& ReferenceBackend();

}  // namespace rapt

#endif  // RAPT_ATTENTION_REFERENCE_REFERENCE_BACKEND_H_
