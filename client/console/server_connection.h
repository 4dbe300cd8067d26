// The flags that select a server, and the connection to it.
#ifndef RAPT_CLIENT_CONSOLE_SERVER_CONNECTION_H_
#define RAPT_CLIENT_CONSOLE_SERVER_CONNECTION_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/console/command_line.h"
#include "rapt/client.h"

namespace rapt {

struct ServerFlags {
  ServerFlags();  // defaults come from RAPT_ADDRESS and RAPT_TLS_CA

  std::string address;
  double timeout_s = 60;
  bool tls = false;  // implied by any of the next four
  std::string tls_ca, tls_cert, tls_key, tls_name;
  std::string token_file;

  // Returns their rows for a command's table.
  std::vector<Flag> Table();
};

// Returns options with one connection. InvalidArgument if the timeout is out of range or a file
// can't be read.
absl::StatusOr<client::Options> OptionsOf(const ServerFlags& flags);

// Returns a client whose calls take at most the timeout. Unavailable, with advice, if no server is
// ready at the address; InvalidArgument as OptionsOf().
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const ServerFlags& flags);

// Asks a server, ready or not. Unavailable, with advice, if none responds within 5 s or the
// timeout; InvalidArgument as OptionsOf(); NotFound for an unknown service.
absl::StatusOr<client::HealthStatus> CheckHealth(const ServerFlags& flags,
                                                 const std::string& service);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_SERVER_CONNECTION_H_
