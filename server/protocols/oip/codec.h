// ModelInfer's messages to the engine's requests and back. Pure functions.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_OIP_CODEC_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/wire_format.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::oip {

// An output that the response has to hold.
struct AskedOutput {
  const char* name;
  TensorSpec spec;
  OutputBuffer Result::*buffer;
  std::optional<SharedReference> shared = {};  // where it goes, instead of into the response
};

struct DecodedInfer {
  Request request;
  std::vector<AskedOutput> outputs;  // in the order asked for
  std::string id;
};

// The fields of ModelInferRequest that hold tensors' bytes.
const wire::MessageSchema& InferSchema();

// `now` is when the message arrived: its timeout counts from there. The request reads its tensors
// where they lie, in `message`, which has to stay until the engine is done with it, or in
// `shared_memory`. InvalidArgument names the field, what came and what is allowed; NotFound for
// another model and for a region; Unimplemented for shared memory where it is not allowed;
// ResourceExhausted where the response would exceed what a message can hold.
absl::StatusOr<DecodedInfer> DecodeInfer(const MessageBytes& message, Instant now,
                                         const SharedMemory& shared_memory);

// The ModelInferResponse. `result` is OK and answers `decoded`, whose request may be gone.
AnswerMessage EncodeInfer(const DecodedInfer& decoded, const Result& result);

// The same as a ModelStreamInferResponse.
AnswerMessage EncodeStreamInfer(const DecodedInfer& decoded, const Result& result);
// One that says what was wrong with the request called `id`.
AnswerMessage EncodeStreamError(const std::string& id, const absl::Status& status);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_CODEC_H_
