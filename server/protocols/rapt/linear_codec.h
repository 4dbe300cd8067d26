// Converts the messages of LinearAttend to the engine's requests and back.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_LINEAR_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_LINEAR_CODEC_H_

#include "absl/status/statusor.h"
#include "attention/tensor_operator.h"
#include "base/wire_format.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::native {

// The fields of LinearAttendRequest that hold tensor data.
const wire::MessageSchema& LinearSchema();

// As DecodeAttend(). ResourceExhausted if the response would exceed the largest message.
absl::StatusOr<Request> DecodeLinear(const MessageBytes& message,
                                     const SharedMemory& shared_memory);

// Encodes the LinearAttendResponse. REQUIRES: result.status is OK; `result` is that of `op`.
ResponseMessage EncodeLinear(const TensorOperator& op, const Result& result);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_LINEAR_CODEC_H_
