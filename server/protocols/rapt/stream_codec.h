// Converts AttendStream's messages to the engine's types and back.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_STREAM_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_STREAM_CODEC_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/attention_stream.h"
#include "server/protocols/message_parts.h"

namespace rapt::native {

// Maximum size of the header, with its tensors, and of a chunk's message without its tensors.
inline constexpr int64_t kMaxHeaderBytes = 64 * 1024;
inline constexpr int64_t kMaxChunkFieldBytes = 1024;

// Decodes the first message. Deadline and cancellation are not set. InvalidArgument names the
// field, the value received and the values allowed.
absl::StatusOr<StreamRequest> DecodeStreamHeader(const MessageBytes& message);

// Returns the size of the largest chunk message of such a stream.
int64_t MaxChunkMessageBytes(const ChunkedPlan& plan);

// ResourceExhausted if a chunk in either direction would not fit into a message.
absl::Status CheckMessageSizes(const ChunkedPlan& plan, int64_t max_message_bytes);

// The expected order of the chunks. The plan outlives it.
class ChunkOrder {
 public:
  explicit ChunkOrder(const ChunkedPlan& plan) : plan_(plan) { SkipCompletedSide(); }

  struct Expected {
    bool is_keys = false;  // K and V; else Q
    bool streams = false;  // else resident
    RowRange rows;
  };
  // Returns the next expected chunk, nullopt after the last one.
  std::optional<Expected> next() const;
  void Advance();

 private:
  // Lengths of the current side.
  int64_t Length() const;
  int64_t ChunkLength() const;
  bool IsKeys() const { return streams_ == plan_.keys_stream(); }
  void SkipCompletedSide();

  const ChunkedPlan& plan_;
  bool streams_ = false;  // the resident side is complete
  int64_t begin_ = 0;
};

// "queries [0, 16)"
std::string ToText(const ChunkOrder::Expected& expected);

// Decodes a later message, which must be `expected`. The result references the message's bytes.
// InvalidArgument states the chunk expected and the chunk received.
absl::StatusOr<StreamChunk> DecodeChunk(const MessageBytes& message, const ChunkedPlan& plan,
                                        const std::optional<ChunkOrder::Expected>& expected);

// The result of a step: an OutputChunk, or a ScoreChunk if the step computed only scores.
ResponseMessage EncodeOutput(const StepResult& result);

// Encodes the StreamEnd.
ResponseMessage EncodeEnd(const ChunkedPlan& plan, std::chrono::nanoseconds queue_time,
                          std::chrono::nanoseconds compute_time);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_STREAM_CODEC_H_
