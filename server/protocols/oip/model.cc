#include "server/protocols/oip/model.h"

#include "absl/strings/str_cat.h"
#include "attention/roles.h"

namespace rapt::oip {
namespace {

constexpr char kPlatform[] = "rapt_attention";

constexpr int64_t kAnyLength = -1;

// "FP32" is "TYPE_FP32" in a configuration.
inference::DataType TypeInConfiguration(DType dtype) {
  inference::DataType type = inference::TYPE_INVALID;
  inference::DataType_Parse(absl::StrCat("TYPE_", NameOf(dtype)), &type);
  return type;
}

void Describe(Role role, inference::ModelMetadataResponse::TensorMetadata& metadata) {
  const RoleInfo& info = InfoOf(role);
  metadata.set_name(std::string(info.onnx));
  metadata.set_datatype(std::string(NameOf(info.usual_dtype)));
  for (int axis = 0; axis < info.rank; ++axis) metadata.add_shape(kAnyLength);
}

template <typename TensorConfig>
void Configure(Role role, TensorConfig& config) {
  const RoleInfo& info = InfoOf(role);
  config.set_name(std::string(info.onnx));
  config.set_data_type(TypeInConfiguration(info.usual_dtype));
  for (int axis = 0; axis < info.rank; ++axis) config.add_dims(kAnyLength);
}

}  // namespace

absl::Status CheckModel(absl::string_view name, absl::string_view version) {
  if (name != kModelName) {
    return absl::NotFoundError(
        absl::StrCat("unknown model '", name, "'; this server has '", kModelName, "'"));
  }
  if (!version.empty() && version != kModelVersion) {
    return absl::NotFoundError(absl::StrCat("model '", kModelName, "' has no version '", version,
                                            "'; it has '", kModelVersion, "'"));
  }
  return absl::OkStatus();
}

inference::ModelMetadataResponse DescribeModel() {
  inference::ModelMetadataResponse metadata;
  metadata.set_name(kModelName);
  metadata.add_versions(kModelVersion);
  metadata.set_platform(kPlatform);
  for (Role role : kInputs) {
    if (!InfoOf(role).exclusive) Describe(role, *metadata.add_inputs());
  }
  for (Role role : kOutputs) Describe(role, *metadata.add_outputs());
  return metadata;
}

inference::ModelConfig ConfigureModel() {
  inference::ModelConfig config;
  config.set_name(kModelName);
  config.set_platform(kPlatform);
  config.set_backend("rapt");
  config.mutable_version_policy()->mutable_latest()->set_num_versions(1);
  config.set_max_batch_size(0);  // the batch is an axis of the tensors themselves
  for (Role role : kInputs) {
    if (InfoOf(role).exclusive) continue;
    inference::ModelInput& input = *config.add_input();
    Configure(role, input);
    input.set_optional(!InfoOf(role).required);
  }
  for (Role role : kOutputs) Configure(role, *config.add_output());
  return config;
}

}  // namespace rapt::oip
