// The requests of a stream of an operator that has a state.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_OPERATOR_STREAM_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_OPERATOR_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/operator_schema.h"
#include "attention/tensor_operator.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/rapt/operator_codec.h"
#include "server/request.h"

namespace rapt::native {

// Each request continues the state of the one before. Not thread-safe.
class OperatorStream {
 public:
  // REQUIRES: the codec's operator has a state.
  explicit OperatorStream(const OperatorCodec& codec)
      : codec_(&codec), call_(codec.schema().new_call()) {}

  // Decodes the next message, which outlives the request, as does this object. InvalidArgument as
  // OperatorCodec::Decode(), and if a later message sets what only the first one may; nothing may
  // be in shared memory. No message may follow one that failed.
  absl::StatusOr<Request> Decode(const MessageBytes& message);

  // Keeps the state and encodes the response. REQUIRES: result.status is OK; `result` is that of
  // the last request.
  ResponseMessage Encode(const Result& result);

  // Bytes kept besides the state, whose memory is that of a result.
  int64_t kept_bytes() const;
  bool has_state() const { return !state_.empty(); }

 private:
  struct Kept {
    Slot slot;
    TensorSpec spec;
    std::vector<std::byte> bytes;
  };

  void Keep(const Request& request);
  void AddKept(Request& request) const;

  const OperatorCodec* codec_;
  std::unique_ptr<SchemaCall> call_;  // with the attributes of the first message
  uint64_t priority_ = 0;
  std::vector<Kept> kept_;                          // inputs of the first message
  std::shared_ptr<const TensorOperator> operator_;  // of the last request
  SlotSet wanted_;                                  // in its response
  std::vector<std::pair<const TensorSchema*, OutputBuffer>> state_;
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_OPERATOR_STREAM_H_
