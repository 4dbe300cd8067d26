// The requests of a LinearAttendStream.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_LINEAR_STREAM_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_LINEAR_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "attention/tensor_operator.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"

namespace rapt::native {

// The requests of one LinearAttendStream: each continues the state of the one before. Not
// thread-safe.
class LinearStream {
 public:
  // Decodes the next message, which outlives the request, as does this object. InvalidArgument as
  // OperatorCodec::Decode(), and if a later message sets what only the first one may; nothing may
  // be in shared memory. No message may follow one that failed.
  absl::StatusOr<Request> Decode(const MessageBytes& message);

  // Keeps the state and encodes the LinearAttendResponse. REQUIRES: result.status is OK; `result`
  // is that of the last request.
  ResponseMessage Encode(const Result& result);

  // Bytes kept besides the state, whose memory is that of a result.
  int64_t kept_bytes() const { return static_cast<int64_t>(projection_.size()); }
  bool has_state() const { return state_.owner != nullptr; }

 private:
  void KeepProjection(const LinearAttentionCall& call, Request& request);
  void AddKept(LinearAttentionCall& call, Request& request) const;

  LinearAttentionCall call_;  // attributes of the first message, and its projection
  uint64_t priority_ = 0;
  std::vector<std::byte> projection_;
  std::shared_ptr<const TensorOperator> operator_;  // of the last request
  SlotSet wanted_;                                  // in its response
  OutputBuffer state_, normalizer_;
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_LINEAR_STREAM_H_
