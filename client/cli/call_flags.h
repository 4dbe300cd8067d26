// The flags that say which call is meant: its files, its attributes and who computes it.
#ifndef RAPT_CLIENT_CLI_CALL_FLAGS_H_
#define RAPT_CLIENT_CLI_CALL_FLAGS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/attend_files.h"
#include "client/cli/attention_caller.h"
#include "client/console/command_line.h"
#include "client/console/server_connection.h"

namespace rapt {

struct CallFlags {
  CallSources sources;
  std::optional<int64_t> heads, kv_heads;
  std::optional<std::string> layout;
  bool causal = false;
  bool bottom_right = false;
  std::vector<int64_t> window;
  double softcap = 0;
  std::optional<double> scale, dropout;
  uint64_t seed = 0;
  bool stream = false;
  std::optional<int64_t> chunk;
  bool local = false;
  uint64_t priority = 0;
  ServerFlags server;

  // Their rows in a command's table, in the order that --help shows: inputs, attributes, who.
  std::vector<Flag> InputTable();
  std::vector<Flag> AttributeTable();
  std::vector<Flag> StreamTable();
  std::vector<Flag> CallerTable();
};

// Reads the files. InvalidArgument or NotFound names the flag or file.
absl::StatusOr<LoadedCall> LoadCall(const CallFlags& flags);

// As Connect(), unless the call is computed here. InvalidArgument for --stream where it is.
absl::StatusOr<std::unique_ptr<AttentionCaller>> NewCaller(const CallFlags& flags);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CALL_FLAGS_H_
