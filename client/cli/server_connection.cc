#include "client/cli/server_connection.h"

#include <chrono>
#include <cstdlib>
#include <limits>

#include "absl/strings/str_format.h"

namespace rapt {
namespace {

constexpr const char* kDefaultAddress = "127.0.0.1:8001";
constexpr double kMaxTimeoutS = 86400;

std::string DefaultAddress() {
  const char* address = std::getenv("RAPT_ADDRESS");
  return address == nullptr || *address == '\0' ? kDefaultAddress : address;
}

}  // namespace

ServerFlags::ServerFlags() : address(DefaultAddress()) {}

std::vector<Flag> ServerFlags::Table() {
  return {{"address", "HOST:PORT",
           "the server, or unix:PATH (default: RAPT_ADDRESS, else 127.0.0.1:8001)", &address},
          {"timeout", "SECONDS", "for each call (default: 60)", &timeout_s}};
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const ServerFlags& flags) {
  if (!(flags.timeout_s > 0 && flags.timeout_s <= kMaxTimeoutS)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--timeout is %g; it takes seconds, more than 0 and at most %g",
                        flags.timeout_s, kMaxTimeoutS));
  }
  absl::StatusOr<std::unique_ptr<client::Client>> server = client::Client::Connect(
      flags.address, {.default_timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::duration<double>(flags.timeout_s)),
                      .max_message_bytes = std::numeric_limits<int32_t>::max(),
                      .connections = 1});
  if (absl::IsUnavailable(server.status())) {
    return absl::UnavailableError(absl::StrFormat(
        "can't reach a server at %s; start rapt-server there, or name another with --address",
        flags.address));
  }
  return server;
}

}  // namespace rapt
