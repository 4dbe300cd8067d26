// Zero-copy access to tensors in the Protocol Buffers wire format. A message that arrived in slices
// is split into a small message for generated code, without the tensors' bytes, and the positions
// of those bytes. Accepts and rejects the same messages as generated code, including unknown fields
// and any order of fields. In base/ because server and client share it.
#ifndef RAPT_BASE_WIRE_FORMAT_H_
#define RAPT_BASE_WIRE_FORMAT_H_

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/sliced_bytes.h"

namespace rapt::wire {

// The fields of a message that hold payloads. Fields that are not listed stay in the message.
struct MessageSchema;
struct PayloadField {
  int number = 0;
  // Null: a bytes field that is a payload. Otherwise a message field that contains payloads.
  const MessageSchema* message = nullptr;
};
struct MessageSchema {
  absl::Span<const PayloadField> fields;
};

using FieldPath = absl::InlinedVector<int, 4>;

// The position of a payload, relative to the first byte of the message.
struct Payload {
  FieldPath path;  // field numbers from the outermost message: {7}, or {1, 3}
  int index = 0;   // the number of earlier fields with number path[0]
  int64_t begin = 0;
  int64_t size = 0;
};

using Payloads = absl::InlinedVector<Payload, 4>;  // few messages have more

struct SplitMessage {
  std::string rest;   // the message without its payloads
  Payloads payloads;  // in wire order; for a singular field, the last one counts
};

// Limits on a message without the bytes of its payloads, because the objects of generated code are
// up to a hundred times larger than the serialized bytes.
struct SplitLimits {
  int64_t rest_bytes = 64 * 1024;
  size_t payloads = 64;
};

// Returns InvalidArgument if the bytes are malformed, with the position, or exceed the limits.
// REQUIRES: `message` has `size` bytes.
absl::StatusOr<SplitMessage> Split(const SlicedBytes& message, int64_t size,
                                   const MessageSchema& schema, const SplitLimits& limits = {});

// Appends the tag and length that precede a field of `size` bytes.
void AppendFieldHeader(int number, int64_t size, std::string& out);
// Returns the size of that tag and length.
int64_t FieldHeaderSize(int number, int64_t size);

}  // namespace rapt::wire

#endif  // RAPT_BASE_WIRE_FORMAT_H_
