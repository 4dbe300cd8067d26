// The gradients of attention calls on the command line: their norms, and their check against
// differences of the forward pass.
#ifndef RAPT_CLIENT_CLI_GRADIENTS_H_
#define RAPT_CLIENT_CLI_GRADIENTS_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/roles.h"
#include "client/cli/attention_caller.h"
#include "rapt/client.h"

namespace rapt {

// A gradient in a result, and the input that it belongs to.
struct GradientRef {
  const char* name;  // "dq"
  Role input;
  const client::Tensor* tensor;
};

// Returns the gradients of the result, which must outlive them, in the order of their inputs.
std::vector<GradientRef> GradientsIn(const client::BackwardResult& result);

// Returns the square root of the sum of the squares of a tensor of floats.
double NormOf(const client::Tensor& tensor);

// How one gradient compares with the slope of L = sum(dY * Y) + sum(dlse * lse) in the forward
// pass.
struct GradientCheck {
  std::string name;     // "dq", or "all" for a direction over all inputs
  int64_t element = 0;  // of CheckElements(): the one that differs most
  double slope = 0;     // (L(x + hu) - L(x - hu)) / 2h
  double gradient = 0;  // the sum of gradient * u
  double difference = 0;
  bool passed = false;
};

// REQUIRES, of both: all float tensors of `call` are kFloat64; its gradients are named. L leaves
// out the lse of rows that see no key. Both return the error of a
// call that failed.

// Compares each gradient along a direction u over its input, uniform in [-1, 1], and all of them
// along the same over all inputs: h = 1e-5, within 1e-7 max(1, |slope|).
absl::StatusOr<std::vector<GradientCheck>> CheckDirections(AttentionCaller& caller,
                                                           const client::BackwardCall& call,
                                                           std::mt19937_64& random);

// Compares every element of each gradient: h = 1e-6, within 1e-4 max(1, |slope|).
absl::StatusOr<std::vector<GradientCheck>> CheckElements(AttentionCaller& caller,
                                                         const client::BackwardCall& call);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_GRADIENTS_H_
