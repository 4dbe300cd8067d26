#include "client/cli/caller_flags.h"

#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {

std::vector<Flag> CallerFlags::Table() {
  std::vector<Flag> table = {
      {"local", "", "compute in this process, without a server", &local},
      {"priority", "N", "1 is the most urgent (default: 0, which counts as 8)", &priority}};
  for (const Flag& flag : server.Table()) table.push_back(flag);
  return table;
}

absl::Status CallerFlags::Check() const {
  if (chunk && !stream) return Invalid("--chunk needs --stream");
  if (stream && local) {
    return Invalid("--stream and --local are mutually exclusive; --stream needs a server");
  }
  if (priority != 0 && local) {
    return Invalid("--priority orders the calls of a server; --local has no server");
  }
  return CheckAtLeastOne("chunk", chunk.value_or(1));
}

absl::StatusOr<std::unique_ptr<client::Client>> CallerFlags::Connect() const {
  RAPT_RETURN_IF_ERROR(Check());
  if (local) return std::unique_ptr<client::Client>();
  return rapt::Connect(server);
}

}  // namespace rapt
