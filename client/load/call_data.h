// The tensors of one shape, filled with reproducible numbers, and the check of an answer to them.
#ifndef RAPT_CLIENT_LOAD_CALL_DATA_H_
#define RAPT_CLIENT_LOAD_CALL_DATA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/aligned_buffer.h"
#include "client/load/mix.h"
#include "rapt/attend.h"

namespace rapt::load {

// Immutable, so thread-safe. Q, K, V and float masks are uniform in [-1, 1).
class CallData {
 public:
  // Throws std::bad_alloc where there is no memory for them.
  CallData(const CallShape& shape, uint64_t seed);

  const CallShape& shape() const { return shape_; }
  // Views of this object's memory.
  const client::AttendCall& call() const { return call_; }
  // Of all inputs, and of Y.
  int64_t input_bytes() const;
  int64_t y_bytes() const;

  // Compares rows of Y, a few of each, with the definition in float64. Internal says which row is
  // off by how much.
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
