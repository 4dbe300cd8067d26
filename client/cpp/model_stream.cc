#include "client/cpp/model_stream.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cpp/codec.h"
#include "proto/rapt/v1/attention.pb.h"

namespace rapt::client {
namespace {

namespace pb = google::protobuf;

constexpr absl::string_view kWant = "want_";

bool HoldsTensor(const pb::FieldDescriptor& field) {
  return field.is_repeated() || field.message_type() == v1::Tensor::descriptor();
}

// Returns the field of an "input", an "output" or a "parameter".
absl::StatusOr<const pb::FieldDescriptor*> FieldOf(const pb::Descriptor& message,
                                                   absl::string_view kind, absl::string_view name) {
  std::vector<std::string> names;
  for (int n = 0; n < message.field_count(); ++n) {
    const pb::FieldDescriptor* const field = message.field(n);
    if (HoldsTensor(*field) == (kind == "parameter")) continue;
    if (absl::StartsWith(field->name(), kWant)) continue;
    if (absl::EqualsIgnoreCase(field->name(), name)) return field;
    names.push_back(field->name());
  }
  return Invalid("unknown ", kind, " ", name, "; it must be one of ", absl::StrJoin(names, ", "));
}

absl::Status SetTensor(const TensorView& view, const pb::FieldDescriptor& field,
                       pb::Message& request) {
  RAPT_RETURN_IF_ERROR(CheckData(field.name(), view));
  const pb::Reflection& set = *request.GetReflection();
  if (!field.is_repeated()) {
    auto& tensor = static_cast<v1::Tensor&>(*set.MutableMessage(&request, &field));
    Describe(view, tensor);
    tensor.set_data(view.data.data(), view.data.size());
    return absl::OkStatus();
  }
  if (view.dtype != DType::kInt64) {
    return Invalid(field.name(), " has type ", NameOf(view.dtype), "; it must be INT64");
  }
  for (size_t n = 0; n < view.data.size(); n += sizeof(int64_t)) {
    int64_t value;
    std::memcpy(&value, view.data.data() + n, sizeof(value));
    set.AddInt64(&request, &field, value);
  }
  return absl::OkStatus();
}

std::string TextOf(const ModelCall::Value& value) {
  if (const auto* const real = std::get_if<double>(&value)) return absl::StrFormat("%.17g", *real);
  return std::visit([](const auto& v) { return absl::StrCat(v); }, value);
}

// Returns UPDATE_DELTA for "delta", and FP16 for ONNX's code 10; empty if there is none.
std::string NameIn(const pb::EnumDescriptor& type, const std::string& text) {
  for (const DTypeInfo& info : kDTypes) {
    if (&type != v1::DataType_descriptor() || absl::StrCat(info.onnx) != text) continue;
    return std::string(info.name);
  }
  std::string name;
  for (int n = 0; n < type.value_count(); ++n) {
    const std::string& candidate = type.value(n)->name();
    if (!absl::EndsWithIgnoreCase(candidate, absl::StrCat("_", text))) continue;
    if (name.empty() || candidate.size() < name.size()) name = candidate;
  }
  return name;
}

class NoErrors final : public pb::io::ErrorCollector {
  void AddError(int, int, const std::string&) override {}
};

absl::Status SetParameter(const ModelCall::Value& value, const pb::FieldDescriptor& field,
                          pb::Message& request) {
  const pb::EnumDescriptor* const choices = field.enum_type();
  const std::string text = TextOf(value);
  NoErrors errors;  // which the parser would log
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (parser.ParseFieldValueFromString(choices != nullptr ? NameIn(*choices, text) : text, &field,
                                       &request)) {
    return absl::OkStatus();
  }
  return Invalid("parameter ", field.name(), " is ", text, "; it must be of type ",
                 choices != nullptr ? choices->full_name() : field.type_name());
}

// One call on a connection.
class LinearAttendStream final : public ModelStream {
 public:
  LinearAttendStream(Connections& connections, const Deadline& deadline, std::stop_token stop)
      : connections_(connections),
        connection_(connections.LeastBusy()),
        stop_(std::move(stop)),
        stream_(Start(*connection_, deadline, context_)),
        on_stop_(stop_, Cancel{&context_}) {}
  ~LinearAttendStream() override {
    if (!has_ended_) Abort({}).IgnoreError();
  }

  absl::StatusOr<ModelResult> Infer(const ModelCall& tokens) override {
    if (has_ended_) return absl::FailedPreconditionError("the stream has ended");
    v1::LinearAttendRequest request;
    const absl::Status encoded =
        EncodeOperator(tokens, *v1::LinearAttendResponse::descriptor(), request);
    if (!encoded.ok()) return Abort(encoded);
    v1::LinearAttendResponse response;
    // After a failed write there is no response; the status says why.
    stream_->Write(request);
    if (!stream_->Read(&response)) {
      RAPT_RETURN_IF_ERROR(End());
      return MalformedResponse("the stream ended early");
    }
    absl::StatusOr<ModelResult> result = DecodeOperator(tokens, response);
    if (!result.ok()) return Abort(result.status());
    return result;
  }

  absl::Status Finish() override {
    if (has_ended_) return absl::FailedPreconditionError("the stream has ended");
    stream_->WritesDone();
    return End();
  }

 private:
  using Stream = grpc::ClientReaderWriter<v1::LinearAttendRequest, v1::LinearAttendResponse>;
  struct Cancel {
    grpc::ClientContext* context;
    void operator()() const { context->TryCancel(); }
  };

  static std::unique_ptr<Stream> Start(const Connection& connection, const Deadline& deadline,
                                       grpc::ClientContext& context) {
    context.set_deadline(deadline.ToGrpc());
    return connection.attention->LinearAttendStream(&context);
  }

  absl::Status End() {
    has_ended_ = true;
    return connections_.FromGrpc(stream_->Finish(), stop_.stop_requested());
  }
  absl::Status Abort(absl::Status why) {
    context_.TryCancel();
    End().IgnoreError();
    return why;
  }

  const Connections& connections_;
  const ConnectionLease connection_;
  const std::stop_token stop_;
  grpc::ClientContext context_;
  const std::unique_ptr<Stream> stream_;
  const std::stop_callback<Cancel> on_stop_;
  bool has_ended_ = false;
};

}  // namespace

absl::Status EncodeOperator(const ModelCall& call, const pb::Descriptor& response,
                            pb::Message& request) {
  const pb::Descriptor& type = *request.GetDescriptor();
  for (const auto& [name, view] : call.inputs) {
    RAPT_ASSIGN_OR_RETURN(const auto* const field, FieldOf(type, "input", name));
    RAPT_RETURN_IF_ERROR(SetTensor(view, *field, request));
  }
  for (const auto& [name, value] : call.parameters) {
    RAPT_ASSIGN_OR_RETURN(const auto* const field, FieldOf(type, "parameter", name));
    RAPT_RETURN_IF_ERROR(SetParameter(value, *field, request));
  }
  for (const std::string& name : call.outputs) {
    RAPT_ASSIGN_OR_RETURN(const auto* const output, FieldOf(response, "output", name));
    const auto* const field = type.FindFieldByName(absl::StrCat(kWant, output->name()));
    if (field != nullptr) request.GetReflection()->SetBool(&request, field, true);
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelResult> DecodeOperator(const ModelCall& call, pb::Message& response) {
  ModelResult result;
  const pb::Reflection& get = *response.GetReflection();
  for (const std::string& name : call.outputs) {
    RAPT_ASSIGN_OR_RETURN(const auto* const field,
                          FieldOf(*response.GetDescriptor(), "output", name));
    if (!get.HasField(response, field)) return MalformedResponse(absl::StrCat("no ", name));
    auto& tensor = static_cast<v1::Tensor&>(*get.MutableMessage(&response, field));
    RAPT_ASSIGN_OR_RETURN(result.outputs[name], TakeTensor(name, tensor));
  }
  const auto text = [&](const char* name) {
    return get.GetString(response, response.GetDescriptor()->FindFieldByName(name));
  };
  result.backend = text("backend");
  result.plan = text("plan");
  return result;
}

std::unique_ptr<ModelStream> NewLinearAttendStream(Connections& connections,
                                                   const Deadline& deadline, std::stop_token stop) {
  return std::make_unique<LinearAttendStream>(connections, deadline, std::move(stop));
}

}  // namespace rapt::client
