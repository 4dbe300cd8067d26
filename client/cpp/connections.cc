#include "client/cpp/connections.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cpp/deadline.h"

namespace rapt::client {
namespace {

// Calls go round robin to the servers of the address that report SERVING in Health.Watch. A server
// without that method counts as serving.
constexpr char kServiceConfig[] =
    R"({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})";

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  if (file.good() && !bytes.empty()) return bytes;
  return Invalid("can't read ", path);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsCredentials(const TlsOptions& tls) {
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return Invalid("a TLS certificate and its key must be set together; only one is set");
  }
  grpc::SslCredentialsOptions options;
  for (const auto& [path, pem] : {std::pair(&tls.ca_file, &options.pem_root_certs),
                                  std::pair(&tls.cert_file, &options.pem_cert_chain),
                                  std::pair(&tls.key_file, &options.pem_private_key)}) {
    if (path->empty()) continue;
    RAPT_ASSIGN_OR_RETURN(*pem, ReadFile(*path));
  }
  return grpc::SslCredentials(options);
}

// A call keeps its connection busy, and so does Health.Watch, so that every open connection is
// pinged. See docs/decisions/0019-pings-instead-of-hedging.md.
void SetKeepAlive(const Options& options, grpc::ChannelArguments& arguments) {
  // Unacknowledged data is detected within 20 s. A dead peer on an idle connection takes 6 minutes
  // more, because servers reject pings more frequent than every 5 minutes.
  std::chrono::milliseconds interval = std::chrono::minutes(6);
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  if (options.max_silence.count() > 0) {
    interval = timeout =
        std::chrono::duration_cast<std::chrono::milliseconds>(options.max_silence / 2);
    // The default is 2, until data is sent.
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(interval.count()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, static_cast<int>(timeout.count()));
}

enum class HealthChecks { kOn, kOff };

std::shared_ptr<grpc::Channel> NewChannel(
    const std::string& address, const Options& options,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials, HealthChecks health_checks,
    grpc::ChannelArguments arguments = {}) {
  if (options.tls && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  arguments.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  // Otherwise channels with equal arguments share one connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Reconnects within a retry or two of a restart. gRPC's default initial backoff is 1 s.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // A failed connection resolves the name again. gRPC's default is at most every 30 s, longer than
  // a rollout may take.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  arguments.SetServiceConfigJSON(kServiceConfig);
  arguments.SetInt(GRPC_ARG_INHIBIT_HEALTH_CHECKING, health_checks == HealthChecks::kOff ? 1 : 0);
  // Ends Health.Watch with the connection.
  arguments.SetInt(GRPC_ARG_CLIENT_IDLE_TIMEOUT_MS, 5 * 60 * 1000);
  SetKeepAlive(options, arguments);
  // An HTTP proxy for web traffic can't reach a server on loopback or in the same cluster.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// By default gRPC reads ahead as much as it estimates to be on its way, which on a busy machine can
// be a whole cache.
grpc::ChannelArguments BoundedReadAhead() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  return arguments;
}

}  // namespace

Connection::Connection(std::shared_ptr<grpc::Channel> to_server)
    : channel(std::move(to_server)),
      attention(v1::AttentionService::NewStub(channel)),
      cache(v1::CacheService::NewStub(channel)),
      open_inference(inference::GRPCInferenceService::NewStub(channel)) {}

ConnectionLease::ConnectionLease(Connection& connection) : connection_(&connection) {
  connection.calls_in_flight.fetch_add(1, std::memory_order_relaxed);
}

void ConnectionLease::Release::operator()(Connection* connection) const {
  connection->calls_in_flight.fetch_sub(1, std::memory_order_relaxed);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& address,
                                                                         const Options& options) {
  const bool is_socket = absl::StartsWith(address, "unix:");
  if (options.tls && is_socket) {
    return Invalid("TLS is set, but the address is a Unix domain socket; TLS needs a TCP address");
  }
  if (!options.tls && options.token.empty()) return grpc::InsecureChannelCredentials();
  if (!options.tls && !is_socket) {
    return Invalid("a token needs TLS or a Unix domain socket; it is never sent in plain text");
  }
  // gRPC treats a local socket as secure without any setup on the server.
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> channel =
      options.tls ? TlsCredentials(*options.tls) : grpc::experimental::LocalCredentials(UDS);
  if (!channel.ok() || options.token.empty()) return channel;
  return grpc::CompositeChannelCredentials(*channel, grpc::AccessTokenCredentials(options.token));
}

Connections::Connections(const std::string& address, const Options& options,
                         const std::shared_ptr<grpc::ChannelCredentials>& credentials)
    : address_(address),
      uses_tls_(options.tls.has_value()),
      health_(grpc::health::v1::Health::NewStub(
          NewChannel(address, options, credentials, HealthChecks::kOff))),
      exports_(NewChannel(address, options, credentials, HealthChecks::kOn, BoundedReadAhead())) {
  for (int i = 0; i < options.connections; ++i) {
    connections_.push_back(
        std::make_unique<Connection>(NewChannel(address, options, credentials, HealthChecks::kOn)));
  }
}

absl::Status Connections::WaitUntilReady(std::chrono::nanoseconds timeout) {
  grpc::Channel& channel = *connections_.front()->channel;
  const gpr_timespec deadline = Deadline::After(timeout).ToGrpc();
  for (grpc_connectivity_state state = channel.GetState(true); state != GRPC_CHANNEL_READY;
       state = channel.GetState(true)) {
    // A single refusal is final here; gRPC would keep trying.
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) {
      return absl::UnavailableError(absl::StrCat(
          "no server is ready at ", address_,
          uses_tls_ ? " over TLS, or one side does not trust the other's certificate" : ""));
    }
    if (!channel.WaitForStateChange(state, deadline)) {
      return absl::UnavailableError(absl::StrCat("no server was ready at ", address_, " within ",
                                                 std::chrono::duration<double>(timeout).count(),
                                                 " s"));
    }
  }
  return absl::OkStatus();
}

ConnectionLease Connections::LeastBusy() {
  const auto busy = [](const std::unique_ptr<Connection>& connection) {
    return connection->calls_in_flight.load(std::memory_order_relaxed);
  };
  return ConnectionLease(
      **std::min_element(connections_.begin(), connections_.end(),
                         [&busy](const auto& a, const auto& b) { return busy(a) < busy(b); }));
}

static_assert(static_cast<absl::StatusCode>(grpc::StatusCode::CANCELLED) ==
              absl::StatusCode::kCancelled);
static_assert(static_cast<absl::StatusCode>(grpc::StatusCode::UNAUTHENTICATED) ==
              absl::StatusCode::kUnauthenticated);  // the last one

absl::Status Connections::FromGrpc(const grpc::Status& status, bool was_stopped) const {
  auto code = static_cast<absl::StatusCode>(status.error_code());
  // gRPC returns this to calls that arrive while a server shuts down.
  if (code == absl::StatusCode::kCancelled && !was_stopped) code = absl::StatusCode::kUnavailable;
  if (code != absl::StatusCode::kUnavailable) return absl::Status(code, status.error_message());
  return absl::UnavailableError(absl::StrCat(address_, ": ", status.error_message()));
}

}  // namespace rapt::client
