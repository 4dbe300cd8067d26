// What a stream has to send that is not framed yet.
#ifndef RAPT_SERVER_WIRE_HTTP2_RESPONSE_QUEUE_H_
#define RAPT_SERVER_WIRE_HTTP2_RESPONSE_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "server/protocols/message_parts.h"
#include "server/wire/output_queue.h"
#include "server/wire/trailers.h"

namespace rapt {

// Messages, and the trailers after them. Not thread-safe.
class ResponseQueue {
 public:
  // Those of the messages.
  int64_t bytes() const { return bytes_; }
  const std::optional<Trailers>& trailers() const { return trailers_; }

  // Appends a message with its prefix of gRPC.
  void Append(ResponseMessage message);
  void End(Trailers trailers) { trailers_ = std::move(trailers); }

  // Moves bytes of messages to `out`. REQUIRES: there are as many.
  void MoveTo(OutputQueue& out, int64_t size);

 private:
  // With room for a prefix, a tensor and the fields after it. Those before first_ are empty.
  absl::InlinedVector<OutputSegment, 3> segments_;
  size_t first_ = 0;
  size_t offset_ = 0;  // moved bytes of the first one
  int64_t bytes_ = 0;
  std::optional<Trailers> trailers_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_RESPONSE_QUEUE_H_
