// AttendStream's messages to what the engine takes and back.
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

// What a message may have beside its tensors' bytes.
inline constexpr int64_t kMaxHeaderBytes = 64 * 1024;
inline constexpr int64_t kMaxChunkFieldBytes = 1024;

// The first message, without deadline and cancellation. InvalidArgument names the field, what came
// and what is allowed.
absl::StatusOr<StreamRequest> DecodeStreamHeader(const MessageBytes& message);

// The largest message of a chunk that such a stream may send.
int64_t MaxChunkMessageBytes(const ChunkedPlan& plan);

// ResourceExhausted where a message could not hold what such a stream sends or is sent.
absl::Status CheckMessageSizes(const ChunkedPlan& plan, int64_t max_message_bytes);

// In what order the chunks come. The plan outlives it.
class ChunkOrder {
 public:
  explicit ChunkOrder(const ChunkedPlan& plan) : plan_(plan) { SkipWhatIsOver(); }

  struct Expected {
    bool is_keys = false;  // K and V; else Q
    bool streams = false;  // else it stays
    RowRange rows;
  };
  // The chunk that comes next; nothing after the last one.
  std::optional<Expected> next() const;
  void Advance();

 private:
  // Of the tensors that are due now.
  int64_t Length() const;
  int64_t ChunkLength() const;
  bool IsKeys() const { return streams_ == plan_.keys_stream(); }
  void SkipWhatIsOver();

  const ChunkedPlan& plan_;
  bool streams_ = false;  // what stays has come
  int64_t begin_ = 0;
};

// "queries [0, 16)"
std::string ToText(const ChunkOrder::Expected& expected);

// A later message, which has to be that chunk. Refers to the message's bytes. InvalidArgument says
// what was expected and what came.
absl::StatusOr<StreamChunk> DecodeChunk(const MessageBytes& message, const ChunkedPlan& plan,
                                        const std::optional<ChunkOrder::Expected>& expected);

// What a step gave: an OutputChunk, or a ScoreChunk where there are scores alone.
AnswerMessage EncodeOutput(const StepResult& result);

// The StreamEnd.
AnswerMessage EncodeEnd(const ChunkedPlan& plan, std::chrono::nanoseconds queue_time,
                        std::chrono::nanoseconds compute_time);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_STREAM_CODEC_H_
