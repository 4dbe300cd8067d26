#include "server/protocols/oip/model.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "attention/attention_schema.h"
#include "attention/operator_schema.h"
#include "attention/roles.h"

namespace rapt::oip {
namespace {

constexpr char kPlatform[] = "rapt_attention";

ModelInfo Operator(const OperatorSchema& schema) {
  return {.model = ModelId(schema),
          .inputs = {schema.inputs.begin(), schema.inputs.end()},
          .outputs = {schema.outputs.begin(), schema.outputs.end()}};
}

ModelInfo AttentionSession() {
  ModelInfo model{.model = Model::kAttentionSession, .inputs = {}, .outputs = {}};
  for (const ModelTensor& input : AttentionSchema().inputs) {
    const bool has = input.slot == Role::kQ || input.slot == Role::kK || input.slot == Role::kV;
    if (has) model.inputs.push_back(input);
  }
  model.inputs.front().required = false;
  for (const ModelTensor& output : AttentionSchema().outputs) {
    if (output.slot == Role::kY || output.slot == Role::kLse) model.outputs.push_back(output);
  }
  return model;
}

ModelInfo BuiltIn(const ModelId& model) {
  return model.schema == nullptr ? AttentionSession() : Operator(*model.schema);
}

// A pointer to a built-in model.
ModelInfoPtr Unowned(const ModelInfo& model) { return {std::shared_ptr<void>(), &model}; }

// "FP32" is "TYPE_FP32" in a configuration.
inference::DataType TypeInConfiguration(DType dtype) {
  inference::DataType type = inference::TYPE_INVALID;
  inference::DataType_Parse(absl::StrCat("TYPE_", NameOf(dtype)), &type);
  return type;
}

// Of an axis; -1: any.
int64_t LengthOf(const ModelTensor& tensor, int axis) {
  return axis == tensor.rank - 1 ? tensor.size : -1;
}

void Describe(const ModelTensor& tensor, inference::ModelMetadataResponse::TensorMetadata& out) {
  out.set_name(std::string(tensor.name));
  out.set_datatype(std::string(NameOf(tensor.dtype)));
  for (int axis = 0; axis < tensor.rank; ++axis) out.add_shape(LengthOf(tensor, axis));
}

template <typename TensorConfig>
void Configure(const ModelTensor& tensor, TensorConfig& config) {
  config.set_name(std::string(tensor.name));
  config.set_data_type(TypeInConfiguration(tensor.dtype));
  for (int axis = 0; axis < tensor.rank; ++axis) config.add_dims(LengthOf(tensor, axis));
}

// Whether calls of the model are usually those of a sequence.
bool HasSequences(const ModelInfo& model, const ModelContext& context) {
  if (model.model == Model::kAttentionSession) return true;
  return model.layer != nullptr && context.sequence_lease && model.layer->config().is_causal &&
         CheckCache(*model.layer).ok();
}

// "'attention', 'a'", as Models() lists them.
std::string KnownNames(const ModelContext& context) {
  std::vector<std::string> names;
  for (const ModelInfo& model : BuiltInInfos(context)) {
    names.push_back(absl::StrCat("'", model.name(), "'"));
  }
  if (context.repository != nullptr) {
    for (const ModelInfoPtr& layer : context.repository->loaded()) {
      names.push_back(absl::StrCat("'", layer->name(), "'"));
    }
  }
  return absl::StrJoin(names, ", ");
}

}  // namespace

absl::Span<const ModelInfo> BuiltInInfos(const ModelContext& context) {
  static const auto* const models = [] {
    auto* infos = new std::vector<ModelInfo>;
    for (const ModelId& model : rapt::BuiltInModels()) infos->push_back(BuiltIn(model));
    return infos;
  }();
  absl::Span<const ModelInfo> all = *models;
  if (!context.sequence_lease) all.remove_suffix(1);
  return all;
}

std::vector<ModelInfoPtr> Models(const ModelContext& context) {
  std::vector<ModelInfoPtr> models;
  for (const ModelInfo& model : BuiltInInfos(context)) models.push_back(Unowned(model));
  if (context.repository == nullptr) return models;
  for (ModelInfoPtr& layer : context.repository->loaded()) models.push_back(std::move(layer));
  return models;
}

absl::StatusOr<ModelInfoPtr> FindModel(absl::string_view name, absl::string_view version,
                                       const ModelContext& context) {
  ModelInfoPtr found;
  for (const ModelInfo& model : BuiltInInfos(context)) {
    if (model.name() == name) found = Unowned(model);
  }
  if (found == nullptr && context.repository != nullptr) {
    found = context.repository->Find(name);
  }
  if (found == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("unknown model '", name, "'; this server has ", KnownNames(context)));
  }
  if (!version.empty() && version != kModelVersion) {
    return absl::NotFoundError(absl::StrCat("model '", name, "' has no version '", version,
                                            "'; it has '", kModelVersion, "'"));
  }
  return found;
}

inference::ModelMetadataResponse Describe(const ModelInfo& model) {
  inference::ModelMetadataResponse metadata;
  metadata.set_name(std::string(model.name()));
  metadata.add_versions(kModelVersion);
  metadata.set_platform(kPlatform);
  for (const ModelTensor& input : model.inputs) {
    if (!input.unlisted) Describe(input, *metadata.add_inputs());
  }
  for (const ModelTensor& output : model.outputs) {
    if (!output.unlisted) Describe(output, *metadata.add_outputs());
  }
  return metadata;
}

inference::ModelConfig Configure(const ModelInfo& model, const ModelContext& context) {
  inference::ModelConfig config;
  config.set_name(std::string(model.name()));
  config.set_platform(kPlatform);
  config.set_backend("rapt");
  config.mutable_version_policy()->mutable_latest()->set_num_versions(1);
  config.set_max_batch_size(0);  // the batch is an axis of the tensors themselves
  for (const ModelTensor& tensor : model.inputs) {
    if (tensor.unlisted) continue;
    inference::ModelInput& input = *config.add_input();
    Configure(tensor, input);
    input.set_optional(!tensor.required);
  }
  for (const ModelTensor& output : model.outputs) {
    if (!output.unlisted) Configure(output, *config.add_output());
  }
  if (model.layer != nullptr) {
    (*config.mutable_parameters())["is_causal"].set_string_value(
        model.layer->config().is_causal ? "true" : "false");
  }
  if (HasSequences(model, context)) {
    const auto idle =
        std::chrono::duration_cast<std::chrono::microseconds>(*context.sequence_lease);
    config.mutable_sequence_batching()->set_max_sequence_idle_microseconds(
        static_cast<uint64_t>(idle.count()));
  }
  return config;
}

}  // namespace rapt::oip
