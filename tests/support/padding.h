// Batch rows of problems with key lengths as calls of their own, without padding.
#ifndef RAPT_TESTS_SUPPORT_PADDING_H_
#define RAPT_TESTS_SUPPORT_PADDING_H_

#include <cstdint>

#include "attention/problem.h"
#include "tests/support/oracle.h"
#include "tests/support/tensor.h"

namespace rapt::test {

struct RowAlone {
  Problem problem;  // without key lengths, scores, present outputs and gradients
  Inputs inputs;
};

// Returns batch row b with its valid keys and at most as many queries; the others are padding.
// REQUIRES: the row has a valid key, there are at most as many queries as keys, and no dropout,
// which depends on b.
RowAlone AloneOf(const Problem& problem, const Inputs& inputs, int64_t b);

// Returns the first `count` rows of batch row b of an output [B, H, S, E].
Tensor RowsOf(const Tensor& output, int64_t b, int64_t count);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_PADDING_H_
