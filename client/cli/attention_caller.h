// Attention calls, wherever they are computed.
#ifndef RAPT_CLIENT_CLI_ATTENTION_CALLER_H_
#define RAPT_CLIENT_CLI_ATTENTION_CALLER_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "rapt/client.h"

namespace rapt {

// Thread-compatible.
class AttentionCaller {
 public:
  virtual ~AttentionCaller() = default;

  // Both block until done. The data of the call's tensors is as long as their shapes say; masks are
  // of bool or a float type. InvalidArgument for a call that makes no sense, whoever finds out.
  virtual absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) = 0;
  virtual absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall& call) = 0;
};

// Computes in this process, on all its cores.
std::unique_ptr<AttentionCaller> NewLocalCaller();

// Asks the server at the other end.
std::unique_ptr<AttentionCaller> NewRemoteCaller(std::unique_ptr<client::Client> server);

// The same, but sends calls in chunks of so many rows, 0: as the library chooses, and shows on the
// terminal how far it is.
std::unique_ptr<AttentionCaller> NewStreamCaller(std::unique_ptr<client::Client> server,
                                                 int64_t chunk);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTENTION_CALLER_H_
