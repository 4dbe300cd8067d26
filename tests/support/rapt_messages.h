// Requests of rapt.v1 made from the tests' tensors, and its responses read back into them.
#ifndef RAPT_TESTS_SUPPORT_RAPT_MESSAGES_H_
#define RAPT_TESTS_SUPPORT_RAPT_MESSAGES_H_

#include <string>

#include "attention/problem.h"
#include "proto/rapt/v1/attention.pb.h"
#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"
#include "tests/support/tensor.h"

namespace rapt::test {

v1::DataType CodeOf(DType dtype);

// Row-major in that layout.
v1::Tensor ToMessage(const Tensor& tensor, v1::Layout layout = v1::BHSD);

// The tensor that these are the bytes of, row-major in that layout. Another number of them is a
// test failure.
Tensor FromBytes(const std::string& name, const std::string& bytes, DType dtype, const Dims& dims,
                 v1::Layout layout = v1::BHSD);

// All that the problem says, its Q, K and V in that layout.
v1::AttendRequest ToMessage(const Problem& problem, const Inputs& inputs,
                            v1::Layout layout = v1::BHSD);

// Decodes the response to such a request. A wrong type or shape, a missing output and an output
// that was not requested are test failures.
Outputs FromMessage(const Problem& problem, const v1::AttendResponse& response, v1::Layout layout);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAPT_MESSAGES_H_
