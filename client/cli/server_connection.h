// The way to a server: which one, how long to wait, what to say when there is none.
#ifndef RAPT_CLIENT_CLI_SERVER_CONNECTION_H_
#define RAPT_CLIENT_CLI_SERVER_CONNECTION_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/console/command_line.h"
#include "rapt/client.h"

namespace rapt {

struct ServerFlags {
  ServerFlags();  // from RAPT_ADDRESS, where that is set

  std::string address;
  double timeout_s = 60;

  // Their rows in a command's table.
  std::vector<Flag> Table();
};

// A client whose calls take at most the timeout. Unavailable, in words for a person, when nobody
// answers at the address; InvalidArgument for a timeout that is none.
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const ServerFlags& flags);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_SERVER_CONNECTION_H_
