#include <grpcpp/grpcpp.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "client/cli/json.h"
#include "client/cli/server_connection.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace rapt {
namespace {

using TensorMetadata = inference::ModelMetadataResponse::TensorMetadata;

struct ServerInfo {
  inference::ServerMetadataResponse server;
  inference::ModelMetadataResponse model;
};

absl::StatusOr<ServerInfo> Ask(const std::shared_ptr<grpc::Channel>& channel,
                               std::chrono::nanoseconds timeout) {
  const auto stub = inference::GRPCInferenceService::NewStub(channel);
  const auto deadline = std::chrono::system_clock::now() +
                        std::chrono::duration_cast<std::chrono::microseconds>(timeout);
  ServerInfo info;
  grpc::ClientContext server_context;
  server_context.set_deadline(deadline);
  grpc::Status status = stub->ServerMetadata(&server_context, {}, &info.server);
  if (!status.ok()) return FromGrpc(status);
  inference::ModelMetadataRequest request;
  request.set_name("attention");
  grpc::ClientContext model_context;
  model_context.set_deadline(deadline);
  status = stub->ModelMetadata(&model_context, request, &info.model);
  if (!status.ok()) return FromGrpc(status);
  return info;
}

std::string NameTensors(const google::protobuf::RepeatedPtrField<TensorMetadata>& tensors) {
  return absl::StrJoin(tensors, ", ", [](std::string* out, const TensorMetadata& tensor) {
    absl::StrAppend(out, tensor.name());
  });
}

void Print(const ServerInfo& info) {
  absl::PrintF("server      %s %s\n", info.server.name(), info.server.version());
  absl::PrintF("extensions  %s\n", absl::StrJoin(info.server.extensions(), ", "));
  absl::PrintF("model       %s, versions %s\n", info.model.name(),
               absl::StrJoin(info.model.versions(), ", "));
  absl::PrintF("inputs      %s\n", NameTensors(info.model.inputs()));
  absl::PrintF("outputs     %s\n", NameTensors(info.model.outputs()));
}

void WriteTensors(const google::protobuf::RepeatedPtrField<TensorMetadata>& tensors,
                  JsonWriter& json) {
  json.BeginArray();
  for (const TensorMetadata& tensor : tensors) {
    json.BeginObject().Key("name").String(tensor.name());
    json.Key("datatype").String(tensor.datatype()).Key("shape");
    json.Integers({tensor.shape().data(), static_cast<size_t>(tensor.shape_size())}).EndObject();
  }
  json.EndArray();
}

void PrintJson(const ServerInfo& info, const std::string& address) {
  const std::vector<std::string> extensions(info.server.extensions().begin(),
                                            info.server.extensions().end());
  const std::vector<std::string> versions(info.model.versions().begin(),
                                          info.model.versions().end());
  JsonWriter json;
  json.BeginObject().Key("address").String(address).Key("name").String(info.server.name());
  json.Key("version").String(info.server.version()).Key("extensions").Strings(extensions);
  json.Key("model").BeginObject().Key("name").String(info.model.name());
  json.Key("versions").Strings(versions).Key("inputs");
  WriteTensors(info.model.inputs(), json);
  json.Key("outputs");
  WriteTensors(info.model.outputs(), json);
  json.EndObject().EndObject();
  std::puts(json.Take().c_str());
}

}  // namespace

ExitCode RunInfoCommand(CommandArguments arguments) {
  ServerFlags server;
  bool as_json = false;
  CommandLine line{.usage = "rapt info [flags]",
                   .summary = "Tells what a server is: its version, extensions and model.",
                   .flags = server.Table(),
                   .examples = {"rapt info", "rapt info --address 127.0.0.1:8001 --json"}};
  line.flags.push_back({"json", "", "print it as JSON", &as_json});
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  const auto channel = Connect(server);
  if (!channel.ok()) return FailConnect(channel.status());
  const absl::StatusOr<ServerInfo> info = Ask(*channel, server.timeout());
  if (!info.ok()) return FailCall(info.status());
  if (as_json) {
    PrintJson(*info, server.address);
  } else {
    Print(*info);
  }
  return ExitCode::kOk;
}

}  // namespace rapt
