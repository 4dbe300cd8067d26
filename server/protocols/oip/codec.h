// Converts ModelInfer's messages to the engine's requests and back. Pure functions.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_OIP_CODEC_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/wire_format.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/oip/infer_fields.h"
#include "server/protocols/oip/model.h"
#include "server/protocols/oip/session.h"
#include "server/protocols/shared_tensors.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::oip {

// An output that the request names.
struct RequestedOutput {
  absl::string_view name;  // in the model
  Slot slot;
  TensorSpec spec;
  std::optional<SharedReference> shared = {};  // its destination instead of the response
};

struct DecodedInfer {
  ModelId model;
  Request request;
  std::vector<RequestedOutput> outputs;  // in the requested order
  std::string id;
  // Of a sequence: `request` has neither inputs nor an operator until CompleteSession().
  std::optional<SessionCall> session = {};
  std::unique_ptr<SharedTensors> shared_tensors = {};  // of a session
  std::shared_ptr<const InferFields> fields = {};      // likewise
  int64_t encoding_bytes = 0;                          // request.encoding_bytes
};

// The fields of ModelInferRequest that hold tensor data.
const wire::MessageSchema& InferSchema();

// `now` is when the message arrived, from which its timeout counts. The request reads its tensors
// in place, in `bytes`, which must outlive it, or in `shared_memory`. InvalidArgument names the
// field, the value received and the values allowed; NotFound for an unknown model or region;
// Unimplemented for shared memory if it is disabled; ResourceExhausted if the response would exceed
// the largest message. Sets `reported`, for the report of a failed call, and `id`, for its
// response, as far as they are known, unless they are null.
absl::StatusOr<DecodedInfer> DecodeInfer(const MessageBytes& bytes, Instant now,
                                         const SharedMemory& shared_memory,
                                         ModelId* reported = nullptr,
                                         const ModelContext& context = {},
                                         std::string* id = nullptr);

// The same for a message whose fields another protocol has read, and whose model it has found.
absl::StatusOr<DecodedInfer> DecodeInfer(std::shared_ptr<const InferFields> fields,
                                         const ModelInfo& model, Instant now,
                                         const SharedMemory& shared_memory,
                                         const ModelContext& context);

// Sets the request of a session to `started`, by CachedAttention::Start(), and its outputs.
// Statuses as for DecodeInfer(). REQUIRES: decoded.session is set.
absl::Status CompleteSession(Request started, DecodedInfer& decoded);

// Encodes the ModelInferResponse. REQUIRES: result.status is OK; `result` is that of `decoded`,
// whose request may have been moved away.
ResponseMessage EncodeInfer(const DecodedInfer& decoded, const Result& result);

// The same in a ModelStreamInferResponse, which says that it is the only one of its request.
ResponseMessage EncodeStreamInfer(const DecodedInfer& decoded, const Result& result);
// Encodes a ModelStreamInferResponse with the error of request `id`. It says the same.
ResponseMessage EncodeStreamError(const std::string& id, const absl::Status& status);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_CODEC_H_
