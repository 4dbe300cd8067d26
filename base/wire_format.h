// Protocol Buffers' wire format, as far as tensors need it: a message that arrived in slices is
// split into what generated code parses, all but the tensors' bytes, and where those bytes lie.
// Nothing that is large is copied; everything that generated code would accept or refuse is
// accepted or refused, unknown fields and any order of fields included.
#ifndef RAPT_BASE_WIRE_FORMAT_H_
#define RAPT_BASE_WIRE_FORMAT_H_

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/sliced_bytes.h"

namespace rapt::wire {

// Which fields of a message hold payloads. Fields that are not listed stay with the message.
struct MessageSchema;
struct PayloadField {
  int number = 0;
  // Null: a bytes field that is a payload. Else a message field that has payloads inside.
  const MessageSchema* message = nullptr;
};
struct MessageSchema {
  absl::Span<const PayloadField> fields;
};

using FieldPath = absl::InlinedVector<int, 4>;

// A payload's bytes, counted from the message's first one.
struct Payload {
  FieldPath path;  // field numbers from the message down: {7}, or {1, 3}
  int index = 0;   // how many fields of the number path[0] came before
  int64_t begin = 0;
  int64_t size = 0;
};

using Payloads = absl::InlinedVector<Payload, 4>;  // of few messages are there more

struct SplitMessage {
  std::string rest;   // the message without its payloads
  Payloads payloads;  // as they came; of a field that is not repeated, the last one counts
};

// What a message may hold beside the bytes of its payloads. Generated code makes objects of it that
// are up to a hundred times larger than what came.
struct SplitLimits {
  int64_t rest_bytes = 64 * 1024;
  size_t payloads = 64;
};

// InvalidArgument, saying at which byte, where the bytes are no message, and where they are beyond
// the limits. `message` has `size` bytes.
absl::StatusOr<SplitMessage> Split(const SlicedBytes& message, int64_t size,
                                   const MessageSchema& schema, const SplitLimits& limits = {});

// The bytes that announce a field of `size` bytes: its tag and length.
void AppendFieldHeader(int number, int64_t size, std::string& out);
// How many those are.
int64_t FieldHeaderSize(int number, int64_t size);

}  // namespace rapt::wire

#endif  // RAPT_BASE_WIRE_FORMAT_H_
