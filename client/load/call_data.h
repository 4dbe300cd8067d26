// The tensors of one shape, filled with reproducible numbers, and a check of responses.
#ifndef RAPT_CLIENT_LOAD_CALL_DATA_H_
#define RAPT_CLIENT_LOAD_CALL_DATA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "attention/tensor_view.h"
#include "base/aligned_buffer.h"
#include "client/load/mix.h"
#include "rapt/attend.h"

namespace rapt::load {

// Compares a sample of the rows of y, of the problem's type, with the definition in float64.
// Internal names an element that differs, and the shape. REQUIRES: the problem has neither rotary
// embedding, biases by distance nor selected keys.
absl::Status CheckRows(const Problem& problem, const Arguments& arguments, const TensorView& y,
                       const CallShape& shape);

// Immutable and therefore thread-safe. Q, K, V and float masks are uniform in [-1, 1).
class CallData {
 public:
  // Throws std::bad_alloc if memory runs out.
  CallData(const CallShape& shape, uint64_t seed);

  const CallShape& shape() const { return shape_; }
  // Refers to this object's memory.
  const client::AttendCall& call() const { return call_; }
  int64_t y_bytes() const;  // the size of Y

  // Compares a sample of the rows of Y with the definition in float64. Internal names an element
  // that differs.
  absl::Status CheckY(absl::Span<const std::byte> y) const;

 private:
  client::TensorView NewTensor(client::DType dtype, client::Shape shape, uint64_t seed);

  const CallShape shape_;
  std::vector<AlignedBuffer> buffers_;
  std::vector<int64_t> key_lengths_;
  client::AttendCall call_;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_CALL_DATA_H_
