#include "client/cpp/infer_codec.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

absl::Status AddInput(absl::string_view name, const TensorView& view,
                      inference::ModelInferRequest& request) {
  if (absl::Status status = CheckData(name, view); !status.ok()) return status;
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

std::optional<DType> ParseDType(absl::string_view name) {
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt32}) {
    if (name == NameOf(dtype)) return dtype;
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const RotaryCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name("rotary_embedding");
  absl::Status status = AddInput("X", call.x, request);
  if (status.ok()) status = AddInput("cos_cache", call.cos_cache, request);
  if (status.ok()) status = AddInput("sin_cache", call.sin_cache, request);
  if (status.ok()) status = AddInput("position_ids", call.position_ids, request);
  if (!status.ok()) return status;
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
  absl::Status status = AddInput("X", call.x, request);
  if (status.ok()) status = AddInput("table", call.table, request);
  if (!status.ok()) return status;
  if (call.base) (*request.mutable_parameters())["base"].set_double_param(*call.base);
  return request;
}

absl::StatusOr<inference::ModelInferRequest> EncodeInfer(const LshCall& call) {
  inference::ModelInferRequest request;
  request.set_model_name("lsh_attention");
  absl::Status status = AddInput("QK", call.q, request);
  if (status.ok()) status = AddInput("K", call.k, request);
  if (status.ok()) status = AddInput("V", call.v, request);
  if (status.ok()) status = AddInput("rotations", call.rotations, request);
  if (status.ok()) status = AddLengths(call.key_lengths, request);
  if (!status.ok()) return status;
  auto& parameters = *request.mutable_parameters();
  parameters["form"].set_string_param(call.form == LshForm::kSimple ? "simple" : "reformer");
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
  absl::Status status = AddInput("query", call.query, request);
  if (status.ok()) status = AddInput("key", call.key, request);
  if (status.ok()) status = AddInput("value", call.value, request);
  if (status.ok()) status = AddInput("attn_mask", call.mask, request);
  if (status.ok()) status = AddInput("input_ids", call.input_ids, request);
  if (status.ok()) status = AddLengths(call.key_lengths, request);
  if (!status.ok()) return status;
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
  const std::optional<DType> dtype = ParseDType(output.datatype());
  if (!dtype) return MalformedResponse(absl::StrCat(name, " has type '", output.datatype(), "'"));
  Shape shape(output.shape().begin(), output.shape().end());
  std::string& bytes = *response.mutable_raw_output_contents(index);
  absl::Status status = CheckReceived(name, *dtype, shape, static_cast<int64_t>(bytes.size()));
  if (!status.ok()) return status;
  return Tensor(*dtype, std::move(shape), std::move(bytes));
}

absl::StatusOr<LshResult> DecodeLsh(const LshCall& call, inference::ModelInferResponse response) {
  absl::StatusOr<Tensor> y = TakeOutput("Y", response);
  if (!y.ok()) return y.status();
  LshResult result{.y = *std::move(y), .buckets = std::nullopt};
  if (!call.wants_buckets) return result;
  absl::StatusOr<Tensor> buckets = TakeOutput("buckets", response);
  if (!buckets.ok()) return buckets.status();
  result.buckets = *std::move(buckets);
  return result;
}

absl::StatusOr<LayerResult> DecodeLayer(const LayerCall& call,
                                        inference::ModelInferResponse response) {
  absl::StatusOr<Tensor> y = TakeOutput("Y", response);
  if (!y.ok()) return y.status();
  LayerResult result{.y = *std::move(y), .weights = std::nullopt};
  if (!call.wants_weights) return result;
  absl::StatusOr<Tensor> weights = TakeOutput("weights", response);
  if (!weights.ok()) return weights.status();
  result.weights = *std::move(weights);
  return result;
}

}  // namespace rapt::client
