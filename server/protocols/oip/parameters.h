// Request parameters: ONNX attributes by their ONNX names, and the parameters that the Open
// Inference Protocol reserves.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_PARAMETERS_H_
#define RAPT_SERVER_PROTOCOLS_OIP_PARAMETERS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/layer/layer.h"
#include "attention/operator_schema.h"
#include "google/protobuf/map.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/protocols/oip/session.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::oip {

// The parameters of a tensor in shared memory.
inline constexpr char kRegionParameter[] = "shared_memory_region";
inline constexpr char kRegionOffsetParameter[] = "shared_memory_offset";
inline constexpr char kRegionBytesParameter[] = "shared_memory_byte_size";

using ParameterMap = google::protobuf::Map<std::string, inference::InferParameter>;

struct Parameters {
  std::chrono::microseconds timeout{0};  // 0: none
  uint64_t priority = 0;
};

// A call of each kind of model; a message has one of them.
struct Calls {
  explicit Calls(const ModelId& model)
      : call(model.schema != nullptr ? model.schema->new_call() : nullptr) {
    if (model == Model::kLayer) layer.emplace();
    if (model == Model::kAttentionSession) attention.emplace();
  }

  InputMap<std::optional<TensorSpec>>& inputs() {
    return call != nullptr ? call->inputs() : layer ? layer->inputs : attention->inputs;
  }

  std::unique_ptr<SchemaCall> call;  // of an operator; else `layer` or `attention`
  std::optional<LayerCall> layer;
  bool average_attn_weights = false;      // of `layer`
  std::optional<OperatorCall> attention;  // of attention_session
  SessionParameters session;              // beside those of `attention` or `layer`
};

// Returns whether clients may send the request parameter to every model, with any value. It means
// nothing unless the model has a parameter of this name.
bool IsIgnoredParameter(absl::string_view name);

// Sets the attributes of the model's call and returns the other parameters. InvalidArgument, naming
// the parameter, for an unknown one, with those that there are, and for a value of the wrong kind.
// Accepts what ReadValue() does.
absl::StatusOr<Parameters> ReadParameters(const ParameterMap& map, const ModelId& model,
                                          Calls& calls);

// Reads the parameters of a tensor in shared memory. Returns nullopt if it has none of them; it may
// have others, which clients add. `tensor` is its name for errors: "input Q". InvalidArgument as
// above.
absl::StatusOr<std::optional<SharedReference>> ReadTensorParameters(const std::string& tensor,
                                                                    const ParameterMap& map);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_PARAMETERS_H_
