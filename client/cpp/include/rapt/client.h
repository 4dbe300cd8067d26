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
// Needs Abseil alone to be compiled against.
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
#include "rapt/reports.h"
#include "rapt/stream.h"
#include "rapt/tensor.h"

namespace rapt::client {

// When a failed attempt is made again. Every method is stateless, so that repeating one is safe
// whatever became of the first attempt. UNAVAILABLE is retried: the server drains, restarts or went
// away; so is CANCELLED where nobody stopped the call, which is how gRPC meets those that come last
// to a server that leaves. Nothing else is, but for RESOURCE_EXHAUSTED where the caller says so.
struct RetryPolicy {
  int max_attempts = 4;  // the first one counts; 1: no retries

  // The wait before the n-th retry is random between half and all of initial_backoff * 2^(n-1),
  // never more than max_backoff. A retry that would start after the deadline is not waited for: the
  // caller gets the error at once.
  std::chrono::nanoseconds initial_backoff = std::chrono::milliseconds(50);
  std::chrono::nanoseconds max_backoff = std::chrono::seconds(1);

  // A server over its memory budget may have room a moment later. But what is too large for it
  // always, or for max_message_bytes, has the same code and is then sent in vain.
  bool retries_resource_exhausted = false;
};

// Files in PEM, read once, by Connect().
struct TlsOptions {
  std::string ca_file = {};  // the authorities that a server's certificate counts by; empty: gRPC's
  std::string cert_file = {};  // shown to a server that asks for one, with its key; empty: none
  std::string key_file = {};
  std::string server_name = {};  // that the server's certificate is for; empty: the address's host
};

struct Options {
  // Absent: in plain text.
  std::optional<TlsOptions> tls = {};

  // Sent with every call for a server that asks for one; empty: none. Only by TLS or a Unix domain
  // socket: it never travels in plain text.
  std::string token = {};

  // How long Connect() waits for the server; 0: it does not, the first call finds out.
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(5);

  // For calls that name none.
  std::chrono::nanoseconds default_timeout = std::chrono::seconds(60);

  // The largest request sent and the largest response taken, in bytes: 1 to 2^31 - 1. The server
  // has a limit of its own (ServerInfo::max_message_bytes).
  int64_t max_message_bytes = int64_t{256} << 20;

  // Calls go to the one with the fewest in flight. One connection carries any number of calls, but
  // a thread at either end reads it alone.
  int connections = 4;

  RetryPolicy retries = {};

  // Whether Attend() may put the tensors of large calls into memory that it shares with the server,
  // where that is on the same machine (a loopback address, or a Unix domain socket) and allows it.
  // AttendResult::path says whether it did. Takes as much memory again as the largest calls, and
  // keeps it for those to come.
  bool shared_memory = true;
};

struct CallOptions {
  // From the start of the call to its end, encoding, retries and waits included; the server gets
  // what is left as its deadline. Absent: Options::default_timeout. Where a machine on the way
  // falls silent in the midst of a large request, the end may come up to 20 s late: the call's
  // bytes are still being written, until the connection is given up.
  std::optional<std::chrono::nanoseconds> timeout = {};

  // Where a stop is requested, the call ends soon with CANCELLED, and the server stops computing.
  std::stop_token stop = {};
};

// The connections to one server.
//
// Errors, of every method:
// - InvalidArgument: the call is wrong; the message names the field, what came and what is allowed.
// - ResourceExhausted: over the server's memory budget, or a message over the limit of its size.
// - DeadlineExceeded: the timeout passed.
// - Cancelled: a stop was requested.
// - Unimplemented: the server, or its backend, can't do this.
// - Unauthenticated: the server asks for a token, or for another one.
// - Unavailable: no server at the address, or it is not ready, or TLS is not agreed on; the message
//   names the address.
// - Internal: a bug of the server, or an answer that contradicts itself.
//
// A status that the server sent keeps its code and message; Unavailable puts the address before it.
//
// Thread-safe.
class Client {
 public:
  // `address` is a gRPC target: "127.0.0.1:8001", "dns:///rapt.example:8001",
  // "unix:/run/rapt.sock". Where it stands for several servers, as a DNS name or
  // "ipv4:10.0.0.1:8001,10.0.0.2:8001" may, calls go round among those that answer. InvalidArgument
  // for options that make no sense or name files that can't be read; Unavailable when no server
  // answers there.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& address,
                                                         const Options& options = {});

  // Cancels the AttendAsync calls that are in flight and waits until their callbacks have run;
  // then, a second at most, until the server lets go of the memory that it shares with this client.
  // Must run neither in a callback nor while another method runs.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Blocks until done. The bytes that the call's views point at are sent from where they are. A
  // call that is too large for one message, by max_message_bytes or by the server's limit, goes as
  // a stream where it can, and then is not retried.
  absl::StatusOr<AttendResult> Attend(const AttendCall& call, const CallOptions& options = {});

  // The same in chunks, at any size: the server's memory does not grow with the lengths. Present
  // outputs, masks of integers and masks of fewer than T keys are InvalidArgument, and so are
  // weights where keys stream. Never made again after a failure. Blocks until done.
  absl::StatusOr<AttendResult> AttendStream(const AttendCall& call,
                                            const StreamOptions& stream = {},
                                            const CallOptions& options = {});

  // Returns without waiting for the server. `call` need not stay, but the bytes that its views
  // point at have to, unchanged, until the callback begins: they are sent from where they are. The
  // callback runs exactly once, on a thread of gRPC's, never inside AttendAsync; while it runs,
  // that thread serves no other call, so it has to be short. It may call AttendAsync; while the
  // client is being destroyed that ends with Cancelled.
  using AttendCallback = absl::AnyInvocable<void(absl::StatusOr<AttendResult>)>;
  void AttendAsync(const AttendCall& call, const CallOptions& options, AttendCallback callback);

  // What the server makes of a call whose result seems wrong. The outputs that the call asks for
  // are not computed. Slower than Attend. Blocks until done.
  absl::StatusOr<Diagnosis> Diagnose(const AttendCall& call, const CallOptions& options = {});

  // How many bytes self-attention takes there, by three ways of computing it. Blocks until done.
  absl::StatusOr<MemoryEstimates> EstimateMemory(const MemoryQuestion& question,
                                                 const CallOptions& options = {});

  // Blocks until done.
  absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options = {});

  // By the gRPC health protocol, of the server as a whole or of one of its services as
  // "rapt.v1.AttentionService". NotFound for a service it does not know. Never retried: the answer
  // is about now. Blocks until done.
  absl::StatusOr<HealthStatus> CheckHealth(const std::string& service = "",
                                           const CallOptions& options = {});

 private:
  class Core;
  class AsyncAttend;
  explicit Client(std::unique_ptr<Core> core);

  const std::unique_ptr<Core> core_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_CLIENT_H_
