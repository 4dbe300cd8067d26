// Messages of the Open Inference Protocol, for the models that rapt.v1 has no typed call for.
#ifndef RAPT_CLIENT_CPP_INFER_CODEC_H_
#define RAPT_CLIENT_CPP_INFER_CODEC_H_

#include "absl/status/statusor.h"
#include "proto/inference/grpc_service.pb.h"
#include "rapt/model.h"

namespace rapt::client {

// InvalidArgument if the data of a tensor does not match its shape.
absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const ModelCall& call);

// Moves the outputs out of the response. Internal if it is malformed or lacks a wanted output.
absl::StatusOr<ModelResult> DecodeInfer(const ModelCall& call,
                                        inference::ModelInferResponse response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_INFER_CODEC_H_
