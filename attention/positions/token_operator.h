// Operators other than attention that compute each token on its own.
#ifndef RAPT_ATTENTION_POSITIONS_TOKEN_OPERATOR_H_
#define RAPT_ATTENTION_POSITIONS_TOKEN_OPERATOR_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "attention/checkpoint.h"
#include "attention/operator.h"
#include "attention/problem.h"

namespace rapt {

// The roles under which the operators' tensors are passed; the output is kY.
inline constexpr Role kTokens = Role::kQ;              // X
inline constexpr Role kTokenTable = Role::kBiasTable;  // table of positional_encoding

// A valid call: its shapes and attributes. Immutable; may be shared by threads.
//
// Inputs are row-major in Arguments::inputs, of which only `data` is read, and so is the output.
class TokenOperator {
 public:
  virtual ~TokenOperator() = default;

  virtual const TensorSpec& output() const = 0;  // Y, like X
  virtual int64_t tasks() const = 0;             // independent of each other
  virtual int64_t worker_bytes() const = 0;      // workspace of a task, aligned to 64
  virtual double flops() const = 0;

  // Returns whether CheckData() reads an input.
  virtual bool reads_positions() const { return false; }
  // Returns InvalidArgument for values that are not allowed.
  virtual absl::Status CheckData(const Arguments& /*arguments*/) const { return absl::OkStatus(); }

  // REQUIRES: the data has been checked.
  virtual void RunTask(const Arguments& arguments, int64_t task, std::byte* worker,
                       const Checkpoint& checkpoint) const = 0;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_POSITIONS_TOKEN_OPERATOR_H_
