// Masks of integers, which become bools.
#ifndef RAPT_SERVER_PROTOCOLS_INTEGER_MASK_H_
#define RAPT_SERVER_PROTOCOLS_INTEGER_MASK_H_

#include <string>

#include "attention/operator.h"
#include "server/request.h"

namespace rapt {

// Arranges for the mask of the request, whose numbers 0 and 1 have the type and shape `given`, to
// be converted before it is used. Its other numbers fail the request with InvalidArgument, which
// begins with `name`. REQUIRES: the type is an integer type; request.inputs has the mask's bytes.
void ConvertIntegerMask(const std::string& name, const TensorSpec& given, Request& request);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_INTEGER_MASK_H_
