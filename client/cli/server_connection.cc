#include "client/cli/server_connection.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace rapt {
namespace {

constexpr const char* kDefaultAddress = "127.0.0.1:8001";
constexpr double kMaxTimeoutS = 86400;
constexpr std::chrono::seconds kConnectTimeout{5};

std::string DefaultAddress() {
  const char* address = std::getenv("RAPT_ADDRESS");
  return address == nullptr || *address == '\0' ? kDefaultAddress : address;
}

std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // A proxy meant for web pages is no way to a server on loopback or in the same cluster.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

ServerFlags::ServerFlags() : address(DefaultAddress()) {}

std::vector<Flag> ServerFlags::Table() {
  return {
      {"address", "HOST:PORT", "the server (default: RAPT_ADDRESS, else 127.0.0.1:8001)", &address},
      {"timeout", "SECONDS", "for each call (default: 60)", &timeout_s}};
}

std::chrono::nanoseconds ServerFlags::timeout() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(timeout_s));
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const ServerFlags& flags) {
  if (!(flags.timeout_s > 0 && flags.timeout_s <= kMaxTimeoutS)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--timeout is %g; it takes seconds, more than 0 and at most %g",
                        flags.timeout_s, kMaxTimeoutS));
  }
  std::shared_ptr<grpc::Channel> channel = NewChannel(flags.address);
  const auto deadline = std::chrono::system_clock::now() + kConnectTimeout;
  // Refused at once is final here: gRPC would go on trying.
  for (grpc_connectivity_state state = channel->GetState(true); state != GRPC_CHANNEL_READY;
       state = channel->GetState(true)) {
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN ||
        !channel->WaitForStateChange(state, deadline)) {
      return absl::UnavailableError(absl::StrFormat(
          "can't reach a server at %s; start rapt-server there, or name another with --address",
          flags.address));
    }
  }
  return channel;
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace rapt
