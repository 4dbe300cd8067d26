// The models as the Open Inference Protocol describes them: their names and tensors.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
#define RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_

#include <chrono>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/models/model_info.h"
#include "server/models/model_repository.h"
#include "server/request.h"

namespace rapt::oip {

inline constexpr char kModelVersion[] = "1";

// What decides which models a server has.
struct ModelContext {
  // The time after which a sequence without calls ends. Absent: the server keeps no sequences, and
  // has no attention_session.
  std::optional<std::chrono::nanoseconds> sequence_lease = {};
  // Null: the server has no layers.
  const ModelRepository* repository = nullptr;
};

// The built-in models, attention_session last.
absl::Span<const ModelInfo> BuiltInInfos(const ModelContext& context);

// These, and the layers that are loaded, by name.
std::vector<ModelInfoPtr> Models(const ModelContext& context);

// Returns NotFound for an unknown model or version; an empty version selects the only one.
absl::StatusOr<ModelInfoPtr> FindModel(absl::string_view name, absl::string_view version,
                                       const ModelContext& context);

inference::ModelMetadataResponse Describe(const ModelInfo& model);

// The same tensors as a Triton model configuration. perf_analyzer reads both.
inference::ModelConfig Configure(const ModelInfo& model, const ModelContext& context);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_MODEL_H_
