#include <cstdio>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/console/json.h"
#include "client/console/server_connection.h"

namespace rapt {
namespace {

// The spelling of the gRPC health protocol.
const char* NameOf(client::HealthStatus status) {
  switch (status) {
    case client::HealthStatus::kServing:
      return "SERVING";
    case client::HealthStatus::kNotServing:
      return "NOT_SERVING";
    case client::HealthStatus::kUnknown:
      return "UNKNOWN";
  }
  return "?";
}

}  // namespace

ExitCode RunHealthCommand(CommandArguments arguments) {
  ServerFlags flags;
  std::string service;
  bool as_json = false;
  const CommandLine line{
      .usage = "rapt health [flags]",
      .summary =
          "Checks whether a server is ready. Exits with 0 if it is, 1 if it is not, "
          "3 if no server responds.",
      .flags = Joined(
          {flags.Table(),
           {{"service", "NAME",
             "a single service, e.g. rapt.v1.AttentionService (default: the server)", &service},
            {"json", "", "print the status as JSON", &as_json}}}),
      .examples = {"rapt health", "rapt health --address 127.0.0.1:8001 --json"}};
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments)) return *done;
  const absl::StatusOr<client::HealthStatus> health = CheckHealth(flags, service);
  if (absl::IsUnavailable(health.status()) || absl::IsInvalidArgument(health.status())) {
    return FailConnect(health.status());
  }
  if (!health.ok()) return FailCall(health.status());
  if (as_json) {
    JsonWriter json;
    json.BeginObject().Key("address").String(flags.address).Key("status").String(NameOf(*health));
    std::puts(json.EndObject().Take().c_str());
  } else {
    absl::PrintF("%s\n", NameOf(*health));
  }
  return *health == client::HealthStatus::kServing ? ExitCode::kOk : ExitCode::kCallFailed;
}

}  // namespace rapt
