#include <grpcpp/grpcpp.h>

#include <cstdio>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/json.h"
#include "client/cli/server_connection.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"

namespace rapt {
namespace {

using HealthResponse = grpc::health::v1::HealthCheckResponse;

absl::StatusOr<HealthResponse> Check(const std::shared_ptr<grpc::Channel>& channel,
                                     std::chrono::nanoseconds timeout, const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  HealthResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::microseconds>(timeout));
  const grpc::Status status =
      grpc::health::v1::Health::NewStub(channel)->Check(&context, request, &response);
  if (!status.ok()) return FromGrpc(status);
  return response;
}

}  // namespace

ExitCode RunHealthCommand(CommandArguments arguments) {
  ServerFlags server;
  std::string service;
  bool as_json = false;
  CommandLine line{.usage = "rapt health [flags]",
                   .summary =
                       "Asks a server whether it is ready for work. Exits with 0 when it is, "
                       "1 when it is not, 3 when nobody answers.",
                   .flags = server.Table(),
                   .examples = {"rapt health", "rapt health --address 127.0.0.1:8001 --json"}};
  line.flags.push_back({"service", "NAME",
                        "one service, as inference.GRPCInferenceService (default: the server)",
                        &service});
  line.flags.push_back({"json", "", "print the answer as JSON", &as_json});
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  const auto channel = Connect(server);
  if (!channel.ok()) return FailConnect(channel.status());
  const absl::StatusOr<HealthResponse> health = Check(*channel, server.timeout(), service);
  if (!health.ok()) return FailCall(health.status());
  const std::string& status = HealthResponse::ServingStatus_Name(health->status());
  if (as_json) {
    JsonWriter json;
    json.BeginObject().Key("address").String(server.address).Key("status").String(status);
    std::puts(json.EndObject().Take().c_str());
  } else {
    absl::PrintF("%s\n", status);
  }
  return health->status() == HealthResponse::SERVING ? ExitCode::kOk : ExitCode::kCallFailed;
}

}  // namespace rapt
