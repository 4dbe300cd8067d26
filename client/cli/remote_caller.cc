#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "client/cli/attention_caller.h"
#include "client/cli/server_connection.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace rapt {
namespace {

constexpr int64_t kOnnxDouble = 11;  // TensorProto's code, as softmax_precision takes it

class RequestWriter {
 public:
  explicit RequestWriter(inference::ModelInferRequest* request) : request_(*request) {
    request_.set_model_name("attention");
  }

  void Input(const char* name, const TensorSpec& spec, absl::Span<const std::byte> bytes) {
    inference::ModelInferRequest::InferInputTensor& input = *request_.add_inputs();
    input.set_name(name);
    input.set_datatype(std::string(NameOf(spec.dtype)));
    input.mutable_shape()->Add(spec.shape.begin(), spec.shape.end());
    request_.add_raw_input_contents(bytes.data(), bytes.size());
  }
  void Output(const char* name) { request_.add_outputs()->set_name(name); }
  void Attribute(const char* name, bool value) { Parameter(name).set_bool_param(value); }
  void Attribute(const char* name, int64_t value) { Parameter(name).set_int64_param(value); }
  void Attribute(const char* name, double value) { Parameter(name).set_double_param(value); }

 private:
  inference::InferParameter& Parameter(const char* name) {
    return (*request_.mutable_parameters())[name];
  }

  inference::ModelInferRequest& request_;
};

// The protocol has ONNX's two layouts. [B, S, H, D] is one of them by another name: the same bytes
// as [B, S, H * D] with H heads.
TensorSpec JoinHeads(const TensorSpec& spec) {
  return {spec.dtype, {spec.shape[0], spec.shape[1], spec.shape[2] * spec.shape[3]}};
}

absl::Status CheckCanBeSent(const OperatorCall& call) {
  if (call.dropout) {
    return absl::UnimplementedError(
        "dropout is not part of the Open Inference Protocol; --local computes it");
  }
  if (call.alignment == Alignment::kBottomRight) {
    return absl::UnimplementedError(
        "bottom-right alignment is not part of the Open Inference Protocol; --local computes it");
  }
  return absl::OkStatus();
}

void WriteInputs(const OperatorCall& call, const ResolvedCall& resolved,
                 const AttentionInputs& inputs, RequestWriter& writer) {
  const bool joins = resolved.layout == Layout::kBshd;
  writer.Input("Q", joins ? JoinHeads(call.q) : call.q, inputs.q);
  writer.Input("K", joins ? JoinHeads(call.k) : call.k, inputs.k);
  writer.Input("V", joins ? JoinHeads(call.v) : call.v, inputs.v);
  if (call.attn_mask) writer.Input("attn_mask", *call.attn_mask, inputs.mask);
  if (call.past_key) writer.Input("past_key", *call.past_key, inputs.past_key);
  if (call.past_value) writer.Input("past_value", *call.past_value, inputs.past_value);
  if (call.nonpad_kv_seqlen) {
    writer.Input("nonpad_kv_seqlen", *call.nonpad_kv_seqlen, inputs.key_lengths);
  }
  if (joins) {
    writer.Attribute("q_num_heads", resolved.problem.query_heads);
    writer.Attribute("kv_num_heads", resolved.problem.kv_heads);
  } else {
    if (call.q_num_heads) writer.Attribute("q_num_heads", *call.q_num_heads);
    if (call.kv_num_heads) writer.Attribute("kv_num_heads", *call.kv_num_heads);
  }
}

void WriteAttributes(const OperatorCall& call, RequestWriter& writer) {
  if (call.scale) writer.Attribute("scale", *call.scale);
  if (call.softcap != 0) writer.Attribute("softcap", call.softcap);
  if (call.is_causal) writer.Attribute("is_causal", true);
  if (call.left_window_size >= 0) writer.Attribute("left_window_size", call.left_window_size);
  if (call.right_window_size >= 0) writer.Attribute("right_window_size", call.right_window_size);
  if (call.softmax_in_fp64) writer.Attribute("softmax_precision", kOnnxDouble);
  writer.Output("Y");
  if (call.score_output) {
    writer.Attribute("qk_matmul_output_mode", static_cast<int64_t>(*call.score_output));
    writer.Output("qk_matmul_output");
  }
  if (call.wants_lse) writer.Output("lse");
}

// Moves the output's bytes out of the response. Internal where the server did not send what the
// call implies: its shapes are known before.
absl::Status TakeOutput(const char* name, const TensorSpec& expected,
                        inference::ModelInferResponse& response, Tensor* tensor) {
  const absl::StatusOr<int64_t> bytes = ByteSize(name, expected);
  if (!bytes.ok()) return bytes.status();
  for (int i = 0; i < response.outputs_size() && i < response.raw_output_contents_size(); ++i) {
    if (response.outputs(i).name() != name) continue;
    std::string& raw = *response.mutable_raw_output_contents(i);
    if (static_cast<int64_t>(raw.size()) != *bytes) {
      return absl::InternalError(absl::StrFormat("the server sent %d bytes for %s, %d were due",
                                                 raw.size(), name, *bytes));
    }
    *tensor = {expected, std::move(raw)};
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrFormat("the server sent no %s", name));
}

std::string TrailingValue(const grpc::ClientContext& context, const char* key) {
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

class RemoteCaller : public AttentionCaller {
 public:
  RemoteCaller(std::shared_ptr<grpc::Channel> channel, std::chrono::nanoseconds timeout)
      : stub_(inference::GRPCInferenceService::NewStub(channel)), timeout_(timeout) {}

  absl::StatusOr<AttentionReply> Attend(const OperatorCall& call,
                                        const AttentionInputs& inputs) override {
    // What can't be right need not travel.
    const absl::StatusOr<ResolvedCall> resolved = Resolve(call);
    if (!resolved.ok()) return resolved.status();
    if (absl::Status can = CheckCanBeSent(call); !can.ok()) return can;
    inference::ModelInferRequest request;
    RequestWriter writer(&request);
    WriteInputs(call, *resolved, inputs, writer);
    WriteAttributes(call, writer);

    inference::ModelInferResponse response;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::microseconds>(timeout_));
    const auto start = std::chrono::steady_clock::now();
    const grpc::Status status = stub_->ModelInfer(&context, request, &response);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    if (!status.ok()) return FromGrpc(status);

    AttentionReply reply;
    reply.elapsed = elapsed;
    reply.backend = TrailingValue(context, "rapt-backend");
    reply.plan = TrailingValue(context, "rapt-plan");
    absl::Status taken = TakeOutput("Y", resolved->y, response, &reply.y);
    if (taken.ok() && call.score_output) {
      taken = TakeOutput("qk_matmul_output", resolved->scores, response, &reply.scores.emplace());
    }
    if (taken.ok() && call.wants_lse) {
      taken = TakeOutput("lse", resolved->lse, response, &reply.lse.emplace());
    }
    if (!taken.ok()) return taken;
    return reply;
  }

 private:
  std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
  const std::chrono::nanoseconds timeout_;
};

}  // namespace

std::unique_ptr<AttentionCaller> NewRemoteCaller(std::shared_ptr<grpc::Channel> channel,
                                                 std::chrono::nanoseconds timeout) {
  return std::make_unique<RemoteCaller>(std::move(channel), timeout);
}

}  // namespace rapt
