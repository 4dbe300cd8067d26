#include "client/cpp/infer_codec.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

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

absl::Status AddInput(absl::string_view name, const std::optional<TensorView>& view,
                      inference::ModelInferRequest& request) {
  return view ? AddInput(name, *view, request) : absl::OkStatus();
}

absl::Status AddLengths(const std::vector<int64_t>& lengths,
                        inference::ModelInferRequest& request) {
  if (lengths.empty()) return absl::OkStatus();
  const Shape shape = {static_cast<int64_t>(lengths.size())};
  return AddInput("nonpad_kv_seqlen", View<int64_t>(shape, lengths), request);
}

}  // namespace

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const RotaryCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name("rotary_embedding");
  RAPT_RETURN_IF_ERROR(AddInput("X", call.x, request));
  RAPT_RETURN_IF_ERROR(AddInput("cos_cache", call.cos_cache, request));
  RAPT_RETURN_IF_ERROR(AddInput("sin_cache", call.sin_cache, request));
  RAPT_RETURN_IF_ERROR(AddInput("position_ids", call.position_ids, request));
  auto& parameters = *request.mutable_parameters();
  parameters["interleaved"].set_bool_param(call.interleaved);
  parameters["num_heads"].set_int64_param(call.num_heads);
  parameters["rotary_embedding_dim"].set_int64_param(call.rotary_embedding_dim);
  if (call.rope_theta) parameters["rope_theta"].set_double_param(*call.rope_theta);
  return request;
}

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const PositionalEncodingCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name("positional_encoding");
  RAPT_RETURN_IF_ERROR(AddInput("X", call.x, request));
  RAPT_RETURN_IF_ERROR(AddInput("table", call.table, request));
  if (call.base) (*request.mutable_parameters())["base"].set_double_param(*call.base);
  return request;
}

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const LshCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name("lsh_attention");
  RAPT_RETURN_IF_ERROR(AddInput("QK", call.q, request));
  RAPT_RETURN_IF_ERROR(AddInput("K", call.k, request));
  RAPT_RETURN_IF_ERROR(AddInput("V", call.v, request));
  RAPT_RETURN_IF_ERROR(AddInput("rotations", call.rotations, request));
  RAPT_RETURN_IF_ERROR(AddLengths(call.key_lengths, request));
  auto& parameters = *request.mutable_parameters();
  parameters["form"].set_string_param(std::string(NameOf(call.form)));
  parameters["num_hashes"].set_int64_param(call.num_hashes);
  parameters["num_buckets"].set_int64_param(call.num_buckets);
  parameters["chunk_length"].set_int64_param(call.chunk_length);
  parameters["is_causal"].set_bool_param(call.causal);
  if (call.chunks_before) parameters["chunks_before"].set_int64_param(*call.chunks_before);
  if (call.chunks_after) parameters["chunks_after"].set_int64_param(*call.chunks_after);
  if (call.scale) parameters["scale"].set_double_param(*call.scale);
  if (call.seed) parameters["seed"].set_uint64_param(*call.seed);
  if (call.priority != 0) parameters["priority"].set_uint64_param(call.priority);
  request.add_outputs()->set_name("Y");
  if (call.wants_buckets) request.add_outputs()->set_name("buckets");
  return request;
}

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const LayerCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name(call.model);
  RAPT_RETURN_IF_ERROR(AddInput("query", call.query, request));
  RAPT_RETURN_IF_ERROR(AddInput("key", call.key, request));
  RAPT_RETURN_IF_ERROR(AddInput("value", call.value, request));
  RAPT_RETURN_IF_ERROR(AddInput("attn_mask", call.mask, request));
  RAPT_RETURN_IF_ERROR(AddInput("input_ids", call.input_ids, request));
  RAPT_RETURN_IF_ERROR(AddLengths(call.key_lengths, request));
  auto& parameters = *request.mutable_parameters();
  if (call.causal) parameters["is_causal"].set_bool_param(*call.causal);
  if (call.dropout) {
    parameters["dropout_probability"].set_double_param(call.dropout->probability);
    parameters["dropout_seed"].set_uint64_param(call.dropout->seed);
  }
  if (call.averages_weights) parameters["average_attn_weights"].set_bool_param(true);
  if (call.priority != 0) parameters["priority"].set_uint64_param(call.priority);
  request.add_outputs()->set_name("Y");
  if (call.wants_weights) request.add_outputs()->set_name("weights");
  return request;
}

absl::StatusOr<Tensor> TakeOutput(absl::string_view name, inference::ModelInferResponse& response) {
  if (response.outputs_size() != response.raw_output_contents_size()) {
    return MalformedResponse("each output must have its contents");
  }
  int index = 0;
  while (index < response.outputs_size() && response.outputs(index).name() != name) ++index;
  if (index == response.outputs_size()) return MalformedResponse(absl::StrCat("no ", name));
  const auto& output = response.outputs(index);
  const std::optional<DType> dtype = DTypeNamed(output.datatype());
  if (!dtype) return MalformedResponse(absl::StrCat(name, " has type '", output.datatype(), "'"));
  Shape shape(output.shape().begin(), output.shape().end());
  std::string& bytes = *response.mutable_raw_output_contents(index);
  RAPT_RETURN_IF_ERROR(CheckReceived(name, *dtype, shape, static_cast<int64_t>(bytes.size())));
  return Tensor(*dtype, std::move(shape), std::move(bytes));
}

absl::StatusOr<LshResult> DecodeLsh(const LshCall& call, inference::ModelInferResponse response) {
  RAPT_ASSIGN_OR_RETURN(Tensor y, TakeOutput("Y", response));
  LshResult result{.y = std::move(y), .buckets = std::nullopt};
  if (!call.wants_buckets) return result;
  RAPT_ASSIGN_OR_RETURN(result.buckets, TakeOutput("buckets", response));
  return result;
}

absl::StatusOr<LayerResult> DecodeLayer(const LayerCall& call,
                                        inference::ModelInferResponse response) {
  RAPT_ASSIGN_OR_RETURN(Tensor y, TakeOutput("Y", response));
  LayerResult result{.y = std::move(y), .weights = std::nullopt};
  if (!call.wants_weights) return result;
  RAPT_ASSIGN_OR_RETURN(result.weights, TakeOutput("weights", response));
  return result;
}

}  // namespace rapt::client
