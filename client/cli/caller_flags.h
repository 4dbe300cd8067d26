// Where a call is computed: in this process, or by a server that gets it whole or in chunks.
#ifndef RAPT_CLIENT_CLI_CALLER_FLAGS_H_
#define RAPT_CLIENT_CLI_CALLER_FLAGS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/console/command_line.h"
#include "client/console/server_connection.h"
#include "rapt/client.h"

namespace rapt {

struct CallerFlags {
  bool local = false;
  uint64_t priority = 0;
  ServerFlags server;
  // Only of commands with rows for them.
  bool stream = false;
  std::optional<int64_t> chunk;

  // Returns the rows of a command's table, but for stream and chunk.
  std::vector<Flag> Table();

  // InvalidArgument if the flags contradict each other.
  absl::Status Check() const;

  // Returns the server, or null if the call is computed in this process. Errors are those of
  // Check() and rapt::Connect().
  absl::StatusOr<std::unique_ptr<client::Client>> Connect() const;
};

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CALLER_FLAGS_H_
