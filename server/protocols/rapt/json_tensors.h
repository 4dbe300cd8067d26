#ifndef RAPT_SERVER_PROTOCOLS_RAPT_JSON_TENSORS_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_JSON_TENSORS_H_

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "server/protocols/message_parts.h"

namespace rapt::native {

// A serialized message. Move-only.
class JsonMessage {
 public:
  // Valid as long as this.
  MessageBytes bytes() const { return {{slices_, 0}, size()}; }

  void Append(std::string fields);
  void Append(PooledBuffer payload);

 private:
  int64_t size() const { return slices_.empty() ? 0 : slices_.back().end; }
  void Append(const std::byte* data, size_t size);

  std::deque<std::string> fields_;  // does not move them
  std::vector<PooledBuffer> payloads_;
  std::vector<ByteSlice> slices_;
};

// JSON without the data of its tensors has at most this many bytes.
inline constexpr int64_t kMaxFieldsBytes = 1 << 20;

// The most memory that ReadJson() takes, and its result with it. Data takes 4 times its bytes, as
// "1," becomes 8 bytes, and an eighth more in a buffer; the parsers of other fields take more.
constexpr int64_t MessageBytesOf(int64_t json_bytes) {
  return 6 * json_bytes + 6 * std::min(json_bytes, kMaxFieldsBytes);
}

// Reads a message of type `type` in Protocol Buffers' JSON. A Tensor may also be written as an
// input of the Open Inference Protocol: with a name that means nothing, `datatype` for `dtype`, and
// numbers, in arrays of any nesting, for the base64 of `data`. The data of a tensor is contiguous
// and in a buffer of `pool`. InvalidArgument names the tensor or the field, the value received and
// the values allowed. Throws std::bad_alloc.
absl::StatusOr<JsonMessage> ReadJson(const google::protobuf::Descriptor& type,
                                     absl::string_view json, BufferPool& pool);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_JSON_TENSORS_H_
