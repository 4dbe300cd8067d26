// Attention calls, computed in this process or by a server.
#ifndef RAPT_CLIENT_CLI_ATTENTION_CALLER_H_
#define RAPT_CLIENT_CLI_ATTENTION_CALLER_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "rapt/client.h"

namespace rapt {

// Thread-compatible.
class AttentionCaller {
 public:
  virtual ~AttentionCaller() = default;

  // All block until done. REQUIRES: the data of each tensor matches its shape; masks are bool or
  // float. InvalidArgument for an invalid call.
  virtual absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) = 0;
  virtual absl::StatusOr<client::BackwardResult> AttendBackward(
      const client::BackwardCall& call) = 0;
  virtual absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall& call) = 0;
  virtual absl::StatusOr<client::Diagnosis> Diagnose(const client::BackwardCall& call) = 0;
};

// Computes in this process, on all cores.
std::unique_ptr<AttentionCaller> NewLocalCaller();

// Sends calls to the server. With `chunk`, streams Attend in chunks of that many rows and shows the
// progress on the terminal. If it is 0, the library chooses the rows.
std::unique_ptr<AttentionCaller> NewRemoteCaller(std::unique_ptr<client::Client> server,
                                                 std::optional<int64_t> chunk = std::nullopt);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTENTION_CALLER_H_
