// The flags that describe a call: its files, its attributes and where it is computed.
#ifndef RAPT_CLIENT_CLI_CALL_FLAGS_H_
#define RAPT_CLIENT_CLI_CALL_FLAGS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/attend_files.h"
#include "client/cli/attention_caller.h"
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

// Returns the flag of an input without the dashes: "past-key" for past_key, unless the table of
// roles has another.
const std::string& FlagNameOf(Role input);

struct CallFlags {
  CallSources sources;
  std::optional<int64_t> heads, kv_heads;
  std::optional<std::string> layout;
  client::AttendCall attributes;  // those set directly by a flag
  bool bottom_right = false, onnx_alignment = false;
  std::vector<int64_t> window;
  std::optional<double> dropout;
  uint64_t seed = 0;
  bool only_queries_rotate = false;
  std::optional<std::string> pad_ids;
  std::optional<int64_t> pad_token;
  std::optional<std::string> gradients;
  CallerFlags caller;

  // Return the rows of a command's table.
  std::vector<Flag> InputTable();
  std::vector<Flag> AttributeTable();
  Flag OutputGradientFlag();
  std::vector<Flag> GradientTable();  // dY, dlse and the gradients to compute
  std::vector<Flag> ForwardTable();   // the results of the forward pass
  std::vector<Flag> StreamTable();
  std::vector<Flag> CallerTable();
};

// Reads the files and sets the attributes. InvalidArgument or NotFound names the flag or file.
absl::StatusOr<LoadedCall> LoadCall(const CallFlags& flags);

// Returns a caller for this process if --local is set, otherwise connects as Connect() does.
// InvalidArgument if the flags contradict each other.
absl::StatusOr<std::unique_ptr<AttentionCaller>> NewCaller(const CallFlags& flags);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CALL_FLAGS_H_
