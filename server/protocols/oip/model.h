// The models as the Open Inference Protocol describes them: their names and tensors.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
#define RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/request.h"

namespace rapt::oip {

inline constexpr char kModelVersion[] = "1";

struct ModelTensor {
  absl::string_view name;
  Role role;    // in Request
  DType dtype;  // if several are accepted, the one that tools should use
  int rank;     // likewise
  bool required = false;
  bool unlisted = false;  // as RoleInfo::unlisted
};

struct ModelInfo {
  Model model;
  std::vector<ModelTensor> inputs;
  std::vector<ModelTensor> outputs;

  absl::string_view name() const { return NameOf(model); }
};

// What a server keeps for its callers.
struct Residence {
  // The time after which a sequence without calls ends. Absent: the server keeps no sequences, and
  // has no attention_session.
  std::optional<std::chrono::nanoseconds> sequence_lease = {};
};

// In the order of the enumerators.
absl::Span<const ModelInfo> Models(const Residence& residence);

// Returns NotFound for an unknown model or version; an empty version selects the only one.
absl::StatusOr<const ModelInfo*> FindModel(absl::string_view name, absl::string_view version,
                                           const Residence& residence);

inference::ModelMetadataResponse Describe(const ModelInfo& model);

// The same tensors as a Triton model configuration. perf_analyzer reads both.
inference::ModelConfig Configure(const ModelInfo& model, const Residence& residence);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
