// Messages of the Open Inference Protocol, for the models that rapt.v1 has no method for.
#ifndef RAPT_CLIENT_CPP_INFER_CODEC_H_
#define RAPT_CLIENT_CPP_INFER_CODEC_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/inference/grpc_service.pb.h"
#include "rapt/layer.h"
#include "rapt/lsh.h"
#include "rapt/positions.h"
#include "rapt/tensor.h"

namespace rapt::client {

// Return InvalidArgument if the data of a tensor does not match its shape.
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const RotaryCall& call);
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const PositionalEncodingCall& call);
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const LshCall& call);
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const LayerCall& call);

// Moves the output of this name out of the response. Internal if the response is malformed or has
// no such output.
absl::StatusOr<Tensor> TakeOutput(absl::string_view name, inference::ModelInferResponse& response);
// Return the wanted outputs likewise.
absl::StatusOr<LshResult> DecodeLsh(const LshCall& call, inference::ModelInferResponse response);
absl::StatusOr<LayerResult> DecodeLayer(const LayerCall& call,
                                        inference::ModelInferResponse response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_INFER_CODEC_H_
