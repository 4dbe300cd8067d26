// ModelInfer's messages to the engine's requests and back. Pure functions.
#ifndef RAPT_SERVER_WIRE_OIP_CODEC_H_
#define RAPT_SERVER_WIRE_OIP_CODEC_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/request.h"

namespace rapt::oip {

// An output that the response has to hold.
struct AskedOutput {
  const char* name;
  TensorSpec spec;
  OutputBuffer Result::*buffer;
};

struct DecodedInfer {
  Request request;
  std::vector<AskedOutput> outputs;  // in the order asked for
};

// `now` is when the message arrived: its timeout counts from there. The request reads its tensors
// where they lie in `message`, which has to stay until the engine is done with it.
// InvalidArgument names the field, what came and what is allowed; NotFound for another model;
// Unimplemented for shared memory; ResourceExhausted where the response would exceed what a message
// can hold.
absl::StatusOr<DecodedInfer> DecodeInfer(const inference::ModelInferRequest& message, Instant now);

// `result` is OK and answers the request that `outputs` came with.
void EncodeInfer(const inference::ModelInferRequest& asked, absl::Span<const AskedOutput> outputs,
                 const Result& result, inference::ModelInferResponse& response);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_CODEC_H_
