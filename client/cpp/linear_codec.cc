#include "client/cpp/linear_codec.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

using Request = v1::LinearAttendRequest;
using Response = v1::LinearAttendResponse;

absl::Status SetTensor(const char* name, const TensorView& view, v1::Tensor* tensor) {
  RAPT_RETURN_IF_ERROR(CheckData(name, view));
  Describe(view, *tensor);
  tensor->set_data(view.data.data(), view.data.size());
  return absl::OkStatus();
}

struct OptionalTensor {
  const char* name;
  std::optional<TensorView> LinearCall::*view;
  v1::Tensor* (Request::*field)();
};
constexpr OptionalTensor kOfTokens[] = {{"decay", &LinearCall::decay, &Request::mutable_decay},
                                        {"beta", &LinearCall::beta, &Request::mutable_beta}};
constexpr OptionalTensor kOfCall[] = {
    {"past_state", &LinearCall::past_state, &Request::mutable_past_state},
    {"projection", &LinearCall::projection, &Request::mutable_projection},
    {"past_normalizer", &LinearCall::past_normalizer, &Request::mutable_past_normalizer}};

absl::Status SetOptional(absl::Span<const OptionalTensor> tensors, const LinearCall& call,
                         Request& request) {
  absl::Status status;
  for (const auto& [name, view, field] : tensors) {
    if (status.ok() && call.*view) status = SetTensor(name, *(call.*view), (request.*field)());
  }
  return status;
}

absl::Status ReadError(const v1::Tensor& message, std::optional<double>& out) {
  float error = 0;
  if (message.dtype() != v1::FP32 || message.data().size() != sizeof(error)) {
    return MalformedResponse("relative_error must be one FP32");
  }
  std::memcpy(&error, message.data().data(), sizeof(error));
  out = error;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Request> EncodeTokens(const LinearCall& call) {
  Request request;
  RAPT_RETURN_IF_ERROR(SetTensor("query", call.query, request.mutable_query()));
  RAPT_RETURN_IF_ERROR(SetTensor("key", call.key, request.mutable_key()));
  RAPT_RETURN_IF_ERROR(SetTensor("value", call.value, request.mutable_value()));
  RAPT_RETURN_IF_ERROR(SetOptional(kOfTokens, call, request));
  request.mutable_nonpad_kv_seqlen()->Add(call.key_lengths.begin(), call.key_lengths.end());
  request.set_want_present_state(call.want_present_state);
  request.set_want_present_normalizer(call.want_present_normalizer);
  return request;
}

absl::StatusOr<Request> Encode(const LinearCall& call) {
  RAPT_ASSIGN_OR_RETURN(Request request, EncodeTokens(call));
  RAPT_RETURN_IF_ERROR(SetOptional(kOfCall, call, request));
  request.set_q_num_heads(call.query_heads);
  request.set_kv_num_heads(call.kv_heads);
  request.set_update_rule(static_cast<v1::UpdateRule>(call.update_rule));
  request.set_scale(call.scale);
  request.set_chunk_size(call.chunk_size);
  request.set_is_causal(call.causal);
  request.set_feature_map(static_cast<v1::FeatureMap>(call.feature_map));
  request.set_normalize(call.normalize);
  if (call.num_features) request.set_num_features(*call.num_features);
  if (call.seed) request.set_seed(*call.seed);
  if (call.state_type) request.set_state_type(ToProto(*call.state_type));
  request.set_error_rows(call.error_rows);
  request.set_priority(call.priority);
  return request;
}

absl::StatusOr<LinearResult> Decode(const LinearCall& call, Response response) {
  LinearResult result;
  std::optional<Tensor> output;
  const struct {
    const char* name;
    bool wanted, given;
    v1::Tensor* message;
    std::optional<Tensor>& out;
  } kTensors[] = {
      {"output", true, response.has_output(), response.mutable_output(), output},
      {"present_state", call.want_present_state, response.has_present_state(),
       response.mutable_present_state(), result.present_state},
      {"present_normalizer", call.want_present_normalizer, response.has_present_normalizer(),
       response.mutable_present_normalizer(), result.present_normalizer}};
  for (const auto& [name, wanted, given, message, out] : kTensors) {
    if (!wanted) continue;
    if (!given) return MalformedResponse(absl::StrCat("no ", name));
    RAPT_ASSIGN_OR_RETURN(out, TakeTensor(name, *message));
  }
  result.output = *std::move(output);
  if (response.has_relative_error()) {
    RAPT_RETURN_IF_ERROR(ReadError(response.relative_error(), result.relative_error));
  }
  ReadPlan(response, result);
  return result;
}

}  // namespace rapt::client
