// The way to a server: which one, how long to wait, what to say when there is none.
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
  ServerFlags();  // from RAPT_ADDRESS and RAPT_TLS_CA, where those are set

  std::string address;
  double timeout_s = 60;
  bool tls = false;  // any of the next four means it too
  std::string tls_ca, tls_cert, tls_key, tls_name;
  std::string token_file;

  // Their rows in a command's table.
  std::vector<Flag> Table();
};

// For one connection. InvalidArgument for a timeout that is none, or a file that can't be read.
absl::StatusOr<client::Options> OptionsOf(const ServerFlags& flags);

// A client whose calls take at most the timeout. Unavailable, in words for a person, when nobody
// answers at the address; InvalidArgument for a timeout that is none, or a file that can't be read.
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const ServerFlags& flags);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_SERVER_CONNECTION_H_
