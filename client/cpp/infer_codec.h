// Messages of the Open Inference Protocol, for the models that rapt.v1 has no method for.
#ifndef RAPT_CLIENT_CPP_INFER_CODEC_H_
#define RAPT_CLIENT_CPP_INFER_CODEC_H_

#include "absl/status/statusor.h"
#include "proto/inference/grpc_service.pb.h"
#include "rapt/positions.h"
#include "rapt/tensor.h"

namespace rapt::client {

// Return InvalidArgument if the data of a tensor does not match its shape.
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const RotaryCall& call);
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const PositionalEncodingCall& call);

// Returns the only output; Internal if the response is malformed.
absl::StatusOr<Tensor> DecodeInfer(inference::ModelInferResponse response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_INFER_CODEC_H_
