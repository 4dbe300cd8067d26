#include "client/cpp/infer_codec.h"

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

absl::Status AddInput(absl::string_view name, const TensorView& view,
                      inference::ModelInferRequest& request) {
  RAPT_RETURN_IF_ERROR(CheckData(name, view));
  auto& input = *request.add_inputs();
  input.set_name(std::string(name));
  input.set_datatype(std::string(NameOf(view.dtype)));
  input.mutable_shape()->Add(view.shape.begin(), view.shape.end());
  request.add_raw_input_contents(view.data.data(), view.data.size());
  return absl::OkStatus();
}

void SetParameter(const ModelCall::Value& value, inference::InferParameter& parameter) {
  std::visit(
      [&](const auto& v) {
        using Type = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<Type, bool>) {
          parameter.set_bool_param(v);
        } else if constexpr (std::is_same_v<Type, int64_t>) {
          parameter.set_int64_param(v);
        } else if constexpr (std::is_same_v<Type, uint64_t>) {
          parameter.set_uint64_param(v);
        } else if constexpr (std::is_same_v<Type, double>) {
          parameter.set_double_param(v);
        } else {
          parameter.set_string_param(v);
        }
      },
      value);
}

absl::StatusOr<Tensor> TakeOutput(int index, inference::ModelInferResponse& response) {
  const auto& output = response.outputs(index);
  const std::optional<DType> dtype = DTypeNamed(output.datatype());
  if (!dtype) {
    return MalformedResponse(absl::StrCat(output.name(), " has type '", output.datatype(), "'"));
  }
  Shape shape(output.shape().begin(), output.shape().end());
  std::string& bytes = *response.mutable_raw_output_contents(index);
  RAPT_RETURN_IF_ERROR(
      CheckReceived(output.name(), *dtype, shape, static_cast<int64_t>(bytes.size())));
  return Tensor(*dtype, std::move(shape), std::move(bytes));
}

}  // namespace

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const ModelCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name(call.model);
  for (const auto& [name, view] : call.inputs) {
    RAPT_RETURN_IF_ERROR(AddInput(name, view, request));
  }
  for (const auto& [name, value] : call.parameters) {
    SetParameter(value, (*request.mutable_parameters())[name]);
  }
  for (const std::string& name : call.outputs) request.add_outputs()->set_name(name);
  return request;
}

absl::StatusOr<ModelResult> DecodeInfer(const ModelCall& call,
                                        inference::ModelInferResponse response) {
  if (response.outputs_size() != response.raw_output_contents_size()) {
    return MalformedResponse("each output must have its contents");
  }
  ModelResult result;
  for (int n = 0; n < response.outputs_size(); ++n) {
    RAPT_ASSIGN_OR_RETURN(Tensor output, TakeOutput(n, response));
    const std::string& name = response.outputs(n).name();
    const bool is_wanted = call.outputs.empty() || absl::c_linear_search(call.outputs, name);
    if (!is_wanted || !result.outputs.emplace(name, std::move(output)).second) {
      return MalformedResponse(
          absl::StrCat(name, is_wanted ? " comes twice" : " was not asked for"));
    }
  }
  for (const std::string& name : call.outputs) {
    if (result.outputs.count(name) == 0) return MalformedResponse(absl::StrCat("no ", name));
  }
  return result;
}

}  // namespace rapt::client
