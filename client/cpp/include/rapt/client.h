// The C++ client of rapt-server.
//
//     absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect("127.0.0.1:8001");
//     if (!client.ok()) return client.status();
//     absl::StatusOr<AttendResult> result = (*client)->Attend(
//         {.q = View<float>({1, 8, 128, 64}, q),
//          .k = View<float>({1, 2, 128, 64}, k),
//          .v = View<float>({1, 2, 128, 64}, v),
//          .causal = true},
//         {.timeout = std::chrono::seconds(5)});
//     if (!result.ok()) return result.status();
//     absl::Span<const float> y = result->y.values<float>();  // [1, 8, 128, 64]
//
// This header depends on Abseil only.
#ifndef RAPT_CLIENT_RAPT_CLIENT_H_
#define RAPT_CLIENT_RAPT_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "rapt/attend.h"
#include "rapt/model.h"
#include "rapt/reports.h"
#include "rapt/stream.h"
#include "rapt/tensor.h"

namespace rapt::client {

class CacheCalls;

// When a failed attempt is retried. A retry is always safe: the methods here are stateless, and
// those of caches (rapt/cache.h) say what they expect the cache to be. UNAVAILABLE is retried: the
// server drains, restarts or is unreachable. CANCELLED without a stop request is retried too: gRPC
// returns it to calls that arrive while a server shuts down. RESOURCE_EXHAUSTED is retried only on
// request. No other code is retried.
struct RetryPolicy {
  // Including the first one; 1: no retries. By default the delays add up to more than a second, so
  // that calls outlast the resolution of a name whose servers have all been replaced.
  int max_attempts = 7;

  // The delay before the n-th retry is random between half and all of initial_backoff * 2^(n-1),
  // capped at max_backoff. If the retry would start after the deadline, the error is returned at
  // once.
  std::chrono::nanoseconds initial_backoff = std::chrono::milliseconds(50);
  std::chrono::nanoseconds max_backoff = std::chrono::seconds(1);

  // A server over its memory budget may have free memory a moment later. However, a call that can
  // never fit, or that exceeds max_message_bytes, has the same code, and its retries fail too.
  bool retries_resource_exhausted = false;
};

// PEM files. Connect() reads them once.
struct TlsOptions {
  std::string ca_file = {};    // trusted authorities; empty: gRPC's default
  std::string cert_file = {};  // the client's certificate, if the server requires one; empty: none
  std::string key_file = {};   // its private key
  std::string server_name = {};  // in the server's certificate; empty: the host of the address
};

struct Options {
  // Absent: plain text.
  std::optional<TlsOptions> tls = {};

  // Bearer token sent with every call; empty: none. Needs TLS or a Unix domain socket: a token is
  // never sent in plain text.
  std::string token = {};

  // How long Connect() waits for the server; 0: it does not wait, and the first call reports
  // errors.
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(5);

  // For calls without a timeout.
  std::chrono::nanoseconds default_timeout = std::chrono::seconds(60);

  // A server that has not sent anything for this long, not even the acknowledgment of a ping, is
  // considered dead: its calls fail with Unavailable and are retried on other servers. The client
  // pings each server every max_silence / 2 and waits as long. Must exceed the time that the
  // network takes for the contents of socket buffers, a few MiB each way. 1 s to 24 h; 0: a ping
  // every 6 minutes, for proxies that reject frequent ones.
  std::chrono::nanoseconds max_silence = std::chrono::seconds(2);

  // The largest request sent and the largest response accepted, in bytes: 1 to 2^31 - 1. The server
  // has its own limit (ServerInfo::max_message_bytes).
  int64_t max_message_bytes = int64_t{256} << 20;

  // To each server. A call uses the connection with the fewest calls in flight. A connection
  // carries any number of calls, but a single thread at each end reads it.
  int connections = 4;

  RetryPolicy retries = {};

  // Whether Attend() may pass the tensors of large calls through shared memory. The server must be
  // on the same machine (a loopback address or a Unix domain socket) and allow it.
  // AttendResult::path reports which path was used. Needs additional memory of the size of the
  // largest calls, and keeps it for later calls.
  bool shared_memory = true;
};

struct CallOptions {
  // Covers the whole call, including encoding, retries and waits. The server gets the remaining
  // time as its deadline. Absent: Options::default_timeout. If the network fails silently in the
  // middle of a large request, the call may return late by Options::max_silence, or 20 s if that is
  // 0: gRPC holds the request's bytes until it drops the connection.
  std::optional<std::chrono::nanoseconds> timeout = {};

  // When a stop is requested, the call soon returns CANCELLED and the server stops computing.
  std::stop_token stop = {};
};

// The connections to one server, or to several that serve the same address.
//
// Errors, of every method:
// - InvalidArgument: the call is invalid; the message names the field, its value and the values
//   allowed.
// - ResourceExhausted: over the server's memory budget or the message size limit.
// - DeadlineExceeded: the timeout passed.
// - Cancelled: a stop was requested.
// - Unimplemented: the server, or its backend, does not support the call.
// - Unauthenticated: the token is missing or not accepted.
// - Unavailable: no server at the address, it is not ready, or the TLS handshake failed; the
//   message names the address.
// - Internal: a bug in the server, or a malformed response.
//
// A status from the server keeps its code and message; Unavailable gets the address as a prefix.
//
// Thread-safe.
class Client {
 public:
  // `address` is a gRPC target: "127.0.0.1:8001", "dns:///rapt.example:8001",
  // "unix:/run/rapt.sock". If it names several servers, as a DNS name or
  // "ipv4:10.0.0.1:8001,10.0.0.2:8001" can, calls go round robin to those that are ready. A name is
  // resolved again, at most once a second, when a connection ends. InvalidArgument if the options
  // are invalid or name files that can't be read; Unavailable if no server is ready.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address,
                                                         const Options& options = {});

  // Cancels AttendAsync and AttendBackwardAsync calls in flight and waits until their callbacks
  // have run. Then waits at most a second until the server has released the shared memory.
  // REQUIRES: not called from a callback or while another method runs.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Blocks until done. Sends the tensors without copying them. A call too large for one message, by
  // max_message_bytes or by the server's limit, is streamed if possible, and then not retried.
  absl::StatusOr<AttendResult> Attend(const AttendCall& call, const CallOptions& options = {});

  // Like Attend(), in chunks and at any size: the server's memory use does not grow with the
  // lengths. InvalidArgument for present outputs, integer masks and masks of fewer than T keys, and
  // for weights if keys stream. Never retried. Blocks until done.
  absl::StatusOr<AttendResult> AttendStream(const AttendCall& call,
                                            const StreamOptions& stream = {},
                                            const CallOptions& options = {});

  // Returns without waiting for the server. REQUIRES: the bytes that the views in `call` point to
  // stay unchanged until the callback begins; `call` itself may be destroyed. The callback runs
  // exactly once, on a gRPC thread, never inside AttendAsync. It must be short: the thread serves
  // other calls too. It may call AttendAsync, which ends with Cancelled while the client is being
  // destroyed.
  using AttendCallback = absl::AnyInvocable<void(absl::StatusOr<AttendResult>)>;
  void AttendAsync(const AttendCall& call, const CallOptions& options, AttendCallback callback);

  // Returns the gradients of a call's inputs. Sends the tensors in one message, without copying
  // them. Blocks until done.
  absl::StatusOr<BackwardResult> AttendBackward(const BackwardCall& call,
                                                const CallOptions& options = {});

  // Like AttendAsync().
  using BackwardCallback = absl::AnyInvocable<void(absl::StatusOr<BackwardResult>)>;
  void AttendBackwardAsync(const BackwardCall& call, const CallOptions& options,
                           BackwardCallback callback);

  // Explains a call whose result seems wrong. Does not compute the requested outputs. Slower than
  // Attend. Blocks until done.
  absl::StatusOr<Diagnosis> Diagnose(const AttendCall& call, const CallOptions& options = {});
  // Also explains how the gradient flows to Q, K and V. Does not compute other gradients.
  absl::StatusOr<Diagnosis> Diagnose(const BackwardCall& call, const CallOptions& options = {});

  // Returns the memory that self-attention needs at the server, for three ways to compute it.
  // Blocks until done.
  absl::StatusOr<MemoryEstimates> EstimateMemory(const MemoryQuestion& question,
                                                 const CallOptions& options = {});

  // The same for a layer of the server, with its weights.
  absl::StatusOr<MemoryEstimates> EstimateLayerMemory(const LayerMemoryQuestion& question,
                                                      const CallOptions& options = {});

  // Calls a model by its name, an operator or a layer of the server's repository, with all tensors
  // in one message. Blocks until done. NotFound for an unknown model.
  absl::StatusOr<ModelResult> Infer(const ModelCall& call, const CallOptions& options = {});

  // Linear attention over tokens in any number of messages on one call. The timeout covers the
  // whole stream. Never retried. Does not wait for the server: the stream's Infer() reports errors.
  std::unique_ptr<ModelStream> LinearAttendStream(const CallOptions& options = {});

  // Blocks until done.
  absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options = {});

  // Returns the status of a server, ready or not, or of one of its services such as
  // "rapt.v1.AttentionService", by the gRPC health protocol. NotFound for an unknown service. Never
  // retried, since only the current status matters. Blocks until done.
  absl::StatusOr<HealthStatus> CheckHealth(const std::string& service = "",
                                           const CallOptions& options = {});

 private:
  friend class CacheCalls;  // for rapt/cache.h
  class Core;
  template <typename Result>
  class AsyncCall;
  explicit Client(std::unique_ptr<Core> core);

  const std::unique_ptr<Core> core_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_CLIENT_H_
