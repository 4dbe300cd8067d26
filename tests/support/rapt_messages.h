// Converts test tensors into rapt.v1 requests, and rapt.v1 responses into test tensors.
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

// Returns the tensor in row-major order of `layout`.
v1::Tensor ToMessage(const Tensor& tensor, v1::Layout layout = v1::BHSD);

// Returns the tensor whose elements, in row-major order of `layout`, are `bytes`. A wrong size is a
// test failure.
Tensor FromBytes(const std::string& name, const std::string& bytes, DType dtype, const Dims& dims,
                 v1::Layout layout = v1::BHSD);

// Returns the request for the problem, with Q, K and V in `layout`.
v1::AttendRequest ToMessage(const Problem& problem, const Inputs& inputs,
                            v1::Layout layout = v1::BHSD);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAPT_MESSAGES_H_
