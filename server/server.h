// rapt-server as an object, which main() and tests start.
#ifndef RAPT_SERVER_SERVER_H_
#define RAPT_SERVER_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/options.h"

namespace rapt {

// Not thread-safe. Destruction cancels the calls in flight, unless Drain() has returned.
class Server {
 public:
  // Checks the options against this machine, opens the GPU if they request one, and reads
  // certificates and tokens. Does not listen yet. Returns an error that names the flag, or
  // Cancelled if a stop signal interrupted the opening of the GPU.
  // REQUIRES: options from ParseOptions(). If they request a GPU, the process has one thread.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const Options& options);

  Server() = default;
  virtual ~Server() = default;
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Serves on return. Returns Unavailable if an address can't be used; Internal if the self-test
  // fails; Cancelled as soon as `stop_requested` returns true; Drain() must be called then too.
  // REQUIRES: called once.
  virtual absl::Status Start(absl::FunctionRef<bool()> stop_requested) = 0;

  // The addresses of clients, with the ports in use: "127.0.0.1:8001,unix:/run/rapt.sock".
  // REQUIRES: Start() has returned OK.
  virtual std::string grpc_address() const = 0;
  virtual std::string metrics_address() const = 0;
  virtual std::string http_address() const = 0;  // empty: HTTP is not served

  // How the gRPC address is secured: "plaintext", "tls", "mtls+tokens".
  virtual std::string security() const = 0;

  virtual int64_t open_calls() const = 0;

  // Reloads tokens and certificates now. Keeps the previous ones if the files are unusable.
  virtual void ReloadFiles() = 0;

  // Withdraws readiness, refuses new calls, waits for those in flight up to the grace period, and
  // shuts down.
  virtual void Drain() = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_SERVER_H_
