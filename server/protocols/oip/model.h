// The model as the Open Inference Protocol describes it: its name and its tensors.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
#define RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/inference/grpc_service.pb.h"

namespace rapt::oip {

inline constexpr char kModelName[] = "attention";
inline constexpr char kModelVersion[] = "1";

// NotFound unless this is the model; an empty version selects the only one.
absl::Status CheckModel(absl::string_view name, absl::string_view version);

inference::ModelMetadataResponse DescribeModel();

// The same tensors as a Triton model configuration. perf_analyzer reads both.
inference::ModelConfig ConfigureModel();

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
