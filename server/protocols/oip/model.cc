#include "server/protocols/oip/model.h"

#include "absl/strings/str_cat.h"

namespace rapt::oip {
namespace {

constexpr char kPlatform[] = "rapt_attention";

struct Tensor {
  const char* name;
  inference::DataType type;  // where several are taken, the one that tools should try
  int rank;                  // likewise
  bool optional;
};

constexpr Tensor kInputs[] = {
    {"Q", inference::TYPE_FP32, 4, false},
    {"K", inference::TYPE_FP32, 4, false},
    {"V", inference::TYPE_FP32, 4, false},
    {"attn_mask", inference::TYPE_BOOL, 4, true},
    {"past_key", inference::TYPE_FP32, 4, true},
    {"past_value", inference::TYPE_FP32, 4, true},
    {"nonpad_kv_seqlen", inference::TYPE_INT64, 1, true},
};

constexpr Tensor kOutputs[] = {
    {"Y", inference::TYPE_FP32, 4, false},
    {"present_key", inference::TYPE_FP32, 4, false},
    {"present_value", inference::TYPE_FP32, 4, false},
    {"qk_matmul_output", inference::TYPE_FP32, 4, false},
    {"lse", inference::TYPE_FP32, 3, false},
};

constexpr int64_t kAnyLength = -1;

// "TYPE_FP32" in a configuration is "FP32" everywhere else.
std::string DatatypeOf(inference::DataType type) {
  constexpr absl::string_view kPrefix = "TYPE_";
  return inference::DataType_Name(type).substr(kPrefix.size());
}

void Describe(const Tensor& tensor, inference::ModelMetadataResponse::TensorMetadata& metadata) {
  metadata.set_name(tensor.name);
  metadata.set_datatype(DatatypeOf(tensor.type));
  for (int axis = 0; axis < tensor.rank; ++axis) metadata.add_shape(kAnyLength);
}

template <typename TensorConfig>
void Configure(const Tensor& tensor, TensorConfig& config) {
  config.set_name(tensor.name);
  config.set_data_type(tensor.type);
  for (int axis = 0; axis < tensor.rank; ++axis) config.add_dims(kAnyLength);
}

}  // namespace

absl::Status CheckModel(absl::string_view name, absl::string_view version) {
  if (name != kModelName) {
    return absl::NotFoundError(
        absl::StrCat("there is no model '", name, "'; this server has '", kModelName, "'"));
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
  for (const Tensor& tensor : kInputs) Describe(tensor, *metadata.add_inputs());
  for (const Tensor& tensor : kOutputs) Describe(tensor, *metadata.add_outputs());
  return metadata;
}

inference::ModelConfig ConfigureModel() {
  inference::ModelConfig config;
  config.set_name(kModelName);
  config.set_platform(kPlatform);
  config.set_backend("rapt");
  config.mutable_version_policy()->mutable_latest()->set_num_versions(1);
  config.set_max_batch_size(0);  // the batch is an axis of the tensors themselves
  for (const Tensor& tensor : kInputs) {
    inference::ModelInput& input = *config.add_input();
    Configure(tensor, input);
    input.set_optional(tensor.optional);
  }
  for (const Tensor& tensor : kOutputs) Configure(tensor, *config.add_output());
  return config;
}

}  // namespace rapt::oip
