// Attend's messages to the engine's requests and back.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_CODEC_H_

#include <chrono>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/wire_format.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::native {

struct DecodedCall {
  Request request;
  v1::AttendRequest fields;  // without the tensors' data
};

// The fields of AttendRequest and DiagnoseRequest that hold tensors' bytes.
const wire::MessageSchema& AttendSchema();
const wire::MessageSchema& DiagnoseSchema();

// An AttendRequest. The request reads its tensors where they lie, in `message`, which has to stay
// until the engine is done with it, or in `shared_memory`; only a mask of integers is converted.
// InvalidArgument names the field, what came and what is allowed; NotFound and Unimplemented of
// shared memory.
absl::StatusOr<DecodedCall> DecodeAttend(const MessageBytes& message,
                                         const SharedMemory& shared_memory);

// The call in a DiagnoseRequest, likewise.
absl::StatusOr<DecodedCall> DecodeDiagnose(const MessageBytes& message,
                                           const SharedMemory& shared_memory);

// ResourceExhausted where the answer would exceed what a message can hold.
absl::Status CheckAnswerSize(const DecodedCall& decoded);

// The AttendResponse. `result` is OK and answers `call`, whose outputs are in `places`.
AnswerMessage EncodeResult(const ResolvedCall& call, const v1::OutputPlaces& places,
                           const Result& result);

// The tensor that came as the field `name` of the request.
const v1::Tensor& FindTensor(const v1::AttendRequest& message, absl::string_view name);

// What is to be computed beside the data; of `call` everything that it says.
absl::Status ReadAttention(const v1::Attention& attention, OperatorCall& call);
absl::Status ReadScoreOutput(v1::ScoreOutput output, std::optional<ScoreOutput>& out);

// "direction is 7; it must be KEYS_STREAM (1) or QUERIES_STREAM (2)"
absl::Status UnknownValue(absl::string_view field, int value, absl::string_view allowed);

// "INT32", or the number of an enum value that this server does not know.
std::string NameOf(v1::DataType code);

void WriteTiming(std::chrono::nanoseconds queue_time, std::chrono::nanoseconds compute_time,
                 v1::Timing& timing);

// The library's type of that code; nothing for integers, unknown codes and the unspecified one.
std::optional<DType> ToDType(v1::DataType type);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_CODEC_H_
