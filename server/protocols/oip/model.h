// The models as the Open Inference Protocol describes them: their names and tensors.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
#define RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/layer/layer.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/models/model_repository.h"
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
  int64_t size = -1;      // of the last axis; -1: any
};

struct ModelInfo {
  ModelId model;
  std::vector<ModelTensor> inputs;
  std::vector<ModelTensor> outputs;
  std::shared_ptr<const Layer> layer = nullptr;  // of a layer

  absl::string_view name() const { return model.name(); }
};

// What a server keeps for its callers.
struct Residence {
  // The time after which a sequence without calls ends. Absent: the server keeps no sequences, and
  // has no attention_session.
  std::optional<std::chrono::nanoseconds> sequence_lease = {};
  // Null: the server has no layers.
  const ModelRepository* repository = nullptr;
};

using ModelInfoPtr = std::shared_ptr<const ModelInfo>;

// The built-in models, in the order of the enumerators.
absl::Span<const ModelInfo> BuiltInModels(const Residence& residence);

// These, and the layers that are loaded, by name.
std::vector<ModelInfoPtr> Models(const Residence& residence);

// Returns NotFound for an unknown model or version; an empty version selects the only one.
absl::StatusOr<ModelInfoPtr> FindModel(absl::string_view name, absl::string_view version,
                                       const Residence& residence);

inference::ModelMetadataResponse Describe(const ModelInfo& model);

// The same tensors as a Triton model configuration. perf_analyzer reads both.
inference::ModelConfig Configure(const ModelInfo& model, const Residence& residence);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
